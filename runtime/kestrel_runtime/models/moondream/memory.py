"""Computes the memory that a Moondream needs in addition to its weights, and creates its key-value cache.

The activations of the largest steps are measured on a CUDA device and estimated elsewhere. A measurement runs them
without captured graphs, before the cache is sized. Their tokens write no keys and values, so a cache of one page is
enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kestrel_ops import KeptFacts, invariant_attention_bytes
from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.execution.buckets import PrefillSize
from kestrel_runtime.execution.buckets import largest_prefill as largest_size
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.logits import AllowedTokens, LogitAdjustments
from kestrel_runtime.execution.step_inputs import (
    InputBuffers,
    PackedChunks,
    fill_blank_prefill,
)
from kestrel_runtime.imaging.crop_hash import CropHash
from kestrel_runtime.imaging.crops import max_kept_bytes
from kestrel_runtime.memory.plan import MemoryNeeds, crop_cache_bytes, image_cache_bytes
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.backends import Backends, FusedText, InvariantText
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.scheduling.limits import StepBounds

_TYPICAL_CONTEXT_TOKENS = 2048
_MOST_GRAPH_BYTES = 2048 * MIB
_GRAPHS_SHARE = 8
"""Graphs, without their pools, get at most one part in so many of the available memory."""
_CHUNKS_PER_CONTEXT = 4
_LARGEST_STEP = "bytes of the largest step"
LIBRARY_BYTES = "bytes of libraries for the measured products"
"""The fact of what these took of the device when a first start measured them before its largest step."""

_log = logging.getLogger(__name__)


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
    """Returns the needs of steps within `bounds` on a device with `available_bytes` left.

    `step_bytes`: activations of the largest step. `host_image_bytes` for decoded images count if the device is the
    host.
    """
    text, page_size = model.config.text, config.page_size
    typical_pages = -(-min(text.max_context, _TYPICAL_CONTEXT_TOKENS) // page_size)
    # Steps without a graph need memory in addition to the pools of captured graphs, which are as large.
    graph_bytes = step_bytes + min(_MOST_GRAPH_BYTES, available_bytes // _GRAPHS_SHARE) if with_graphs else 0
    on_device = model.device.type == "cuda"
    vision = model.config.vision
    image_bytes = vision.num_image_tokens * text.dim * model.dtype.itemsize
    crop_bytes = vision.num_image_tokens * vision.enc_dim * model.dtype.itemsize
    return MemoryNeeds(
        page_bytes=KVCache.bytes_per_page(text, page_size, cache_dtype(model.dtype, config)),
        least_pages=smallest_num_pages(model.config, page_size),
        batch_pages=bounds.max_batch_size * typical_pages,
        activation_bytes=step_bytes + _sampling_bytes(bounds.max_batch_size, text.vocab_size),
        graph_bytes=graph_bytes,
        image_bytes=_device_image_bytes(model, bounds) if on_device else host_image_bytes,
        adapter_bytes=adapter_bytes,
        image_cache_bytes=image_cache_bytes(
            config.image_cache_bytes, image_bytes, available_bytes, is_host=not on_device
        ),
        crop_cache_bytes=crop_cache_bytes(
            config.crop_cache_bytes, crop_bytes, available_bytes, is_host=not on_device
        ),
    )


def _sampling_bytes(max_batch_size: int, vocab_size: int) -> int:
    """Returns the bytes of penalties, biases and masks: a row for each sequence, a spare one and padding."""
    num_rows = max_batch_size + 2
    return LogitAdjustments.num_bytes(num_rows, vocab_size) + AllowedTokens.num_bytes(num_rows, vocab_size)


def weight_bytes(model: Moondream) -> int:
    """Returns the bytes of all weights that are in memory."""
    return sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)


def smallest_num_pages(model: MoondreamConfig, page_size: int) -> int:
    """Returns the fewest pages with which every skill can run: for an image, a prompt with one word, and one
    sampled token.

    With a smaller cache some skill could never run. The scheduler requires no more pages on an idle engine.
    """
    templates = model.tokenizer.templates
    lengths = (
        max(map(len, parts.values())) if skill == "caption" else sum(map(len, parts.values())) + 1
        for skill, parts in templates.items()
    )
    longest = max(lengths, default=0)
    return -(-(model.text.prefix_attn + longest + 1) // page_size)


def cache_dtype(dtype: torch.dtype, config: EngineConfig) -> torch.dtype:
    """Returns the type of cached keys and values of a model of `dtype`."""
    return torch.float8_e4m3fn if config.kv_dtype == "float8" else dtype


def new_cache(model: Moondream, config: EngineConfig, num_pages: int) -> KVCache:
    """Returns a cache on the model's device. Raises `CheckpointError` if there is no memory for it."""
    dtype = cache_dtype(model.dtype, config)
    try:
        return KVCache(model.config.text, num_pages, config.page_size, model.device, dtype)
    except torch.OutOfMemoryError as error:
        size = num_pages * KVCache.bytes_per_page(model.config.text, config.page_size, dtype)
        raise CheckpointError(
            f"no memory for a key-value cache of {num_pages} pages ({size / 2**30:.1f} GiB) on {model.device}"
        ) from error


