"""Options: flags, environment, defaults, and complaints."""

import argparse
import contextlib
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_grpc.config.flags import add_serve_arguments
from kestrel_grpc.config.options import (
    PRECISIONS,
    ConfigurationError,
    ServerConfig,
    named_values,
    option_names,
    options,
)
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.options import options_of

BY_NAME = {option.name: option for option in options()}


def parse(*arguments: str, **environment: str) -> ServerConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_serve_arguments(parser)
    return ServerConfig.parse(vars(parser.parse_args(arguments)), environment)


def test_nothing_is_required():
    assert parse() == ServerConfig()
    assert parse("--model", "moondream2") == ServerConfig(engine=EngineConfig("moondream2"))


def test_flag_wins_over_environment_which_wins_over_default():
    assert parse("--model", "m", "--port", "1", KESTREL_GRPC_PORT="2").port == 1
    assert parse("--model", "m", KESTREL_GRPC_PORT="2").port == 2
    assert parse(KESTREL_GRPC_MODEL="m").port == 50051


def test_environment_that_a_flag_overrides_is_not_read():
    assert parse("--model", "m", "--port", "1", KESTREL_GRPC_PORT="tcp://10.0.0.1:50051").port == 1


def test_every_problem_is_told_with_its_source():
    with pytest.raises(ConfigurationError) as caught:
        parse("--port", "many", "--device", "tpu", KESTREL_GRPC_DTYPE="int3", KESTREL_GRPC_DRAIN_TIMEOUT="nan")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--device",
        "KESTREL_GRPC_DTYPE",
        "--port",
        "KESTREL_GRPC_DRAIN_TIMEOUT",
    ]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--ageing", "0"),
        ("--port", "-1"),
        ("--max-batch-size", "0"),
        ("--kv-pages", "1.5"),
        ("--page-size", "٣"),
        ("--drain-timeout", "-1"),
        ("--drain-timeout", "inf"),
        ("--model", " "),
        ("--reflection", "maybe"),
        ("--log-level", "loud"),
        ("--max-queue", ""),
        ("--kernels", "resample="),
        ("--kernels", "resample=reference=triton"),
        ("--memory-utilization", "1.1"),
        ("--http-origins", "example.com"),
        ("--triton-shared-memory", "a/b"),
    ],
)
def test_ill_formed_value_is_refused(flag: str, value: str):
    with pytest.raises(ConfigurationError, match=flag):
        parse("--model", "m", f"{flag}={value}")


@given(st.text(max_size=20))
def test_no_text_makes_an_option_raise_anything_else(text: str):
    for option in options():
        with contextlib.suppress(ValueError):
            option.parse(text)


def test_each_setting_is_one_option_with_a_name_of_its_own():
    for kind, others in ((EngineConfig, set[str]()), (ServerConfig, {"engine"})):
        assert {item.name for item in fields(kind)} - others == {name for name, _ in options_of(kind)}
    assert len(BY_NAME) == len(list(options())) == len(option_names())


def test_each_option_of_the_engine_reaches_it():
    config = parse(
        *("--model", "m", "--revision", "main", "--device", "cpu", "--dtype", "float16"),
        *("--max-batch-size", "1", "--kv-pages", "2", "--page-size", "3", "--max-queue", "4"),
        *("--max-image-bytes", "5", "--max-image-pixels", "6", "--preprocess-threads", "7"),
        *(
            "--max-prefill-tokens",
            "8",
            "--max-queue-image-bytes",
            "9",
            "--max-queue-tokens",
            "10",
            "--ageing",
            "0.5",
        ),
        *(
            "--text-backend",
            "fused",
            "--vision-backend",
            "fused-float8",
            "--kv-dtype",
            "float8",
            "--cuda-graphs",
            "off",
        ),
        *("--kernels", "resample=reference, concat_gelu=triton", "--max-crops-per-step", "11"),
        *("--memory-utilization", "0.25", "--memory-limit", "80G", "--resize-on-device", "on"),
    ).engine_config()
    assert (config.text_backend, config.vision_backend, config.kv_dtype) == ("fused", "fused-float8", "float8")
    assert (config.cuda_graphs, config.resize_on_device) == (False, True)
    assert config.kernels == (("resample", "reference"), ("concat_gelu", "triton"))
    assert (config.memory_utilization, config.memory_limit, config.max_crops_per_step) == (0.25, 80 * 2**30, 11)
    assert (config.model, config.revision, config.device, config.dtype) == ("m", "main", "cpu", "float16")
    assert (config.max_batch_size, config.num_kv_pages, config.page_size) == (1, 2, 3)
    assert (config.max_queued_requests, config.max_image_bytes, config.max_image_pixels) == (4, 5, 6)
    assert (config.num_preprocess_threads, config.max_prefill_tokens) == (7, 8)
    assert (config.max_queued_image_bytes, config.max_queued_tokens, config.ageing_s) == (9, 10, 0.5)


