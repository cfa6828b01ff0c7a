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
    auto, float32, bfloat16 or float16. `num_kv_pages` None sizes the cache by `max_batch_size` and free memory.
    """

    model: str = BUILT_IN_MODEL
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 16
    """Sequences that hold pages together, prefilling or decoding."""
    num_kv_pages: int | None = None
    page_size: int = 16
    """Tokens in a page."""
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
    num_preprocess_threads: int = 4
    resize_on_device: bool | None = None
    """Whether images are resized and cut where the model runs, and not by preprocessing threads; None: on CUDA."""
    max_prefill_tokens: int = 1024
    """Prompt tokens that a step may carry."""
    max_crops_per_step: int = 4
    """Image crops that a step may encode while other requests are decoding."""
