"""Defines every option of the server once: flag, environment variable, default, unit and help.

`ServerConfig` is the list of options and the parsed value. A flag takes precedence over its environment variable,
that over the file of options, and that over the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from kestrel_grpc.config.contradictions import contradictions
from kestrel_grpc.config.environment import security_problems
from kestrel_grpc.config.option import Option, option_field, option_of
from kestrel_grpc.config.option_parsers import (
    byte_count,
    fraction,
    name_prefix,
    names,
    on_or_off,
    one_of,
    origins,
    parse_kernels,
    positive_seconds,
    seconds_above_zero,
    some_text,
    whole_number,
)
from kestrel_grpc.config.precision import PRECISIONS, with_precision
from kestrel_grpc.config.settings import Setting, collect, unknown_flag
from kestrel_grpc.images.image_uris import AllowedHost, parse_hosts
from kestrel_runtime.api.config import EngineConfig

MIB = 2**20


class ConfigurationError(Exception):
    """Options that cannot be used; `problems` has a line for each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


_ENGINE = EngineConfig()
_MOST_MEMORY_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server is set up. `max_queue` is the flag `--max-queue`, the variable `KESTREL_GRPC_MAX_QUEUE`, and the
    key `max_queue` of the file."""

    config: str | None = option_field(None, some_text, "file with options, in TOML", default_text="none")
    model: str = option_field(
        _ENGINE.model, some_text, "the built-in toy model, a local folder or file, or a name on the hub"
    )
    served_model_name: tuple[str, ...] | None = option_field(
        None,
        names,
        "further names that requests may give the model, separated by commas; OpenAI's API lists these",
        default_text="none",
    )
    revision: str | None = option_field(
        None, some_text, "revision of a hub model", default_text="the published one"
    )
    device: str = option_field("auto", one_of("auto", "cpu", "cuda"), "where the model runs: auto, cpu or cuda")
    precision: str = option_field(
        "auto",
        one_of(*PRECISIONS),
        "number format of everything: float32, bfloat16, float8 (weights, images and key-value cache), or auto: "
        "bfloat16 on a GPU, else float32; `--dtype`, `--text-path`, `--vision-path` and `--kv-dtype` override it",
    )
    dtype: str = option_field(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "number format of the weights: auto, float32, bfloat16 or float16",
    )
    host: str = option_field(
        "127.0.0.1",
        some_text,
        "address to listen on; one that other machines can reach needs tokens or a certificate",
    )
    port: int = option_field(50051, whole_number(0, 65_535), "port to listen on; 0 takes a free one and prints it")
    insecure_public: bool = option_field(
        False,
        on_or_off,
        "whether other machines may reach the server without tokens and encryption: on or off",
        default_text="off",
    )
    http_port: int | None = option_field(
        None,
        whole_number(0, 65_535),
        "port for REST and OpenAI clients, probes and metrics over HTTP, on the same address; 0 takes a free one",
        default_text="none",
    )
    http_hosts: tuple[str, ...] | None = option_field(
        None,
        names,
        "names that HTTP clients call the server by, separated by commas; addresses and `localhost` always work",
        default_text="any with tokens, else none",
    )
    http_origins: tuple[str, ...] | None = option_field(
        None,
        origins,
        "sites whose pages may call over HTTP (CORS), such as `https://example.com`, separated by commas",
        default_text="none",
    )
    triton: bool = option_field(
        True,
        on_or_off,
        "whether clients of NVIDIA Triton and KServe v2 are served, on the gRPC port: on or off",
        default_text="on",
    )
    triton_port: int | None = option_field(
        None,
        whole_number(0, 65_535),
        "second port for gRPC, on the same address, such as 8001, as clients of Triton expect; 0 takes a free one",
        default_text="none",
    )
    triton_shared_memory: str | None = option_field(
        None,
        name_prefix,
        "what names of shared memory objects must begin with, so that callers on this machine may put inputs there",
        default_text="none; no shared memory",
    )
    unix_socket: str | None = option_field(
        None, some_text, "path of a Unix socket to listen on as well, without encryption", default_text="none"
    )
    admin_port: int | None = option_field(
        None,
        whole_number(0, 65_535),
        "separate port for `EngineService` (then on no other) and health; not encrypted; 0 takes a free one",
        default_text="none",
    )
    admin_host: str = option_field("127.0.0.1", some_text, "address that the admin port listens on")
    tls_certificate: str | None = option_field(
        None,
        some_text,
        "file of the server's certificate chain, in PEM",
        default_text="none; no encryption",
    )
    tls_key: str | None = option_field(
        None, some_text, "file of the certificate's key, in PEM", default_text="none"
    )
    tls_client_ca: str | None = option_field(
        None,
        some_text,
        "file of CA certificates, in PEM; clients then need a certificate that one of them signed",
        default_text="none; any client",
    )
    tokens: str | None = option_field(
        None,
        some_text,
        "file of the API tokens that callers must send, in TOML",
        default_text="none; anybody may call",
    )
    text_path: str = option_field(
        "auto",
        one_of("auto", "plain", "fused", "fused-float8"),
        "how the decoder runs: plain, fused, fused-float8 (weights of 8 bits), or auto: fused on a GPU",
    )
    vision_path: str = option_field(
        "auto",
        one_of("auto", "plain", "fused", "fused-float8", "calibrated-float8"),
        "how images are encoded: plain, fused, fused-float8 (products of 8 bits), calibrated-float8 (the same with "
        "scales measured at the start), or auto: fused on a GPU",
    )
    kv_dtype: str = option_field(
        "auto",
        one_of("auto", "float8"),
        "number format of the key-value cache: float8, or auto: that of the weights",
    )
    expert_dtype: str = option_field(
        "auto",
        one_of("auto", "float8"),
        "number format of the weights of experts, as Moondream 3 has them: float8, to which they are rounded while "
        "they are loaded, or auto: as the checkpoint",
    )
    deterministic: bool = option_field(
        False,
        on_or_off,
        "whether an answer has the same bits in any batch and whatever is cached, on a CPU, and slower: on or off",
        default_text="off",
    )
    cuda_graphs: bool | None = option_field(
        None,
        on_or_off,
        "whether steps are captured as CUDA graphs and replayed: on or off",
        default_text="on with a fused text path on a GPU",
    )
    kernels: tuple[tuple[str, str], ...] | None = option_field(
        None,
        parse_kernels,
        "implementations of single operations, such as `concat_gelu=reference`, separated by commas",
        default_text="the fastest",
    )
    max_batch_size: int | None = option_field(
        None,
        whole_number(1),
        "most requests that generate at a time",
        unit="requests",
        default_text="64 on a GPU, less where it has little memory, else 16",
    )
    kv_pages: int | None = option_field(
        None,
        whole_number(1),
        "size of the key-value cache; one too small for a request with an image is refused",
        unit="pages",
        default_text="from memory",
    )
    memory_utilization: float = option_field(
        _ENGINE.memory_utilization,
        fraction,
        "share of the GPU's memory, or of what the host and the container have available, that the server may take "
        "for everything; the key-value cache gets what is left of it",
    )
    memory_limit: int | None = option_field(
        None,
        byte_count(1, _MOST_MEMORY_BYTES),
        "memory of the GPU that counts as there is: more is neither planned nor taken",
        unit="bytes",
        default_text="all",
    )
    page_size: int = option_field(
        _ENGINE.page_size, whole_number(1), "size of a page of the key-value cache", unit="tokens"
    )
    prefix_cache: bool = option_field(
        _ENGINE.prefix_cache,
        on_or_off,
        "whether pages of images, prompts and answers are kept for later requests: on or off",
        default_text="on",
    )
    image_cache_bytes: int | None = option_field(
        None,
        whole_number(0),
        "memory of the device for image embeddings that are kept for later requests; 0: none are kept",
        unit="bytes",
        default_text="256 images on CUDA, else 32; at most 1/16 of what the weights leave",
    )
    adapters: str | None = option_field(
        None,
        some_text,
        "folder with adapters (LoRA) that requests may name, each in a folder of its own",
        default_text="none",
    )
    adapter_repositories: tuple[str, ...] | None = option_field(
        None,
        names,
        "repositories on the hub that requests may name as adapters, such as `org/name`, separated by commas",
        default_text="none",
    )
    adapter_slots: int = option_field(
        _ENGINE.num_adapter_slots,
        whole_number(1, 256),
        "adapters that are loaded at a time; without --adapters and --adapter-repositories there are no slots",
        unit="adapters",
    )
    max_adapter_rank: int = option_field(
        _ENGINE.max_adapter_rank,
        whole_number(1, 512),
        "largest rank of an adapter; the experts that a token uses share it",
    )
    max_queue: int = option_field(
        _ENGINE.max_queued_requests,
        whole_number(1),
        "most requests that may wait; further ones are refused",
        unit="requests",
    )
    max_queue_image_bytes: int = option_field(
        _ENGINE.max_queued_image_bytes,
        byte_count(1),
        "total size of the images of waiting requests",
        unit="bytes",
    )
    max_queue_tokens: int = option_field(
        _ENGINE.max_queued_tokens,
        whole_number(1),
        "total length of the prompts of waiting requests; a byte of text counts as a token",
        unit="tokens",
    )
    ageing: float = option_field(
        _ENGINE.ageing_s,
        seconds_above_zero,
        "seconds of waiting per priority boost",
        unit="seconds",
    )
    max_message_bytes: int = option_field(48 * MIB, byte_count(1), "largest message received", unit="bytes")
    max_receiving_bytes: int = option_field(
        384 * MIB,
        byte_count(1),
        "memory for messages that are being received, each counted as the largest; more memory admits more slow"
        " senders at a time",
        unit="bytes",
    )
    receive_timeout: float = option_field(
        30.0,
        seconds_above_zero,
        "how long the message of a call may take to arrive; then the call ends with DEADLINE_EXCEEDED",
        unit="seconds",
    )
    max_image_bytes: int = option_field(
        _ENGINE.max_image_bytes, byte_count(1), "largest encoded image", unit="bytes"
    )
    max_image_pixels: int = option_field(
        _ENGINE.max_image_pixels, whole_number(1), "largest image, width times height", unit="pixels"
    )
    max_decoded_image_bytes: int | None = option_field(
        None,
        byte_count(MIB),
        "memory of all images from their decoding to the end of their requests; the decoding of one image may take"
        " three quarters of it, and at most 512 MiB",
        unit="bytes",
        default_text="683 MiB, or 512 MiB plus two full batches where that is more",
    )
    image_hosts: tuple[AllowedHost, ...] | None = option_field(
        None,
        parse_hosts,
        "hosts that images may be fetched from, such as `example.com` or, for all its subdomains, `.example.com`",
        default_text="none; images come as bytes",
    )
    image_fetch_timeout: float = option_field(
        10.0, positive_seconds, "how long fetching an image may take", unit="seconds"
    )
    max_stored_image_bytes: int = option_field(
        256 * MIB,
        byte_count(0),
        "memory for images that callers store in the server by `ImageService`; 0 switches it off",
        unit="bytes",
    )
    image_quota_bytes: int | None = option_field(
        None,
        byte_count(1),
        "most bytes of stored images for each token, or for each namespace that tokens share",
        unit="bytes",
        default_text="half of --max-stored-image-bytes with --tokens, else all of it",
    )
    image_ttl: float = option_field(
        3600.0,
        seconds_above_zero,
        "how long a stored image is kept where its caller does not say it",
        unit="seconds",
    )
    max_image_ttl: float = option_field(
        86_400.0, seconds_above_zero, "how long a stored image is kept at most", unit="seconds"
    )
    preprocess_threads: int = option_field(
        _ENGINE.num_preprocess_threads,
        whole_number(1, 1024),
        "threads that decode images and build prompts",
        unit="threads",
    )
    resize_on_device: bool | None = option_field(
        None,
        on_or_off,
        "whether images are resized on the model's device instead of in preprocessing threads: on or off",
        default_text="on with a GPU",
    )
    max_prefill_tokens: int | None = option_field(
        None,
        whole_number(1),
        "prompt tokens per step while other requests decode; lower values delay decoding less",
        unit="tokens",
        default_text="8192 on a GPU, less where it has little memory, else 1024",
    )
    max_crops: int | None = option_field(
        None,
        whole_number(1),
        "image tiles that one step may encode while other requests decode; lower values reduce queueing delay, and"
        " without a GPU the delay of decoding requests",
        unit="tiles",
        default_text="72 on a GPU, less where it has little memory, else 4",
    )
    step_timeout: float | None = option_field(
        None,
        seconds_above_zero,
        "time without progress in a step after which the device counts as hung and the server exits with an error",
        unit="seconds",
        default_text="60 on a GPU, else 1800",
    )
    stream_idle_timeout: float = option_field(
        60.0,
        seconds_above_zero,
        "time in which a client must read a message of its stream, otherwise the call ends with ABORTED, "
        "or a response above 256 KiB, otherwise its connection is closed",
        unit="seconds",
    )
    withdrawal_delay: float = option_field(
        5.0,
        positive_seconds,
        "lame-duck period after SIGTERM: calls are still accepted, while health reports NOT_SERVING to balancers",
        unit="seconds",
    )
    drain_timeout: float = option_field(
        20.0, positive_seconds, "time for running requests to end after the lame-duck period", unit="seconds"
    )
    reflection: str = option_field(
        "on",
        one_of("on", "off", "token"),
        "who may use server reflection: on (any caller), off (no caller) or token (callers with a token)",
    )
    log_level: str = option_field(
        "info",
        one_of("debug", "info", "warning", "error"),
        "lowest severity that is logged: debug, info, warning or error",
    )
    log_format: str = option_field("text", one_of("text", "json"), "format of log lines: text or json")
    metrics_port: int | None = option_field(
        None,
        whole_number(0, 65_535),
        "port of `/metrics`, `/healthz` and `/readyz` over HTTP; 0 takes a free one and logs it",
        default_text="none",
    )
    metrics_host: str = option_field("127.0.0.1", some_text, "address that the metrics port listens on")
    tracing: bool = option_field(
        False,
        on_or_off,
        "whether traces of calls are sent to `OTEL_EXPORTER_OTLP_ENDPOINT`: on or off",
        default_text="off",
    )
    trace_content: bool = option_field(
        False, on_or_off, "whether traces contain questions and answers: on or off", default_text="off"
    )

    @classmethod
    def parse(cls, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> ServerConfig:
        """From flags by field name, the environment and a file. Raises `ConfigurationError` with every problem."""
        problems: list[str] = []
        settings = settings_of(flags, environment, problems)
        values: dict[str, Any] = {}
        for name, option in options():
            setting = settings.get(name)
            if setting is not None:
                try:
                    values[name] = option.parse(setting.text)
                except ValueError as error:
                    problems.append(f"{setting.source}: {setting.text!r} {error}")
        problems += security_problems([name for name, _ in options()], environment)
        config = cls(**values)
        problems += contradictions(config)
        if problems:
            raise ConfigurationError(tuple(problems))
        return config

    def engine_config(self) -> EngineConfig:
        """The options of the engine."""
        return with_precision(self.expert_engine_config(), self.precision)

    def expert_engine_config(self) -> EngineConfig:
        """The same without `precision`."""
        return EngineConfig(
            model=self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            text_path=self.text_path,
            vision_path=self.vision_path,
            kv_dtype=self.kv_dtype,
            expert_dtype=self.expert_dtype,
            deterministic=self.deterministic,
            cuda_graphs=self.cuda_graphs,
            kernels=self.kernels or (),
            max_batch_size=self.max_batch_size,
            num_kv_pages=self.kv_pages,
            memory_utilization=self.memory_utilization,
            memory_limit=self.memory_limit,
            page_size=self.page_size,
            prefix_cache=self.prefix_cache,
            image_cache_bytes=self.image_cache_bytes,
            adapters=self.adapters,
            adapter_repositories=self.adapter_repositories or (),
            num_adapter_slots=self.adapter_slots,
            max_adapter_rank=self.max_adapter_rank,
            max_queued_requests=self.max_queue,
            max_queued_image_bytes=self.max_queue_image_bytes,
            max_queued_tokens=self.max_queue_tokens,
            ageing_s=self.ageing,
            max_image_bytes=self.max_image_bytes,
            max_image_pixels=self.max_image_pixels,
            max_decoded_image_bytes=self.max_decoded_image_bytes,
            num_preprocess_threads=self.preprocess_threads,
            resize_on_device=self.resize_on_device,
            max_prefill_tokens=self.max_prefill_tokens,
            max_tiles_per_step=self.max_crops,
            step_timeout_s=self.step_timeout,
        )


def named_values(items: Iterable[str]) -> dict[str, str | None]:
    """`option=value` texts as `ServerConfig.parse` takes flags. Raises `ConfigurationError` on others."""
    pairs = [item.partition("=") for item in items]
    given: dict[str, str | None] = {name.removeprefix("--").replace("-", "_"): value for name, _, value in pairs}
    unknown = given.keys() - {name for name, _ in options()}
    if unknown:
        raise ConfigurationError(tuple(unknown_flag(name) for name in sorted(unknown)))
    return given


def options() -> Iterator[tuple[str, Option]]:
    """Every option, by field name."""
    for item in fields(ServerConfig):
        yield item.name, option_of(item)


def settings_of(
    flags: Mapping[str, str | None], environment: Mapping[str, str], problems: list[str]
) -> Mapping[str, Setting]:
    """The texts that are given for the options. Adds what is wrong to `problems`."""
    names = [name for name, _ in options()]
    return MappingProxyType(collect(names, flags, environment, problems))