def test_switches_are_on_or_off_and_on_where_they_are_only_named():
    assert not parse("--model", "m").tracing
    assert parse("--model", "m", "--tracing").tracing
    assert parse("--model", "m", "--tracing", "on").tracing
    assert not parse("--model", "m", "--tracing", "off", KESTREL_GRPC_TRACING="on").tracing
    assert parse("--model", "m", KESTREL_GRPC_TRACING="on").tracing


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tls-certificate", "a"], "--tls-certificate and --tls-key: each needs the other"),
        (["--tls-key", "a"], "--tls-certificate and --tls-key: each needs the other"),
        (["--tls-client-ca", "a"], "--tls-client-ca: needs --tls-certificate"),
        (["--reflection", "token"], "--reflection token: needs --tokens"),
        (["--triton", "off", "--triton-port", "0"], "--triton-port: needs --triton"),
        (["--http-origins", "https://a.example"], "--http-origins: needs --http-port"),
        (["--http-hosts", "kestrel.lan"], "--http-hosts: needs --http-port or --metrics-port"),
        (
            ["--frontends", "2", "--unix-socket", "/run/kestrel"],
            "--unix-socket: belongs to one process; it needs --frontends 1 or 0",
        ),
        (
            ["--frontends", "2", "--triton-shared-memory", "kestrel"],
            "--triton-shared-memory: belongs to one process; it needs --frontends 1 or 0",
        ),
        (["--devices", "0,1", "--device", "cuda"], "--devices: says what --device would; give one of them"),
        (["--max-message-bytes", "1G"], "--max-receiving-bytes: must be at least --max-message-bytes"),
        (["--cuda-graphs", "on", "--device", "cpu"], "--cuda-graphs: needs a CUDA device and a fused text backend"),
        (
            ["--cuda-graphs", "on", "--text-backend", "plain"],
            "--cuda-graphs: needs a CUDA device and a fused text backend",
        ),
    ],
)
def test_options_that_need_each_other_are_told(arguments: list[str], problem: str):
    with pytest.raises(ConfigurationError) as caught:
        parse("--model", "m", *arguments)
    assert caught.value.problems == (problem,)


TLS = ("--tls-certificate", "a", "--tls-key", "b")


@pytest.mark.parametrize(
    ("devices", "expected"), [("0,1", ("0", "1")), ("all", ("all",)), ("CPU, cpu", ("cpu", "cpu")), ("3", ("3",))]
)
def test_devices_are_gpus_or_processors(devices: str, expected: tuple[str, ...]):
    assert ServerConfig.parse({"devices": devices}, {}).devices == expected


@pytest.mark.parametrize("devices", ["", "0,0", "0,00", "all,0", "cpu,0", "cuda", "-1"])
def test_devices_that_cannot_be_told_apart_are_refused(devices: str):
    with pytest.raises(ConfigurationError, match=r"--devices: '.*' must be different numbers"):
        ServerConfig.parse({"devices": devices}, {})


def test_front_ends_are_a_number_or_auto():
    assert [ServerConfig.parse({"frontends": text}, {}).frontends for text in ("0", "64", "auto")] == [
        0,
        64,
        "auto",
    ]
    for text in ("-1", "65", "many"):
        with pytest.raises(ConfigurationError, match=r"must be a whole number from 0 to 64, or auto"):
            ServerConfig.parse({"frontends": text}, {})


def test_several_processes_are_refused_where_they_cannot_share_a_port(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")
    for flags in ({"frontends": "1"}, {"devices": "cpu,cpu"}, {"devices": "all"}):
        with pytest.raises(ConfigurationError, match="on Linux only"):
            ServerConfig.parse(flags, {})
    for flags in ({"frontends": "0"}, {"frontends": "auto"}, {"devices": "cpu"}):
        ServerConfig.parse(flags, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "2606:4700::1"])
def test_a_public_address_needs_tokens_or_a_certificate_or_a_word(host: str):
    with pytest.raises(ConfigurationError) as caught:
        parse("--model", "m", "--host", host)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--host {host}: anybody could call")
    for remedy in (("--tokens", "t"), TLS, ("--insecure-public",)):
        assert parse("--model", "m", "--host", host, *remedy).host == host