def _device_image_bytes(model: Moondream, bounds: StepBounds) -> int:
    """Returns the bytes of images on the device.

    These are the crops of a full batch and of the next one, which the device cropper prefetches; embeddings and
    features of a full batch; and the pixels of two images being divided, before and after resizes, with the hashes
    of their crops.
    """
    vision, text = model.config.vision, model.config.text
    num_crops = 1 + vision.max_crops
    crop_bytes = num_crops * vision.crop_size**2 * vision.in_channels
    # Features are kept only while a batch of images is being encoded, until all crops of their image are, and are
    # copied together with those of cached crops for the projection.
    num_feature_crops = 2 * max(bounds.max_crops, num_crops) + num_crops
    feature_bytes = num_feature_crops * vision.num_image_tokens * vision.enc_dim * model.dtype.itemsize
    embedding_bytes = vision.num_image_tokens * text.dim * model.dtype.itemsize
    cropping_bytes = 2 * 2 * max_kept_bytes(MoondreamCropping(vision), decoded=True)
    cropping_bytes += CropHash.work_bytes(crop_bytes // num_crops, num_crops)
    return bounds.max_batch_size * (2 * crop_bytes + embedding_bytes) + feature_bytes + cropping_bytes


def step_bytes(
    model: Moondream,
    backends: Backends,
    bounds: StepBounds,
    page_size: int,
    dtype: torch.dtype,
    slabs: AdapterSlabs | None = None,
    facts: KeptFacts | None = None,
) -> int:
    """Returns the bytes of the largest step within `bounds`, with a cache of `dtype`.

    With `slabs` its rows use the first of these slots.

    Measured on a CUDA device with a fused text backend, or taken from `facts`, as an earlier start has measured it.
    Estimated elsewhere, or if the measurement fails, for example for lack of memory.
    """
    estimate = estimated_step_bytes(model.config, bounds, model.dtype.itemsize, with_adapters=slabs is not None)
    on_device, is_invariant = model.device.type == "cuda", isinstance(backends.text, InvariantText)
    if is_invariant and not on_device:
        text = model.config.text
        return estimate + invariant_attention_bytes(text.n_heads, text.head_dim, page_size)
    if not on_device or not (is_invariant or isinstance(backends.text, FusedText)):
        return estimate
    kept = None if facts is None else facts.get(_LARGEST_STEP)
    if kept is not None:
        _log.info("largest step: %.0f MiB of activations, as measured by an earlier start", kept / MIB)
        return kept
    try:
        others = 0 if facts is None else bytes_of_others(model.device)
        cache = KVCache(model.config.text, 1, page_size, model.device, dtype)
        works = (largest_prefill(model, backends, cache, bounds, slabs), largest_encode(model, backends, bounds))
        measured = max(map(peak_bytes, works))
    except RuntimeError as error:
        _log.warning("activations are estimated, not measured: %s", str(error).partition("\n")[0])
        return estimate
    _log.info("largest step: %.0f MiB of activations, estimated %.0f", measured / MIB, estimate / MIB)
    if facts is not None:
        # A start that does not measure has not yet given libraries what they take at their first use.
        grown = max(bytes_of_others(model.device) - others, 0)
        facts.put(_LARGEST_STEP, measured + grown + (facts.get(LIBRARY_BYTES) or 0))
    return measured


def bytes_of_others(device: torch.device) -> int:
    """Returns the bytes of device memory in use that torch's allocator does not hold."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def estimated_step_bytes(
    config: MoondreamConfig, bounds: StepBounds, itemsize: int, *, with_adapters: bool = False
) -> int:
    """Returns an upper estimate of the activations of the largest step. Crops and prompts use the same memory, one
    after the other.

    A block holds the residual stream and its delta in float32, its products, and copies of them for the next
    product. Adapters take the inputs of a layer once more, and their own results.
    """
    text, vision = config.text, config.vision
    token_bytes = 4 * text.dim * 4 + (2 * (text.qkv_dim + text.ff_dim) + 4 * text.dim) * itemsize
    if text.moe is not None:
        token_bytes += text.moe.experts_per_token * (4 * text.moe.expert_inner_dim + 3 * text.dim) * itemsize
    if with_adapters:
        inner = text.ff_dim if text.moe is None else text.moe.experts_per_token * 2 * text.moe.expert_inner_dim
        token_bytes += (max(text.qkv_dim, inner) + inner + text.dim) * itemsize
    patch_bytes = (2 * (3 * vision.enc_dim + vision.enc_ff_dim) + 6 * vision.enc_dim) * itemsize
    num_tokens = max(bounds.max_prefill_tokens, text.prefix_attn)
    num_patches = max(bounds.max_crops, 1 + vision.max_crops) * vision.num_image_tokens
    return max(num_tokens * token_bytes, num_patches * patch_bytes)


def largest_prefill(
    model: Moondream, backends: Backends, cache: KVCache, bounds: StepBounds, slabs: AdapterSlabs | None = None
) -> Callable[[], Tensor]:
    """Returns a prefill of as many tokens as a step may have, in chunks of a part of the longest context. With
    `slabs` all tokens use the first of these slots.
    """
    text, tokens = model.config.text, bounds.max_prefill_tokens
    max_pages = -(-text.max_context // cache.page_size)
    num_chunks = -(-tokens // text.max_context) * _CHUNKS_PER_CONTEXT
    size = largest_size(tokens, num_chunks, max_pages)._replace(max_chunk=-(-tokens // num_chunks))
    prefill = blank_prefill(model, backends, cache, size)
    if slabs is None:
        return prefill
    slots = torch.ones(size.num_tokens, dtype=torch.int64, device=model.device)
    return partial(prefill, adapters=slabs.for_rows(slots))


def blank_prefill(model: Moondream, backends: Backends, cache: KVCache, size: PrefillSize) -> Callable[..., Tensor]:
    """Returns a prefill of padding, which writes no keys and values; it takes `adapters`."""
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
        visible_until=fields.visible_until,
        max_chunk=size.max_chunk,
    )
    embeddings = torch.zeros(size.num_tokens, model.config.text.dim, dtype=model.dtype, device=device)
    return partial(backends.text.prefill, embeddings, chunks, fields.sample_tokens, cache)


def largest_encode(model: Moondream, backends: Backends, bounds: StepBounds) -> Callable[[], Tensor]:
    """Returns the encoding of as many crops as a step may have, of images with two crops, and their projection."""
    vision = model.config.vision
    num_images = -(-max(bounds.max_crops, 1 + vision.max_crops) // 2)
    crops = torch.zeros(
        2 * num_images,
        vision.crop_size,
        vision.crop_size,
        vision.in_channels,
        dtype=torch.uint8,
        device=model.device,
    )

    def encode() -> Tensor:
        features = backends.vision.encode(crops).split(2)
        return backends.vision.project_all(features, [(1, 1)] * num_images)

    return encode


@torch.inference_mode()
def peak_bytes(work: Callable[[], Tensor]) -> int:
    """Returns the peak device memory of `work` in bytes, beyond the memory in use before. Runs it twice and
    synchronises.

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
