"""Computes the memory that a Moondream needs besides its weights, and creates its key-value cache."""

from __future__ import annotations

import torch

from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.engine import MemoryPlan
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.logits import AllowedTokens, LogitAdjustments
from kestrel_runtime.imaging.tiles import max_kept_bytes
from kestrel_runtime.memory.plan import MemoryNeeds, MemoryReading, image_cache_bytes, plan_memory
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.tiling import MoondreamTiling
from kestrel_runtime.scheduling.limits import StepBounds

_TYPICAL_CONTEXT_TOKENS = 2048
_MOST_GRAPH_BYTES = 2048 * MIB
_GRAPHS_SHARE = 8
"""Graphs, without their pools, get at most one part in so many of the available memory."""


def plan_cache(
    model: Moondream,
    config: EngineConfig,
    bounds: StepBounds,
    *,
    step_bytes: int,
    weight_bytes: int,
    with_graphs: bool,
    host_image_bytes: int,
    adapter_bytes: int = 0,
) -> tuple[int, MemoryPlan]:
    """The number of pages of the model's cache, and the plan of all memory. Call it when all weights are in memory.

    `step_bytes`: activations of the largest step. `weight_bytes`, and `host_image_bytes` for decoded images, count
    if the device is the host. Raises `CheckpointError` if memory is too small for the fewest pages.
    """
    reading = MemoryReading.of(model.device, weight_bytes, config.memory_limit)
    needs = memory_needs(
        model,
        config,
        bounds,
        step_bytes=step_bytes,
        available_bytes=reading.available_bytes,
        with_graphs=with_graphs,
        host_image_bytes=host_image_bytes,
        adapter_bytes=adapter_bytes,
    )
    return plan_memory(reading, needs, config.memory_utilization, config.num_kv_pages)


def memory_needs(
    model: Moondream,
    config: EngineConfig,
    bounds: StepBounds,
    *,
    step_bytes: int,
    available_bytes: int,
    with_graphs: bool,
    host_image_bytes: int,
    adapter_bytes: int = 0,
) -> MemoryNeeds:
    """The needs of steps within `bounds` on a device with `available_bytes` left; see `plan_cache`."""
    text, page_size = model.config.text, config.page_size
    typical_pages = -(-min(text.max_context, _TYPICAL_CONTEXT_TOKENS) // page_size)
    # Steps without a graph need memory in addition to the pools of captured graphs, which are as large.
    graph_bytes = step_bytes + min(_MOST_GRAPH_BYTES, available_bytes // _GRAPHS_SHARE) if with_graphs else 0
    on_device = model.device.type == "cuda"
    image_bytes = model.config.vision.num_image_tokens * text.dim * model.dtype.itemsize
    return MemoryNeeds(
        page_bytes=KVCache.bytes_per_page(text, page_size, cache_dtype(model, config)),
        least_pages=smallest_num_pages(model.config, page_size),
        batch_pages=bounds.max_batch_size * typical_pages,
        activation_bytes=step_bytes + _sampling_bytes(bounds.max_batch_size, text.vocab_size),
        graph_bytes=graph_bytes,
        image_bytes=_device_image_bytes(model, bounds) if on_device else host_image_bytes,
        adapter_bytes=adapter_bytes,
        image_cache_bytes=image_cache_bytes(
            config.image_cache_bytes, image_bytes, available_bytes, is_host=not on_device
        ),
    )


def _sampling_bytes(max_batch_size: int, vocab_size: int) -> int:
    """The tables of penalties, biases and allowed tokens: a row for each sequence, a spare one and padding."""
    num_rows = max_batch_size + 2
    return LogitAdjustments.num_bytes(num_rows, vocab_size) + AllowedTokens.num_bytes(num_rows, vocab_size)


def weight_bytes(model: Moondream) -> int:
    """Bytes of all weights that are in memory."""
    return sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)


def smallest_num_pages(model: MoondreamConfig, page_size: int) -> int:
    """The fewest pages with which every skill can run: for an image, a prompt with one word, and one sampled token.

    With a smaller cache some skill could never run. The scheduler requires no more pages on an idle engine.
    """
    templates = model.tokenizer.templates
    lengths = (
        max(map(len, parts.values())) if skill == "caption" else sum(map(len, parts.values())) + 1
        for skill, parts in templates.items()
    )
    longest = max(lengths, default=0)
    return -(-(model.text.prefix_attn + longest + 1) // page_size)


def cache_dtype(model: Moondream, config: EngineConfig) -> torch.dtype:
    """The type of cached keys and values."""
    return torch.float8_e4m3fn if config.kv_dtype == "float8" else model.dtype


def new_cache(model: Moondream, config: EngineConfig, num_pages: int) -> KVCache:
    """A cache on the model's device. Raises `CheckpointError` if there is no memory for it."""
    dtype = cache_dtype(model, config)
    try:
        return KVCache(model.config.text, num_pages, config.page_size, model.device, dtype)
    except torch.OutOfMemoryError as error:
        size = num_pages * KVCache.bytes_per_page(model.config.text, config.page_size, dtype)
        raise CheckpointError(
            f"no memory for a key-value cache of {num_pages} pages ({size / 2**30:.1f} GiB) on {model.device}"
        ) from error


def _device_image_bytes(model: Moondream, bounds: StepBounds) -> int:
    """Images on the device: the tiles of a full batch and of the next one, which the device tiler prefetches;
    embeddings and features of a full batch; the pixels of two images being tiled, before and after each resize."""
    vision, text = model.config.vision, model.config.text
    num_tiles = 1 + vision.max_crops
    tile_bytes = num_tiles * vision.crop_size**2 * vision.in_channels
    # Features are kept only while a batch of images is being encoded, until all tiles of their image are.
    num_feature_tiles = max(bounds.max_tiles, num_tiles) + num_tiles
    feature_bytes = num_feature_tiles * vision.num_image_tokens * vision.enc_dim * model.dtype.itemsize
    embedding_bytes = vision.num_image_tokens * text.dim * model.dtype.itemsize
    tiling_bytes = 2 * 2 * max_kept_bytes(MoondreamTiling(vision), decoded=True)
    return bounds.max_batch_size * (2 * tile_bytes + embedding_bytes) + feature_bytes + tiling_bytes
