"""How many pages the key-value cache gets, and what else is promised memory on the device.

free, once the weights stand in every layout that runs
  ├── cache     kv_fraction of it, but never so much that the reserve does not fit beside it
  └── reserve   on a CUDA device: two times the largest step (once for steps that run without a graph, once for
                the pools of captured graphs), the captured graphs themselves, and a margin
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.memory.host_limits import available_memory_bytes
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.scheduling.limits import StepBounds

_TYPICAL_CONTEXT_TOKENS = 2048
_MOST_GRAPH_BYTES = 2048 * MIB
_GRAPHS_SHARE = 8  # of what is free, where that is less
_MARGIN_BYTES = 256 * MIB
"""Static inputs, features of images that wait for their prompts, and what the driver takes as it goes."""


@dataclass(frozen=True, slots=True)
class DeviceReserve:
    """Bytes of the device's memory that are kept for other things than the cache."""

    step: int
    """Most that a step's activations take, estimated from above."""
    graphs: int
    """Most that captured graphs may take beside what they compute in."""

    @classmethod
    def of(cls, config: MoondreamConfig, bounds: StepBounds, dtype: torch.dtype, free_bytes: int) -> DeviceReserve:
        """What steps within `bounds` need of a device with `free_bytes` left; nothing elsewhere than on CUDA."""
        return cls(
            step=_largest_step_bytes(config, bounds, dtype.itemsize),
            graphs=min(_MOST_GRAPH_BYTES, free_bytes // _GRAPHS_SHARE),
        )

    @property
    def total(self) -> int:
        return 2 * self.step + self.graphs + _MARGIN_BYTES


def new_cache(config: EngineConfig, model: MoondreamConfig, device: torch.device, dtype: torch.dtype) -> KVCache:
    """A cache of the configured size, or of what memory allows. Comes after everything that stays in memory.

    Raises `CheckpointError` where there is no memory for the pages asked for.
    """
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "float8" else dtype
    num_pages = config.num_kv_pages
    if num_pages is None:
        num_pages = _num_pages(config, model, device, dtype, kv_dtype)
    try:
        return KVCache(model.text, num_pages, config.page_size, device, kv_dtype)
    except torch.OutOfMemoryError as error:
        size = num_pages * KVCache.bytes_per_page(model.text, config.page_size, kv_dtype)
        raise CheckpointError(
            f"no memory for a key-value cache of {num_pages} pages ({size / 2**30:.1f} GiB) on {device}"
        ) from error


def smallest_num_pages(model: MoondreamConfig, page_size: int) -> int:
    """Pages without which some skill could never run: an image, its prompt with one word, and one token of answer.

    A smaller cache would refuse every such request. The scheduler asks for no more to start one on an idle engine.
    """
    templates = model.tokenizer.templates
    lengths = (
        max(map(len, parts.values())) if skill == "caption" else sum(map(len, parts.values())) + 1
        for skill, parts in templates.items()
    )
    longest = max(lengths, default=0)
    return -(-(model.text.prefix_attn + longest + 1) // page_size)


def check_cache(model: MoondreamConfig, cache: KVCache) -> None:
    """Raise `CheckpointError` where the cache cannot hold one request of every skill."""
    least = smallest_num_pages(model, cache.page_size)
    if cache.num_pages < least:
        raise CheckpointError(
            f"a key-value cache of {cache.num_pages} pages ({cache.num_pages * cache.page_size} tokens) cannot "
            f"hold one request with an image: {least} pages ({least * cache.page_size} tokens) are the least. "
            "Ask for more pages (--kv-pages), or give the process more memory"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that may still be taken, on the device or, where that is no GPU, on the host."""
    if device.type != "cuda":
        return available_memory_bytes()
    return torch.cuda.mem_get_info(device)[0]


def _num_pages(
    config: EngineConfig, model: MoondreamConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> int:
    page_size, bounds = config.page_size, StepBounds.of(config, device.type)
    bytes_per_page = KVCache.bytes_per_page(model.text, page_size, kv_dtype)
    context_pages = -(-min(model.text.max_context, _TYPICAL_CONTEXT_TOKENS) // page_size)
    if device.type == "cuda":
        # What only waits for the garbage collector, or for reuse by torch, would count as taken.
        gc.collect()
        torch.cuda.empty_cache()
    free = usable = free_bytes(device)
    if device.type == "cuda":
        usable = max(0, free - DeviceReserve.of(model, bounds, dtype, free).total)
    num_pages = min(int(free * config.kv_fraction), usable) // bytes_per_page
    if device.type != "cuda":  # memory of the host is everybody's
        num_pages = min(num_pages, bounds.max_batch_size * context_pages)
    # A small fraction is a wish; a context of typical length is needed, as far as there is memory at all.
    return max(num_pages, min(context_pages, usable // bytes_per_page))


def _largest_step_bytes(config: MoondreamConfig, bounds: StepBounds, itemsize: int) -> int:
    """An upper estimate of the activations of the largest step, of crops or of prompts: they come one after the
    other, in the same memory."""
    text, vision = config.text, config.vision
    # A block holds the stream and what it adds in float32, its products, and copies of them for the next product.
    token_bytes = 4 * text.dim * 4 + (2 * (text.qkv_dim + text.ff_dim) + 4 * text.dim) * itemsize
    if text.moe is not None:
        token_bytes += text.moe.experts_per_token * (4 * text.moe.expert_inner_dim + 3 * text.dim) * itemsize
    patch_bytes = (2 * (3 * vision.enc_dim + vision.enc_ff_dim) + 6 * vision.enc_dim) * itemsize
    num_tokens = max(bounds.max_prefill_tokens, text.prefix_attn)
    num_patches = max(bounds.max_crops, 1 + vision.max_crops) * vision.num_image_tokens
    return max(num_tokens * token_bytes, num_patches * patch_bytes)
