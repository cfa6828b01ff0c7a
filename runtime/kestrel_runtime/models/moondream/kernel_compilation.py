"""Compiles all kernels that a model needs, before its first step.

Steps of all sizes run through a few blocks without weights, one of each kind, while kernels are compiled instead of
launched. So the code of the steps determines the kernels, and neither weights nor a device are required.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

import kestrel_runtime
from kestrel_ops import (
    COMPILED_AHEAD,
    DeviceLimits,
    KeptFacts,
    Kernels,
    ModelShape,
    compiled_together,
    kept_facts,
    load_listed,
    measured_products,
    meta_stands_for,
)
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize, batch_sizes, largest_prefill
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import InputBuffers, fill_blank_decode
from kestrel_runtime.imaging.crop_hash import CropHash
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs, RowAdapters
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig, vision_shape
from kestrel_runtime.models.moondream.fused.vision import SHORT_TYPES, run_products
from kestrel_runtime.models.moondream.fused.weights import NUM_WIDE_BLOCKS
from kestrel_runtime.models.moondream.memory import LIBRARY_BYTES, blank_prefill, bytes_of_others, cache_dtype
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.sampling import VALUES_PER_TOKEN
from kestrel_runtime.models.moondream.text.decoder import ExpertFormat
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper
from kestrel_runtime.models.moondream.vision.graphs import FASTEST_PRODUCTS, measured_counts
from kestrel_runtime.models.moondream.weights.published import PUBLISHED
from kestrel_runtime.scheduling.limits import StepBounds

_NUM_SMALLEST, _NUM_OTHERS = 8, 10
"""Numbers of tokens in one prompt: all of the smallest, and so many of the others."""

_LISTED = "kernels"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """The properties of a model and its configuration that its kernels depend on."""

    config: MoondreamConfig
    execution: ExecutionConfig
    bounds: StepBounds
    dtype: torch.dtype
    """The dtype of the model."""
    cache_dtype: torch.dtype
    page_size: int
    expert_format: ExpertFormat
    adapter_slots: int = 0
    """0 for a server without adapters."""
    max_adapter_rank: int = 0

    def identity(self) -> tuple[object, ...]:
        """Returns what distinguishes these needs, by `repr`, from others."""
        execution = self.execution
        chosen = {field.name: getattr(execution.kernels, field.name) for field in fields(execution.kernels)}
        names = {name: f"{function.__module__}.{function.__qualname__}" for name, function in chosen.items()}
        own = (execution.text, execution.vision, execution.with_graphs, execution.resizes_images, names)
        return (*(getattr(self, field.name) for field in fields(self) if field.name != "execution"), *own)


def kernel_needs(
    config: MoondreamConfig,
    settings: EngineConfig,
    execution: ExecutionConfig,
    bounds: StepBounds,
    dtype: torch.dtype,
    expert_format: ExpertFormat,
) -> KernelNeeds:
    """Returns what a model of `dtype` with experts in this format needs under `settings`."""
    return KernelNeeds(
        config,
        execution,
        bounds,
        dtype,
        cache_dtype(dtype, settings),
        settings.page_size,
        expert_format,
        settings.num_adapter_slots if settings.has_adapters else 0,
        settings.max_adapter_rank,
    )


def load_kernels(needs: KernelNeeds, device: torch.device, may_fork: threading.Event | None = None) -> KeptFacts:
    """Loads the kernels onto a CUDA device, or compiles them; returns what earlier starts have found.

    `may_fork` is set once no other thread has tensors on the device.
    """
    facts = kept_facts(needs.identity(), (kestrel_runtime,))
    compile_kernels(needs, DeviceLimits.of(device), facts=facts, may_fork=may_fork)
    return facts


@torch.inference_mode()
def compile_kernels(
    needs: KernelNeeds,
    limits: DeviceLimits,
    *,
    kept_in: Path | None = None,
    facts: KeptFacts | None = None,
    may_fork: threading.Event | None = None,
) -> int:
    """Compiles the kernels of steps for a CUDA device with these limits; loads them, or only keeps them in a
    folder.

    With `facts` the list of kernels is kept, by which the next start of the same configuration loads them without
    running the steps. Other processes compile once `may_fork` is set. Returns the number of kernels.
    """
    if needs.execution.text == "plain":
        return 0
    started = time.monotonic()
    listed = None if facts is None else facts.get(_LISTED)
    if listed is not None and (loaded := load_listed(listed)) is not None:
        _log.info("kernels are compiled and loaded after %.1f s: %d", time.monotonic() - started, loaded)
        return loaded
    # On `meta` torch takes twice as long for its part.
    device = torch.device("meta" if kept_in else "cuda")
    model = outline(needs.config, needs.dtype, device, needs.expert_format)
    execution = replace(needs.execution, kernels=needs.execution.kernels.of_shapes())
    vision = (
        None if execution.vision == "plain" else vision_shape(needs.config.vision, execution.vision, needs.dtype)
    )
    others = needs.execution.kernels.compilations(ModelShape("cuda", limits.capability, needs.dtype, None, vision))
    with compiled_together(
        available_processors(),
        limits,
        kept_in=kept_in,
        others=others,
        may_fork=may_fork,
        meanwhile=None if facts is None or kept_in is not None else partial(_measure_products, needs, facts),
    ) as compiled:
        _run(model, execution, needs)
    if kept_in is None:
        del model, execution
        torch.cuda.empty_cache()
    if facts is not None:
        facts.put(_LISTED, compiled)
    _log.info("kernels are compiled after %.1f s: %d", time.monotonic() - started, len(compiled))
    return len(compiled)


def _measure_products(needs: KernelNeeds, facts: KeptFacts) -> None:
    """Measures the products of the encoder whose graphs a start captures, unless memory does not suffice."""
    vision, execution = needs.config.vision, needs.execution
    is_float8 = execution.vision == "calibrated-float8"
    if not execution.with_graphs or not (is_float8 or (execution.vision == "fused" and needs.dtype in SHORT_TYPES)):
        return
    choices: dict[str, int] = {}
    out = torch.empty(0, dtype=needs.dtype, device="cuda")
    others = bytes_of_others(out.device)
    try:
        with measured_products(choices):
            for count in measured_counts(needs.bounds.max_crops, 1 + vision.max_crops):
                run_products(vision, execution.kernels, count, out, is_float8=is_float8)
    except RuntimeError as error:
        _log.debug("products are measured later: %s", error)
        return
    facts.put(FASTEST_PRODUCTS, choices)
    facts.put(LIBRARY_BYTES, max(bytes_of_others(out.device) - others, 0))


def _run(model: Moondream, execution: ExecutionConfig, needs: KernelNeeds) -> None:
    bounds, text = needs.bounds, model.config.text
    backends = Backends.of(model, execution, max_batch_size=bounds.max_batch_size)
    cache, slabs = KVCache(text, 1, needs.page_size, model.device, needs.cache_dtype), None
    if needs.adapter_slots:  # only their sizes count, and they may be large
        meta = torch.device("meta")
        slabs = AdapterSlabs(text, needs.adapter_slots, needs.max_adapter_rank, meta, needs.dtype)
    with backends.arithmetic:
        _run_text(model, backends, bounds, cache, slabs)
        if backends.is_invariant:
            _run_heads(model, bounds)
    _run_vision(model, backends, execution)
    _run_sampling(model, execution.kernels)


def compile_ahead(
    name: str, settings: EngineConfig, capability: tuple[int, int], folder: Path | None
) -> tuple[int, Path]:
    """Compiles the kernels of a published model for a card that may be absent, and keeps them in a folder.

    The default folder is where servers of this installation look for them. Returns the number of kernels and the
    folder. Raises `CheckpointError` if the card cannot serve the model with these settings.
    """
    config, has_float8_experts = PUBLISHED[name]
    stored: ExpertFormat = "float8" if has_float8_experts else "model"
    expert_format = stored if settings.expert_dtype == "auto" else cast("ExpertFormat", settings.expert_dtype)
    limits, dtype = DeviceLimits.of_card(capability), torch.bfloat16
    with meta_stands_for(limits):
        model = outline(config, dtype, torch.device("meta"), expert_format)
        execution = ExecutionConfig.of(settings, "cuda", model)
    needs = kernel_needs(config, settings, execution, StepBounds.of(settings, "cuda"), dtype, expert_format)
    folder = folder or COMPILED_AHEAD
    return compile_kernels(needs, limits, kept_in=folder), folder


def outline(
    config: MoondreamConfig, dtype: torch.dtype, device: torch.device, expert_format: ExpertFormat
) -> Moondream:
    """Returns a model with one block of each kind, whose weights have sizes and types, and no values."""
    text, moe = config.text, config.text.moe
    layers = {0, min(NUM_WIDE_BLOCKS, text.n_layers - 1), text.n_layers - 1}
    if moe is not None:
        layers.add(moe.start_layer)
        moe = replace(moe, start_layer=sum(layer < moe.start_layer for layer in layers))
    text = replace(text, n_layers=len(layers), moe=moe)
    small = replace(config, text=text, vision=replace(config.vision, enc_n_layers=1))
    with torch.device("meta"):
        model = Moondream(small, expert_format=expert_format)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        keeps_type = tensor.dtype.itemsize == 1 or name.endswith(".scale")
        state[name] = torch.empty(tensor.shape, dtype=tensor.dtype if keeps_type else dtype, device=device)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def _run_text(
    model: Moondream, backends: Backends, bounds: StepBounds, cache: KVCache, slabs: AdapterSlabs | None
) -> None:
    def every_kind(num_rows: int) -> Iterator[RowAdapters | None]:
        yield None
        if slabs is not None:
            yield slabs.for_rows(torch.zeros(num_rows, dtype=torch.int64, device=model.device))

    device, max_pages = model.device, -(-model.config.text.max_context // cache.page_size)
    inputs = InputBuffers(device, 2)
    for size in _prefill_sizes(bounds, max_pages):
        prefill = blank_prefill(model, backends, cache, size)
        for adapters in every_kind(size.num_tokens):
            prefill(adapters=adapters)
    for num_rows in batch_sizes(bounds.max_batch_size):
        size = DecodeSize(num_rows, max_pages)
        fields = inputs.decode(size, partial(fill_blank_decode, padding_row=0), in_place=False)
        embeddings = torch.zeros(num_rows, model.config.text.dim, dtype=model.dtype, device=device)
        pages = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        for adapters in every_kind(num_rows):
            backends.text.decode(embeddings, fields.positions, pages, cache, adapters)


def _run_heads(model: Moondream, bounds: StepBounds) -> None:
    """Runs the products of embedding and sampling, which are Triton's in an `InvariantMode`."""
    text, region = model.config.text, model.region
    for num_rows in (*batch_sizes(bounds.max_batch_size), bounds.max_prefill_tokens):
        ids = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
        values = torch.zeros(num_rows, 2, device=model.device)
        model.embed_sampled(ids, ids, values, value_kinds=3)
        hidden = torch.zeros(num_rows, text.dim, dtype=model.dtype, device=model.device)
        region.coordinate_logits(hidden)
        region.size_logits(hidden)
        if num_rows <= bounds.max_batch_size:
            model.text.logits(hidden)