def test_a_public_address_for_operators_needs_tokens_or_a_word():
    public = ("--model", "m", "--admin-port", "0", "--admin-host", "0.0.0.0")
    for arguments in (public, (*public, *TLS)):
        with pytest.raises(ConfigurationError, match=r"--admin-host 0\.0\.0\.0: anybody could call"):
            parse(*arguments)
    for remedy in (("--tokens", "t"), ("--insecure-public",)):
        assert parse(*public, *remedy).admin_port == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_an_address_of_this_machine_needs_nothing(host: str):
    assert parse("--model", "m", "--host", host).host == host


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_image_bytes", "100M", 100 * 2**20),
        ("max_image_bytes", "100MiB", 100 * 2**20),
        ("max_message_bytes", "1G", 2**30),
        ("max_queue_image_bytes", "512K", 2**19),
        ("drain_timeout", "90", 90.0),
        ("drain_timeout", "90s", 90.0),
        ("drain_timeout", "1.5m", 90.0),
        ("image_ttl", "2h", 7200.0),
    ],
)
def test_sizes_and_durations_take_units(name: str, text: str, value: float):
    assert BY_NAME[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("max_image_bytes", text) for text in ("100MB", "M", "1.5M", "-1M", "9G", "100 M", "100m")]
    + [("drain_timeout", text) for text in ("s", "25h", "1d", "-1s", "nans")],
)
def test_a_unit_that_is_ambiguous_or_too_much_is_refused(name: str, text: str):
    with pytest.raises(ValueError, match="must be"):
        BY_NAME[name].parse(text)


def test_default_of_each_option_parses_to_itself():
    """What the table shows as a default can be written as a value."""
    for kind in (ServerConfig(), EngineConfig()):
        for name, option in options_of(kind):
            default = getattr(kind, name)
            if default not in (None, (), "auto"):
                assert option.parse(option.default_text) == default


def test_named_values_are_taken_as_flags_and_what_is_no_option_is_refused():
    assert named_values(["kv-dtype=float8", "--port=0"]) == {"kv_dtype": "float8", "port": "0"}
    with pytest.raises(ConfigurationError) as caught:
        named_values(["ports=0", "x=1"])
    assert caught.value.problems == ("--ports: is no option", "--x: is no option")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--adapters", "/somewhere"), "takes no adapters"),
        (("--text-backend", "fused"), "--text-backend: --deterministic has a backend of its own"),
        (("--vision-backend", "calibrated-float8"), "--vision-backend: --deterministic has a backend of its own"),
        (("--precision", "float8"), "--precision float8"),
        (
            ("--expert-dtype", "int4", "--device", "cuda"),
            "--expert-dtype int4: --deterministic has no such products",
        ),
        (("--kernels", "concat_gelu=reference"), "--kernels: --deterministic has kernels of its own"),
        (("--cuda-graphs", "on", "--device", "cpu"), "--cuda-graphs: needs a CUDA device"),
    ],
)
def test_determinism_contradicts_what_depends_on_the_batch(arguments: tuple[str, str], complaint: str):
    with pytest.raises(ConfigurationError, match=complaint):
        parse("--deterministic", "on", *arguments)
    assert parse("--deterministic", "on").engine_config().deterministic
    assert not parse().engine_config().deterministic


@pytest.mark.parametrize("text", ["org", "org/", "a b/c", ""])
def test_repositories_of_adapters_have_an_owner_and_a_name(text: str):
    given = parse("--adapter-repositories", "Org/Name, other/name.1").engine
    assert given.adapter_repositories == ("Org/Name", "other/name.1")
    with pytest.raises(ConfigurationError, match="must be repositories such as org/name"):
        parse("--adapter-repositories", text)


def formats(precision: str, engine: EngineConfig) -> tuple[str, str, str, str]:
    config = ServerConfig(precision=precision, engine=engine).engine_config()
    return config.dtype, config.text_backend, config.vision_backend, config.kv_dtype


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("auto", ("auto", "auto", "auto", "auto")),
        ("float32", ("float32", "auto", "auto", "auto")),
        ("bfloat16", ("bfloat16", "auto", "auto", "auto")),
        ("float8", ("auto", "fused-float8", "calibrated-float8", "float8")),
    ],
)
def test_a_precision_sets_every_format(precision: str, expected: tuple[str, ...]):
    assert formats(precision, EngineConfig()) == expected
    assert precision in PRECISIONS


def test_a_format_that_is_set_by_its_own_option_stays():
    found = formats("float8", EngineConfig(vision_backend="fused-float8", dtype="bfloat16"))
    assert found == ("bfloat16", "fused-float8", "fused-float8", "float8")


def test_the_log_says_what_was_chosen_and_why():
    line = ServerConfig().precision_line()
    assert line.startswith("precision auto: bfloat16 on a GPU, else float32; float8 has to be asked for, since ")
    line = ServerConfig(precision="bfloat16", engine=EngineConfig(kv_dtype="float8")).precision_line()
    assert line == "precision bfloat16: bfloat16, as asked for; except --kv-dtype float8"


@pytest.mark.parametrize("path", ["", "/run/" + "x" * 103, "/run/" + "é" * 52, "/run/kestrel/", "a\0b"])
def test_the_path_of_a_socket_is_checked_with_the_other_options(path):
    with pytest.raises(ConfigurationError) as refused:
        ServerConfig.parse({"unix_socket": path, "port": "none"}, {})
    assert [problem.partition(":")[0] for problem in refused.value.problems] == ["--port", "--unix-socket"]
    longest = "/run/" + "x" * 98
    assert ServerConfig.parse({"unix_socket": longest}, {}).unix_socket == longest
