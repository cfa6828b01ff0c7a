"""How an engine is set up. Frozen; every size says its unit."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
BUILT_IN_MODEL = "moondream-nano"
"""Ships inside the package: a small model of a toy world; its card lies in `nano/`."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    `model` is the built-in one, a local folder or file, or a hub name. `device` is auto, cpu or cuda; `dtype` is
    auto, float32, bfloat16 or float16. `num_kv_pages` None: as many as `memory_utilization` leaves; beside a
    CPU no more than a full batch needs.
    """

    model: str = BUILT_IN_MODEL
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    text_path: str = "auto"
    """How the decoder runs: plain, fused, fused-float8 (weights in float8), or auto: fused on CUDA, else plain."""
    vision_path: str = "auto"
    """How images are encoded: as `text_path`, or calibrated-float8, with scales measured on pictures of our own."""
    kv_dtype: str = "auto"
    """The type of cached keys and values: float8, or auto: the model's."""
    expert_dtype: str = "auto"
    """The type of the experts' weights: float8, to which they are rounded while they are loaded, or auto: the
    checkpoint's float8, else the model's."""
    deterministic: bool = False
    """Whether an answer has the same bits in any batch, however its prompt is divided, and whatever is cached. Runs
    paths of its own, which are slower, on a CPU, and takes no adapters."""
    cuda_graphs: bool | None = None
    """Whether work on the device is recorded once and replayed; None: on CUDA with a fused text path."""
    kernels: tuple[tuple[str, str], ...] = ()
    """(operation, implementation) of fused operations, where it shall not be the fastest there is."""
    max_batch_size: int | None = None
    """Sequences that hold pages together, prefilling or decoding; None: 64 on CUDA, else 16. Of this and the next
    two a GPU with little memory beside the weights takes a half or a quarter (`StepBounds`)."""
    num_kv_pages: int | None = None
    memory_utilization: float = 0.9
    """Share of the GPU's memory, or of what the host and its control groups have available, that may be taken for
    weights, cache, activations, captured graphs and images together."""
    memory_limit: int | None = None
    """Bytes of a GPU's memory that count as there are; None: all. `memory_utilization` is a share of them."""
    page_size: int = 16
    """Tokens in a page."""
    prefix_cache: bool = True
    """Whether pages of images, prompts and answers are kept for later requests until their memory is needed."""
    image_cache_bytes: int | None = None
    """Memory of the device for image embeddings that are kept for later requests; 0: none are kept. None: enough
    for 256 images on CUDA and 32 elsewhere, at most a sixteenth of what is available beside the weights."""
    adapters: str | None = None
    """Folder that holds adapters, each in a folder of its own; requests name them."""
    adapter_repositories: tuple[str, ...] = ()
    """Repositories of the hub, such as org/name, that requests may name as adapters."""
    num_adapter_slots: int = 8
    """Adapters that can be loaded together, where there are any."""
    max_adapter_rank: int = 32
    """The largest rank of an adapter. Of experts, all of one token share it."""
    max_queued_requests: int = 256
    """Requests that may wait for a preprocessing worker or for pages."""
    max_queued_image_bytes: int = 512 * MIB
    """Bytes of their images together, encoded as they came."""
    max_queued_tokens: int = 1_000_000
    """Tokens of their prompts together, estimated from above: a byte of text counts as one."""
    ageing_s: float = 10.0
    """Waiting after which a request counts as one priority more urgent."""
    max_image_bytes: int = 32 * MIB
    max_image_pixels: int = 64_000_000
    max_decoded_image_bytes: int | None = None
    """Memory of all images together, from the start of their decoding until their requests are over. One image may
    take three quarters of it, and 512 MiB, while it is decoded. None: 683 MiB, or 512 MiB
    and memory for two full batches where that is more."""
    num_preprocess_threads: int = 4
    resize_on_device: bool | None = None
    """Whether images are tiled on the device of the model, and not by preprocessing threads; None: on CUDA."""
    max_prefill_tokens: int | None = None
    """Prompt tokens that a step may carry; None: 8192 on CUDA, else 1024."""
    max_tiles_per_step: int | None = None
    """Image tiles that a step may encode while other requests are decoding; None: 72 on CUDA, else 4."""
    step_timeout_s: float | None = None
    """Time without progress after which the device counts as hung; None: 60 on CUDA, else 1800."""

    @property
    def has_adapters(self) -> bool:
        """Whether requests may use adapters."""
        return self.adapters is not None or bool(self.adapter_repositories)
