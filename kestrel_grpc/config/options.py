"""Defines the options of the server once, each with its range, unit, default and help; engine settings come from
`EngineConfig`.

`ServerConfig` is the list of options and the parsed value. A flag takes precedence over its environment variable,
that over the file of options, and that over the default.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kestrel_grpc.config.sources import Setting, collect, flag_name, security_problems, unknown_flag
from kestrel_grpc.images.image_index import StoreLimits
from kestrel_grpc.images.image_uris import AllowedHost, parse_hosts
from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.options import (
    Option,
    byte_count,
    names,
    on_or_off,
    one_of,
    option,
    options_of,
    positive_seconds,
    seconds_above_zero,
    some_text,
    whole_number,
)

PRECISIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "auto": {},
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "float8": {"text_backend": "fused-float8", "vision_backend": "calibrated-float8", "kv_dtype": "float8"},
    }
)
"""The fields of `EngineConfig` that a precision sets if they are auto, by the name of the precision."""
MAX_FRONTENDS = 64
SOCKETS = "unix"
"""The trusted proxies that connect to the Unix socket."""
_MAPPED_BITS = 96
"""The bits of an IPv6 address before the IPv4 address that is mapped to it."""
_MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
_FORMATS = ("dtype", "text_backend", "vision_backend", "kv_dtype")
"""The settings that a precision selects, unless their own options do."""
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "bfloat16 on a GPU, else float32; float8 has to be asked for, since all of it together costs more"
        " than half a point of accuracy in bench/results and was measured on the built-in model alone",
        "float32": "float32, as asked for",
        "bfloat16": "bfloat16, as asked for",
        "float8": "float8 for the decoder, the image encoder and the key-value cache, as asked for",
    }
)


class ConfigurationError(Exception):
    """Options cannot be used; `problems` has a line for each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _name_prefix(text: str) -> str:
    """Parses the prefix of names of shared memory objects, with or without the slash before it."""
    prefix = text.removeprefix("/")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", prefix) is None:
        raise ValueError("must be letters, digits, dots, hyphens and underscores, beginning with a letter or digit")
    return prefix


def _socket_path(text: str) -> str:
    """Parses the path of a Unix socket."""
    if not 0 < len(os.fsencode(text)) <= _MAX_SOCKET_PATH_BYTES or "\0" in text:
        raise ValueError(f"must be a path of at most {_MAX_SOCKET_PATH_BYTES} bytes, which is what sockets allow")
    if text.endswith("/"):
        raise ValueError("must be the path of a socket, not of a folder")
    return text


def _proxies(text: str) -> tuple[str, ...]:
    """Parses addresses and networks, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    try:
        return tuple(part if part == SOCKETS else str(_network(part)) for part in found)
    except ValueError:
        raise ValueError(
            f"must be addresses or networks such as 192.0.2.1 and 10.0.0.0/8, or {SOCKETS}, separated by commas"
        ) from None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Returns a network. For mapped addresses it is the IPv4 network, since peers are shown by their IPv4
    addresses."""
    network = ipaddress.ip_network(text, strict=False)
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if mapped is None or network.prefixlen < _MAPPED_BITS:
        return network
    return ipaddress.ip_network((mapped, network.prefixlen - _MAPPED_BITS))


