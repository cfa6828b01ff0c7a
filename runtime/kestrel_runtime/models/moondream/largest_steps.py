"""The memory of the activations of the largest steps: measured on a CUDA device, else an upper estimate.

A measurement runs the largest steps without captured graphs, before the cache is sized. Their tokens write no keys
and values, so a cache of one page is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kestrel_ops import invariant_attention_bytes
from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.buckets import PrefillSize
from kestrel_runtime.execution.buckets import largest_prefill as largest_size
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import InputBuffers, PackedChunks, fill_blank_prefill
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.invariant_path import InvariantText
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.text_path import FusedText
from kestrel_runtime.scheduling.limits import StepBounds

_CHUNKS_PER_CONTEXT = 4

_log = logging.getLogger(__name__)


def step_bytes(model: Moondream, paths: ModelPaths, bounds: StepBounds, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of the largest step within `bounds`, with a cache of `dtype`.

    Measured on a CUDA device with a fused text path. Estimated elsewhere, or if the measurement fails, for example
    for lack of memory.
    """
    estimate = estimated_step_bytes(model.config, bounds, model.dtype.itemsize)
    if isinstance(paths.text, InvariantText):
        text = model.config.text
        return estimate + invariant_attention_bytes(text.n_heads, text.head_dim, page_size)
    if model.device.type != "cuda" or not isinstance(paths.text, FusedText):
        return estimate
    try:
        cache = KVCache(model.config.text, 1, page_size, model.device, dtype)
        works = (largest_prefill(model, paths, cache, bounds), largest_encode(model, paths, bounds))
        measured = max(map(peak_bytes, works))
    except RuntimeError as error:
        _log.warning("activations are estimated, not measured: %s", str(error).partition("\n")[0])
        return estimate
    _log.info("largest step: %.0f MiB of activations, estimated %.0f", measured / MIB, estimate / MIB)
    return measured


def estimated_step_bytes(config: MoondreamConfig, bounds: StepBounds, itemsize: int) -> int:
    """An upper estimate of the activations of the largest step. Tiles and prompts use the same memory, one after
    the other.

    A block holds the residual stream and its delta in float32, its products, and copies of them for the next
    product.
    """
    text, vision = config.text, config.vision
    token_bytes = 4 * text.dim * 4 + (2 * (text.qkv_dim + text.ff_dim) + 4 * text.dim) * itemsize
    if text.moe is not None:
        token_bytes += text.moe.experts_per_token * (4 * text.moe.expert_inner_dim + 3 * text.dim) * itemsize
    patch_bytes = (2 * (3 * vision.enc_dim + vision.enc_ff_dim) + 6 * vision.enc_dim) * itemsize
    num_tokens = max(bounds.max_prefill_tokens, text.prefix_attn)
    num_patches = max(bounds.max_tiles, 1 + vision.max_crops) * vision.num_image_tokens
    return max(num_tokens * token_bytes, num_patches * patch_bytes)


def largest_prefill(
    model: Moondream, paths: ModelPaths, cache: KVCache, bounds: StepBounds
) -> Callable[[], Tensor]:
    """A prefill of as many tokens as a step may have, in chunks of a part of the longest context."""
    text, tokens = model.config.text, bounds.max_prefill_tokens
    max_pages = -(-text.max_context // cache.page_size)
    num_chunks = -(-tokens // text.max_context) * _CHUNKS_PER_CONTEXT
    size = largest_size(tokens, num_chunks, max_pages)._replace(max_chunk=-(-tokens // num_chunks))
    return blank_prefill(model, paths, cache, size)


def blank_prefill(model: Moondream, paths: ModelPaths, cache: KVCache, size: PrefillSize) -> Callable[[], Tensor]:
    """A prefill of padding, which writes no keys and values."""
    device = model.device
    fields = InputBuffers(device, 2).prefill(
        size, partial(fill_blank_prefill, size=size, padding_row=0), in_place=False
    )
    chunks = PackedChunks(
        positions=fields.positions,
        slots=fields.kv_slots,
        page_table=torch.zeros(size.num_chunks, size.max_pages, dtype=torch.int32, device=device),
        query_starts=fields.query_starts,
        lengths=fields.context_lengths,
        prefix_lengths=fields.prefix_lengths,
        max_chunk=size.max_chunk,
    )
    embeddings = torch.zeros(size.num_tokens, model.config.text.dim, dtype=model.dtype, device=device)
    return partial(paths.text.prefill, embeddings, chunks, fields.sample_tokens, cache)


def largest_encode(model: Moondream, paths: ModelPaths, bounds: StepBounds) -> Callable[[], Tensor]:
    """The encoding of as many tiles as a step may have, of images with two tiles, and their projection."""
    vision = model.config.vision
    num_images = -(-max(bounds.max_tiles, 1 + vision.max_crops) // 2)
    tiles = torch.zeros(
        2 * num_images,
        vision.crop_size,
        vision.crop_size,
        vision.in_channels,
        dtype=torch.uint8,
        device=model.device,
    )

    def encode() -> Tensor:
        features = paths.vision.encode(tiles).split(2)
        return paths.vision.project_all(features, [(1, 1)] * num_images)

    return encode


@torch.inference_mode()
def peak_bytes(work: Callable[[], Tensor]) -> int:
    """Peak device memory of `work`, beyond the memory in use before. Runs it twice and synchronises.

    It is the larger one of two increases: of the memory that the allocator reserves, and of the memory of tensors.
    """
    work()  # compilers and libraries allocate at first use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    work()
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved)
