"""Defines the settings of an engine: names, types, defaults, ranges and help, each in one place.

The server's flags, environment variables and documentation of these settings follow from `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kestrel_runtime.api.options import (
    ByDevice,
    byte_count,
    fraction,
    on_or_off,
    one_of,
    option,
    options_of,
    parse_kernels,
    repositories,
    seconds_above_zero,
    shown,
    some_text,
    whole_number,
)

MIB = 2**20
BUILT_IN_MODEL = "moondream-nano"
"""Name of the small model of a toy world that the package includes; its model card is in `nano/`."""
_NAMING = frozenset(("model", "revision", "adapters", "adapter_repositories"))
"""The settings whose values name files or repositories, which callers need not know."""
INVARIANT = "invariant"
"""The backend that `deterministic` selects for text and images."""
_MOST_MEMORY_BYTES = 2**50
_HALF_BELOW, _QUARTER_BELOW = 12 * 1024 * MIB, 6 * 1024 * MIB
"""Memory of a GPU in bytes, without the weights, below which steps get a half or a quarter of their size.

Activations, graphs and images of the largest steps take five GiB.
"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine.

    None and "auto" leave a setting to the device or the model; see `resolved`.
    """

    model: str = option(
        BUILT_IN_MODEL, some_text, "the built-in toy model, a local folder or file, or a name on the hub"
    )
    revision: str | None = option(None, some_text, "revision of a hub model", default_text="the published one")
    device: str = option("auto", one_of("auto", "cpu", "cuda"), "where the model runs: auto, cpu or cuda")
    dtype: str = option(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "number format of the weights: auto, float32, bfloat16 or float16",
        by_device=ByDevice("bfloat16", "float32"),
    )
    text_backend: str = option(
        "auto",
        one_of("auto", "plain", "fused", "fused-float8"),
        "how the decoder runs: auto, plain, fused or fused-float8 (weights of 8 bits)",
        by_device=ByDevice("fused", "plain"),
    )
    vision_backend: str = option(
        "auto",
        one_of("auto", "plain", "fused", "fused-float8", "calibrated-float8"),
        "how images are encoded: auto, plain, fused, fused-float8 (products of 8 bits) or calibrated-float8 (the "
        "same with scales measured at the start)",
        by_device=ByDevice("fused", "plain"),
    )
    kv_dtype: str = option(
        "auto",
        one_of("auto", "float8"),
        "number format of the key-value cache: float8, or auto: that of the weights",
    )
    expert_dtype: str = option(
        "auto",
        one_of("auto", "float8", "int4"),
        "number format of the weights of experts (Moondream 3): float8 or int4 (experimental), rounded while they "
        "are loaded, or auto: that of the checkpoint",
    )
    deterministic: bool = option(
        False,
        on_or_off,
        "whether an answer has the same bits in any batch and with any cache contents (slower): on or off",
    )
    cuda_graphs: bool | None = option(
        None,
        on_or_off,
        "whether steps are captured as CUDA graphs and replayed: on or off",
        default_text="on with a fused text backend on a GPU",
        by_device=ByDevice(cuda=True, cpu=False),
    )
    kernels: tuple[tuple[str, str], ...] = option(
        (),
        parse_kernels,
        "implementations of single operations, such as `concat_gelu=reference`, separated by commas",
        default_text="the fastest",
    )
    max_batch_size: int | None = option(
        None,
        whole_number(1),
        "most requests that generate at a time",
        unit="requests",
        by_device=ByDevice(64, 16, shrinks=True),
    )
    num_kv_pages: int | None = option(
        None,
        whole_number(1),
        "size of the key-value cache; it must hold a request with an image",
        unit="pages",
        default_text="from memory",
        name="kv_pages",
    )
    memory_utilization: float = option(
        0.9,
        fraction,
        "share of the GPU's memory, or of what the host and the container have available, that the server may take "
        "for everything; the key-value cache gets the rest of this share",
    )
    memory_limit: int | None = option(
        None,
        byte_count(1, _MOST_MEMORY_BYTES),
        "the most memory of the GPU that the server plans and takes, as if the GPU had no more",
        unit="bytes",
        default_text="all",
    )
    page_size: int = option(16, whole_number(1), "size of a page of the key-value cache", unit="tokens")
    prefix_cache: bool = option(
        True,
        on_or_off,
        "whether pages of images, prompts and answers are kept for later requests: on or off",
    )
    image_cache_bytes: int | None = option(
        None,
        byte_count(0),
        "memory of the device for image embeddings that are kept for later requests; 0: none are kept",
        unit="bytes",
        default_text="256 images on CUDA, else 32; at most 1/16 of what the weights leave",
    )
    crop_cache_bytes: int | None = option(
        None,
        byte_count(0),
        "memory of the device for encoded crops that are kept for images with the same crops; 0: none are kept",
        unit="bytes",
        default_text="1,024 crops on CUDA, else 128; at most 1/32 of what the weights leave",
    )
    adapters: str | None = option(
        None,
        some_text,
        "folder with adapters (LoRA) that requests may name, each in a folder of its own",
        default_text="none",
    )
    adapter_repositories: tuple[str, ...] = option(
        (),
        repositories,
        "repositories on the hub that requests may name as adapters, such as `org/name`, separated by commas",
        default_text="none",
    )
    num_adapter_slots: int = option(
        8,
        whole_number(1, 256),
        "adapters that are loaded at a time; without --adapters and --adapter-repositories there are no slots",
        unit="adapters",
        name="adapter_slots",
    )
    max_adapter_rank: int = option(
        32, whole_number(1, 512), "largest rank of an adapter; the experts that a token uses share it"
    )
    max_queued_requests: int = option(
        256,
        whole_number(1),
        "most requests that may wait; further ones are refused",
        unit="requests",
        name="max_queue",
    )
    max_queued_image_bytes: int = option(
        512 * MIB,
        byte_count(1),
        "total size of the images of waiting requests",
        unit="bytes",
        name="max_queue_image_bytes",
    )
    max_queued_tokens: int = option(
        1_000_000,
        whole_number(1),
        "total length of the prompts of waiting requests; a byte of text counts as a token",
        unit="tokens",
        name="max_queue_tokens",
    )
    ageing_s: float = option(
        10.0, seconds_above_zero, "seconds of waiting per priority boost", unit="seconds", name="ageing"
    )
    max_image_bytes: int = option(32 * MIB, byte_count(1), "largest encoded image", unit="bytes")
    max_image_pixels: int = option(64_000_000, whole_number(1), "largest image, width times height", unit="pixels")
    max_decoded_image_bytes: int | None = option(
        None,
        byte_count(MIB),
        "memory of all images from their decoding to the end of their requests; the decoding of one image may take"
        " three quarters of it, and at most 512 MiB",
        unit="bytes",
        default_text="683 MiB, or 512 MiB plus two full batches where that is more",
    )
    num_preprocess_threads: int = option(
        4,
        whole_number(1, 1024),
        "threads that decode images and build prompts",
        unit="threads",
        name="preprocess_threads",
    )
    resize_on_device: bool | None = option(
        None,
        on_or_off,
        "whether images are resized on the model's device instead of in preprocessing threads: on or off",
        default_text="on with a GPU",
        by_device=ByDevice(cuda=True, cpu=False),
    )
    max_prefill_tokens: int | None = option(
        None,
        whole_number(1),
        "prompt tokens per step while other requests decode; lower values delay decoding less",
        unit="tokens",
        by_device=ByDevice(8192, 1024, shrinks=True),
    )
    max_crops_per_step: int | None = option(
        None,
        whole_number(1),
        "crops of images that one step may encode while other requests decode; lower values reduce queueing delay,"
        " and without a GPU the delay of decoding requests",
        unit="crops",
        by_device=ByDevice(72, 4, shrinks=True),
    )
    # On a GPU a step takes less than a second. One core may take minutes to encode a large image with a model of
    # two billion parameters; and there is no other device that could hang.
    step_timeout_s: float | None = option(
        None,
        seconds_above_zero,
        "time without progress in a step after which the device counts as hung and the server exits with an error",
        unit="seconds",
        name="step_timeout",
        by_device=ByDevice(60.0, 1800.0),
    )

    @property
    def has_adapters(self) -> bool:
        """True if requests may use adapters."""
        return self.adapters is not None or bool(self.adapter_repositories)

    def resolved(self, device_type: str, free_bytes: float | None = None) -> EngineConfig:
        """Returns the settings with this device's values in place of None and "auto".

        `device_type` is cpu or cuda. `free_bytes` is the memory that the weights leave on a CUDA device: steps are
        smaller if that is little. None and "auto" remain where the value depends on the model.
        """
        is_cuda = device_type == "cuda"
        part = 1
        if is_cuda and free_bytes is not None:
            part += (free_bytes < _HALF_BELOW) + 2 * (free_bytes < _QUARTER_BELOW)
        chosen: dict[str, Any] = {"device": device_type}
        for name, item in options_of(self):
            if item.by_device is not None and getattr(self, name) in (None, "auto"):
                value = item.by_device.cuda if is_cuda else item.by_device.cpu
                chosen[name] = value // part if item.by_device.shrinks else value
        if self.deterministic:
            chosen |= dict.fromkeys(("text_backend", "vision_backend"), INVARIANT)
        elif self.cuda_graphs is None and self.text_backend == "plain":
            chosen["cuda_graphs"] = False
        return replace(self, **chosen)

    def described(self) -> Mapping[str, str]:
        """Returns the options that have a value, as text by their names: what answers and their speed depend on.

        Options that name files or repositories are left out.
        """
        found: dict[str, str] = {}
        for field, item in options_of(self):
            value = getattr(self, field)
            if field in _NAMING or value is None:
                continue
            text = ",".join(map("=".join, value)) if isinstance(value, tuple) else shown(value)
            found[item.name] = text or item.default_text
        return found

    def contradictions(self, device_type: str | None = None) -> Iterator[str]:
        """Yields the problems of settings that are valid separately, but not together or not on this kind of
        device.

        `device_type` None takes the type in `device`.
        """
        device_type = device_type or self.device
        is_plain = self.text_backend == "plain" and not self.deterministic
        if self.cuda_graphs and (device_type == "cpu" or is_plain):
            yield "--cuda-graphs: needs a CUDA device and a fused text backend"
        if not self.deterministic:
            return
        if self.has_adapters:
            yield "--deterministic: takes no adapters; their products depend on the batch"
        for flag, backend in (("--text-backend", self.text_backend), ("--vision-backend", self.vision_backend)):
            if backend not in ("auto", "plain", INVARIANT):
                yield f"{flag}: --deterministic has a backend of its own"
        if self.kernels:
            yield "--kernels: --deterministic has kernels of its own"
        if self.expert_dtype == "int4" and device_type == "cuda":
            yield "--expert-dtype int4: --deterministic has no such products on a CUDA device"