def _devices(text: str) -> tuple[str, ...]:
    """Parses the devices of several engines, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    are_gpus = all(re.fullmatch("[0-9]{1,3}", name) for name in found) and len(set(map(int, found))) == len(found)
    if found != ("all",) and set(found) != {"cpu"} and not are_gpus:
        raise ValueError("must be different numbers of GPUs such as 0,1, or all, or cpu once for each engine")
    return found


def _frontends(text: str) -> int | str:
    """Parses a number of processes, or auto."""
    try:
        return text if text == "auto" else whole_number(0, MAX_FRONTENDS)(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _origins(text: str) -> tuple[str, ...]:
    """Parses origins of web pages, separated by commas."""
    found = tuple(part.strip().lower() for part in text.split(","))
    if not all(re.fullmatch(r"https?://[a-z0-9._-]+(:[0-9]+)?", origin) for origin in found):
        raise ValueError("must be origins such as https://example.com, separated by commas")
    return found


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Holds the settings of a server.

    `http_port` is the flag `--http-port`, the variable `KESTREL_GRPC_HTTP_PORT`, and the key `http_port` of the
    file; the same holds for the settings of `engine`.
    """

    config: str | None = option(None, some_text, "file with options, in TOML", default_text="none")
    precision: str = option(
        "auto",
        one_of(*PRECISIONS),
        "number format of everything: float32, bfloat16, float8 (weights, images and key-value cache), or auto: "
        "the default of each part; `--dtype`, `--text-backend`, `--vision-backend` and `--kv-dtype` override it",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    devices: tuple[str, ...] | None = option(
        None,
        _devices,
        "where the model runs, with an engine for each: numbers of GPUs such as `0,1`, `all` GPUs, or `cpu,cpu`",
        default_text="one engine, on --device",
    )
    frontends: int | str = option(
        "auto",
        _frontends,
        "processes that serve calls, apart from those of the engines: a number, 0 for one process that does both,"
        " or auto: a quarter of the processors, at most 4, on a GPU host with 8 or more, else 0",
        unit="processes",
    )
    served_model_name: tuple[str, ...] | None = option(
        None,
        names,
        "further names that requests may give the model, separated by commas; OpenAI's API lists these",
        default_text="none",
    )
    host: str = option(
        "127.0.0.1",
        some_text,
        "address to listen on; one that other machines can reach needs tokens or a certificate",
    )
    port: int = option(50051, whole_number(0, 65_535), "port to listen on; 0 takes a free one and prints it")
    insecure_public: bool = option(
        False,
        on_or_off,
        "whether other machines may reach the server without tokens and encryption: on or off",
    )
    http_port: int | None = option(
        None,
        whole_number(0, 65_535),
        "port for REST and OpenAI clients, probes and metrics over HTTP, on the same address; 0 takes a free one",
        default_text="none",
    )
    http_hosts: tuple[str, ...] | None = option(
        None,
        names,
        "names that HTTP clients call the server by, separated by commas; addresses and `localhost` always work",
        default_text="any with tokens, else none",
    )
    http_origins: tuple[str, ...] | None = option(
        None,
        _origins,
        "sites whose pages may call over HTTP (CORS), such as `https://example.com`, separated by commas",
        default_text="none",
    )
    page: bool = option(
        True,
        on_or_off,
        "whether the HTTP port has a page at `/`, to ask about pictures in a browser: on or off",
    )
    triton: bool = option(
        True,
        on_or_off,
        "whether clients of NVIDIA Triton and KServe v2 are served, on the gRPC port: on or off",
    )
    triton_port: int | None = option(
        None,
        whole_number(0, 65_535),
        "second port for gRPC, on the same address, such as 8001, as clients of Triton expect; 0 takes a free one",
        default_text="none",
    )
    triton_shared_memory: str | None = option(
        None,
        _name_prefix,
        "what names of shared memory objects must begin with, so that callers on this machine may put inputs there",
        default_text="none; no shared memory",
    )
    unix_socket: str | None = option(
        None, _socket_path, "path of a Unix socket to listen on as well, without encryption", default_text="none"
    )
    admin_port: int | None = option(
        None,
        whole_number(0, 65_535),
        "separate port for `EngineService` (then on no other) and health; not encrypted; 0 takes a free one",
        default_text="none",
    )
    admin_host: str = option("127.0.0.1", some_text, "address that the admin port listens on")
    tls_certificate: str | None = option(
        None,
        some_text,
        "file of the server's certificate chain, in PEM",
        default_text="none; no encryption",
    )
    tls_key: str | None = option(None, some_text, "file of the certificate's key, in PEM", default_text="none")
    tls_client_ca: str | None = option(
        None,
        some_text,
        "file of CA certificates, in PEM; clients then need a certificate that one of them signed",
        default_text="none; any client",
    )
    tokens: str | None = option(
        None,
        some_text,
        "file of the API tokens that callers must send, in TOML",
        default_text="none; any caller",
    )
    max_message_bytes: int = option(48 * MIB, byte_count(1), "largest message received", unit="bytes")
    max_receiving_bytes: int = option(
        384 * MIB,
        byte_count(1),
        "memory for messages that are being received, each counted as the largest; more memory admits more slow"
        " senders at a time",
        unit="bytes",
    )
    receive_timeout: float = option(
        30.0,
        seconds_above_zero,
        "how long the message of a call may take to arrive; then the call ends with DEADLINE_EXCEEDED",
        unit="seconds",
    )
    max_adapter_bytes: int = option(
        1024 * MIB,
        byte_count(0),
        "largest file of an adapter that callers with the scope `admin` may add to --adapters; 0: none",
        unit="bytes",
    )
    image_hosts: tuple[AllowedHost, ...] | None = option(
        None,
        parse_hosts,
        "hosts that images may be fetched from, such as `example.com` or, for all its subdomains, `.example.com`",
        default_text="none; images are taken as bytes",
    )
    image_fetch_timeout: float = option(
        10.0, positive_seconds, "how long fetching an image may take", unit="seconds"
    )
    max_stored_image_bytes: int = option(
        256 * MIB,
        byte_count(0),
        "memory for images that callers store in the server by `ImageService`; 0 switches it off",
        unit="bytes",
    )
    image_quota_bytes: int | None = option(
        None,
        byte_count(1),
        "most bytes of stored images for each token, or for each namespace that tokens share",
        unit="bytes",
        default_text="half of --max-stored-image-bytes with --tokens, else all of it",
    )
    image_ttl: float = option(
        3600.0,
        seconds_above_zero,
        "how long a stored image is kept if its caller sets no `ttl`",
        unit="seconds",
    )
    max_image_ttl: float = option(
        86_400.0, seconds_above_zero, "how long a stored image is kept at most", unit="seconds"
    )
    stream_idle_timeout: float = option(
        60.0,
        seconds_above_zero,
        "time in which a client must read a message of its stream, otherwise the call ends with ABORTED, "
        "or a response above 256 KiB, otherwise its connection is closed; and send the next frame of a stream of "
        "frames",
        unit="seconds",
    )
    max_frame_streams: int = option(
        32,
        whole_number(0, 1024),
        "most streams of frames (`DetectFrames`, `PointFrames`) that each front end has open at a time; a message"
        " of the largest size may be arriving on each; 0: none",
        unit="streams",
    )
    max_frame_stream_age: float = option(
        3600.0,
        seconds_above_zero,
        "how long a stream of frames may last; then it ends with UNAVAILABLE, and clients open another one",
        unit="seconds",
    )
    withdrawal_delay: float = option(
        5.0,
        positive_seconds,
        "lame-duck period after SIGTERM: calls are still accepted, while health reports NOT_SERVING to balancers",
        unit="seconds",
    )
    drain_timeout: float = option(
        20.0, positive_seconds, "time for running requests to end after the lame-duck period", unit="seconds"
    )
    reflection: str = option(
        "on",
        one_of("on", "off", "token"),
        "who may use server reflection: on (any caller), off (no caller) or token (callers with a token)",
    )
    caller_metrics: bool = option(
        False,
        on_or_off,
        "whether metrics have the requests and tokens of each caller, by the names of tokens: on or off",
    )
    load_reports: bool = option(
        False,
        on_or_off,
        "whether answers over gRPC report the load of the server in their trailing metadata (ORCA), for balancers: "
        "on or off",
    )
    log_level: str = option(
        "info",
        one_of("debug", "info", "warning", "error"),
        "lowest severity that is logged: debug, info, warning or error",
    )
    log_addresses: bool = option(
        True, on_or_off, "whether the log lines of calls have the addresses of the callers: on or off"
    )
    trusted_proxies: tuple[str, ...] | None = option(
        None,
        _proxies,
        "addresses or networks of proxies, such as `10.0.0.0/8`, and `unix` for Unix sockets, separated by commas: "
        "for calls from these, the log has the address that `X-Forwarded-For` names",
        default_text="none",
    )
    log_format: str = option("text", one_of("text", "json"), "format of log lines: text or json")
    metrics_port: int | None = option(
        None,
        whole_number(0, 65_535),
        "port of `/metrics`, `/healthz`, `/livez` and `/readyz` over HTTP; 0 takes a free one and logs it",
        default_text="none",
    )
    metrics_host: str = option("127.0.0.1", some_text, "address that the metrics port listens on")
    tracing: bool = option(
        False,
        on_or_off,
        "whether traces of calls are sent to `OTEL_EXPORTER_OTLP_ENDPOINT`: on or off",
    )
    trace_content: bool = option(False, on_or_off, "whether traces contain questions and answers: on or off")

    @classmethod
    def parse(cls, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> ServerConfig:
        """Parses flags by name, the environment and a file. Raises `ConfigurationError` with every problem."""
        problems: list[str] = []
        settings = settings_of(flags, environment, problems)

        def values_of(kind: Any) -> dict[str, Any]:
            values: dict[str, Any] = {}
            for name, item in options_of(kind):
                setting = settings.get(item.name)
                if setting is not None:
                    try:
                        values[name] = item.parse(setting.text)
                    except ValueError as error:
                        problems.append(f"{setting.source}: {setting.text!r} {error}")
            return values

        engine = EngineConfig(**values_of(EngineConfig))
        config = cls(**values_of(cls), engine=engine)
        problems += security_problems(option_names(), environment)
        problems += _contradictions(config)
        if problems:
            raise ConfigurationError(tuple(problems))
        return config

    def engine_config(self) -> EngineConfig:
        """Returns the settings of the engine with the formats of `precision`. Formats that are set by their own
        options stay."""
        formats = PRECISIONS[self.precision].items()
        selected: dict[str, Any] = {name: value for name, value in formats if getattr(self.engine, name) == "auto"}
        return replace(self.engine, **selected)

    def store_limits(self) -> StoreLimits:
        """Returns the bounds of stored images. By default a token may use half of the memory; without tokens,
        callers share all of it."""
        quota_bytes = self.image_quota_bytes
        if quota_bytes is None:
            quota_bytes = self.max_stored_image_bytes // (1 if self.tokens is None else 2)
        return StoreLimits(
            max_bytes=self.max_stored_image_bytes,
            quota_bytes=quota_bytes,
            default_ttl_s=min(self.image_ttl, self.max_image_ttl),
            max_ttl_s=self.max_image_ttl,
        )

    @property
    def metrics_names(self) -> tuple[str, ...]:
        """The names of the metrics port on this machine, in addition to addresses and `localhost`."""
        return (*(self.http_hosts or ()), self.metrics_host)

    def precision_line(self) -> str:
        """Returns the line of the log with the chosen number formats and the reason."""
        own = [(name, getattr(self.engine, name)) for name in _FORMATS]
        given = [f"{flag_name(name)} {value}" for name, value in own if value != "auto"]
        line = f"precision {self.precision}: {_REASONS[self.precision]}"
        return f"{line}; except {', '.join(given)}" if given else line


def _contradictions(config: ServerConfig) -> Iterator[str]:
    """Yields the problems of options that are valid separately, but not together."""
    yield from config.engine.contradictions()
    if config.engine.deterministic and config.precision == "float8":
        yield "--precision float8: --deterministic has no products in float8"
    if (config.tls_certificate is None) != (config.tls_key is None):
        yield "--tls-certificate and --tls-key: each needs the other"
    elif config.tls_client_ca is not None and config.tls_certificate is None:
        yield "--tls-client-ca: needs --tls-certificate"
    if config.max_receiving_bytes < config.max_message_bytes:
        yield "--max-receiving-bytes: must be at least --max-message-bytes"
    if config.reflection == "token" and config.tokens is None:
        yield "--reflection token: needs --tokens"
    yield from _contradictions_of_processes(config)
    for name in ("triton_port", "triton_shared_memory"):
        if getattr(config, name) is not None and not config.triton:
            yield f"{flag_name(name)}: needs --triton"
    if config.http_origins is not None and config.http_port is None:
        yield "--http-origins: needs --http-port"
    if config.http_hosts is not None and config.http_port is None and config.metrics_port is None:
        yield "--http-hosts: needs --http-port or --metrics-port"
    if config.tokens is not None or config.insecure_public:
        return
    advice = "anybody could call; give --tokens{}, or say --insecure-public"
    if config.tls_certificate is None and not _is_loopback(config.host):
        yield f"--host {config.host}: {advice.format(' or --tls-certificate')}"
    if config.admin_port is not None and not _is_loopback(config.admin_host):
        yield f"--admin-host {config.admin_host}: {advice.format('')}"


def _contradictions_of_processes(config: ServerConfig) -> Iterator[str]:
    devices, frontends = config.devices or (), config.frontends
    if devices and config.engine.device != "auto":
        yield "--devices: says what --device would; give one of them"
    if sys.platform != "linux" and (devices == ("all",) or len(devices) > 1 or frontends not in (0, "auto")):
        yield "--frontends and --devices: several processes share a port on Linux only"
    if isinstance(frontends, int) and frontends > 1:
        for name in ("unix_socket", "triton_shared_memory"):
            if getattr(config, name) is not None:
                yield f"{flag_name(name)}: belongs to one process; it needs --frontends 1 or 0"


def _is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address. A name other than `localhost` may stand for any
    address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def named_values(items: Iterable[str]) -> dict[str, str | None]:
    """Parses texts such as `port=50051` into the flags that `ServerConfig.parse` takes. Raises
    `ConfigurationError`."""
    pairs = [item.partition("=") for item in items]
    given: dict[str, str | None] = {name.removeprefix("--").replace("-", "_"): value for name, _, value in pairs}
    unknown = given.keys() - set(option_names())
    if unknown:
        raise ConfigurationError(tuple(unknown_flag(name) for name in sorted(unknown)))
    return given


def options() -> Iterator[Option]:
    """Yields every option: of the engine, then of the server."""
    for kind in (EngineConfig, ServerConfig):
        for _, item in options_of(kind):
            yield item


def settings_of(
    flags: Mapping[str, str | None], environment: Mapping[str, str], problems: list[str]
) -> Mapping[str, Setting]:
    """Returns the texts that are given for the options, by name. Adds mistakes to `problems`."""
    return MappingProxyType(collect(option_names(), flags, environment, problems))


def option_names() -> tuple[str, ...]:
    """Lists the names of all options."""
    return tuple(item.name for item in options())