def _prefill_sizes(bounds: StepBounds, max_pages: int) -> set[PrefillSize]:
    """Yields some numbers of tokens, each of samples after short chunks, and each of samples after long ones.

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


def _run_sampling(model: Moondream, kernels: Kernels) -> None:
    """Launches what steps of text, of tokens with values, and of random samples launch."""
    device, vocab_size = model.device, model.config.text.vocab_size
    forbidden = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
    successors = torch.zeros(1, 4, dtype=torch.int64, device=device)
    for num_rows in (1, 2, 16):  # one is a kind of its own, and so are multiples of 16
        integers = torch.zeros(num_rows, 6, dtype=torch.int64, device=device)
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        kernels.philox_uniform(*torch.zeros(2, num_rows, dtype=torch.int64, device=device))
        logits = torch.zeros(num_rows, vocab_size, dtype=model.dtype, device=device)
        ids = kernels.pick_allowed(logits, forbidden, integers[:, 2])
        values, scores = torch.zeros(num_rows, 3, device=device).split(VALUES_PER_TOKEN, 1)
        columns = integers, values, successors
        kernels.advance_rows(*columns, rows, ids, is_finite=rows == 0)
        kernels.advance_rows(*columns, rows, ids, rows, values, scores, rows == 0)


def _run_vision(model: Moondream, backends: Backends, execution: ExecutionConfig) -> None:
    vision, side = model.config.vision, model.config.vision.crop_size
    features = []
    for count in (1, 2, 16):  # one is a kind of its own, and so are multiples of 16
        crops = torch.zeros(count, side, side, vision.in_channels, dtype=torch.uint8, device=model.device)
        features.append(backends.vision.encode(crops))
    backends.vision.project_all([features[1]], [(1, 1)])
    if execution.resizes_images:
        cropper = Cropper(MoondreamCropping(vision), model.device, execution.kernels.resample)
        # Pixels of decoders have a fourth channel where they are taken in place, which is nearly always.
        for shape in ((2 * side, 3 * side, 4), (2 * side, 3 * side, 3), (9 * side, 2 * side, 4)):
            crops = cropper.crop(torch.zeros(shape, dtype=torch.uint8, device=model.device), 1, 1)
        crop_hash = CropHash(crops[0].numel(), model.device, execution.kernels.hash_words)
        crop_hash(crops)
