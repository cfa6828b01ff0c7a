"""Has the kernels that a model needs compiled, all of them at once, before its first step.

Steps of all sizes run through a few blocks of the model, one of each kind, while kernels are compiled instead of
launched. So it is the code of the steps that says what is needed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kestrel_ops import compiled_together
from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize, batch_sizes, largest_prefill
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import InputBuffers, fill_blank_decode
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.models.moondream.execution_config import UNFUSED, ExecutionConfig
from kestrel_runtime.models.moondream.fused.weights import NUM_WIDE_BLOCKS
from kestrel_runtime.models.moondream.memory import blank_prefill
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.vision.device_tiling import Tiler
from kestrel_runtime.models.moondream.vision.tiling import MoondreamTiling
from kestrel_runtime.scheduling.limits import StepBounds

_NUM_SMALLEST, _NUM_OTHERS = 8, 10
"""Numbers of tokens in one prompt: all of the smallest, and so many of the others."""

_log = logging.getLogger(__name__)


@torch.inference_mode()
def compile_kernels(
    model: Moondream, execution: ExecutionConfig, bounds: StepBounds, page_size: int, cache_dtype: torch.dtype
) -> None:
    """Compile what steps within `bounds` need on a CUDA device; elsewhere nothing is compiled."""
    if model.device.type != "cuda" or execution.text in UNFUSED:
        return
    started = time.monotonic()
    small = abridged(model)
    with compiled_together(available_processors()):
        paths = ModelPaths.of(small, execution, max_batch_size=bounds.max_batch_size)
        _run_text(small, paths, bounds, KVCache(small.config.text, 1, page_size, model.device, cache_dtype))
        _run_vision(small, paths, execution)
        for num_rows in (1, 2, 16):  # one is a kind of its own, and so are multiples of 16
            numbers = torch.zeros(2, num_rows, dtype=torch.int64, device=model.device)
            execution.kernels.philox_uniform(*numbers)
    _log.info("kernels are compiled and loaded after %.1f s", time.monotonic() - started)


def abridged(model: Moondream) -> Moondream:
    """The same model with one block of each kind, on the same weights."""
    text, vision = model.config.text, model.config.vision
    layers = {0, min(NUM_WIDE_BLOCKS, text.n_layers - 1), text.n_layers - 1}
    moe = text.moe
    if moe is not None:
        layers.add(moe.start_layer)
        moe = replace(moe, start_layer=sum(layer < moe.start_layer for layer in layers))
    kept = sorted(layers)
    config = replace(
        model.config, text=replace(text, n_layers=len(kept), moe=moe), vision=replace(vision, enc_n_layers=1)
    )
    blocks = {f"text.blocks.{layer}": f"text.blocks.{place}" for place, layer in enumerate(kept)}
    blocks["vision.blocks.0"] = "vision.blocks.0"
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        section, is_block, rest = name.partition(".blocks.")
        if not is_block:
            state[name] = tensor
            continue
        number, _, parameter = rest.partition(".")
        if place := blocks.get(f"{section}.blocks.{number}"):
            state[f"{place}.{parameter}"] = tensor
    with torch.device("meta"):
        small = Moondream(config, fp8_experts=any(name.endswith(".scale") for name in state))
    small.load_state_dict(state, assign=True)
    return small.eval().requires_grad_(False)


def _run_text(model: Moondream, paths: ModelPaths, bounds: StepBounds, cache: KVCache) -> None:
    device, max_pages = model.device, -(-model.config.text.max_context // cache.page_size)
    for size in _prefill_sizes(bounds, max_pages):
        blank_prefill(model, paths, cache, size)()
    inputs = InputBuffers(device, 2)
    for num_rows in batch_sizes(bounds.max_batch_size):
        size = DecodeSize(num_rows, max_pages)
        fields = inputs.decode(size, partial(fill_blank_decode, padding_row=0), in_place=False)
        embeddings = torch.zeros(num_rows, model.config.text.dim, dtype=model.dtype, device=device)
        pages = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        paths.text.decode(embeddings, fields.positions, pages, cache)


def _prefill_sizes(bounds: StepBounds, max_pages: int) -> set[PrefillSize]:
    """Some numbers of tokens, each of samples after short chunks, and each of samples after long ones.

    Kernels differ by ranges of these numbers. One that none of them needs is compiled when a graph is captured.
    """
    largest = largest_prefill(
        bounds.max_prefill_tokens,
        bounds.max_batch_size,
        max_pages,
        cuts_at_share_points=bounds.cuts_at_share_points,
    )
    counts = range(1, bounds.max_batch_size + 1)
    singles = sorted(
        {PrefillSize.bucket(tokens, 1, tokens, largest) for tokens in range(1, largest.num_tokens + 1)}
    )
    return {
        *singles[:_NUM_SMALLEST],
        *singles[_NUM_SMALLEST :: max(1, len(singles) // _NUM_OTHERS)],
        singles[-1],
        *(PrefillSize.bucket(count, count, 1, largest) for count in counts),
        *(PrefillSize.bucket(largest.num_tokens, count, largest.num_tokens, largest) for count in counts),
    }


def _run_vision(model: Moondream, paths: ModelPaths, execution: ExecutionConfig) -> None:
    vision, side = model.config.vision, model.config.vision.crop_size
    features = []
    for count in (1, 2, 16):  # one is a kind of its own, and so are multiples of 16
        tiles = torch.zeros(count, side, side, vision.in_channels, dtype=torch.uint8, device=model.device)
        features.append(paths.vision.encode(tiles))
    paths.vision.project_all([features[1]], [(1, 1)])
    if execution.resizes_images:
        tiler = Tiler(MoondreamTiling(vision), model.device, execution.kernels.resample)
        tiler.tile(torch.zeros(2 * side, 3 * side, 3, dtype=torch.uint8, device=model.device), 1, 1)
