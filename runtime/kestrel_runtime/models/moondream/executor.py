"""Runs the steps of a Moondream: tiles to embeddings, packed prompts and decode steps to sampled tokens.

Uses the plain or fused paths of `ModelPaths`, and replays captured graphs where they exist.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kestrel_ops import Kernels, measured_products
from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize, batch_sizes, largest_prefill
from kestrel_runtime.execution.executor import DeviceMemory
from kestrel_runtime.execution.graph_policy import CapturedGraphs, Works
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import SampleNeeds
from kestrel_runtime.execution.step_inputs import (
    DecodeInputs,
    PackedChunks,
    PrefillInputs,
    fill_blank_decode,
    fill_blank_prefill,
)
from kestrel_runtime.execution.step_runner import StateShape, StepRunner
from kestrel_runtime.imaging.device_tiles import TileSource
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.fused.vision import joined
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.sampling import (
    COORDINATES_BIT,
    SIZES_BIT,
    VALUES_PER_TOKEN,
    MoondreamSampler,
    value_kinds,
)
from kestrel_runtime.models.moondream.vision.device_tiling import Tiler
from kestrel_runtime.models.moondream.vision.graphs import EncodeGraphs
from kestrel_runtime.models.moondream.vision.tiling import MoondreamTiling
from kestrel_runtime.scheduling import sequence as scheduling
from kestrel_runtime.scheduling.batch import EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds

_ALL_KINDS = COORDINATES_BIT | SIZES_BIT
_USUAL_NEEDS = tuple(
    SampleNeeds(is_random, kinds, is_restricted=is_restricted)
    for kinds, is_restricted in ((0, False), (0, True), (COORDINATES_BIT, False), (_ALL_KINDS, False))
    for is_random in (True, False)
)
"""Text, constrained text, points, and points and boxes in the batch."""
_DEFAULT_GRAPH_BYTES = 4096 * MIB

_log = logging.getLogger(__name__)


class MoondreamExecutor:
    """The family's `Executor`."""

    def __init__(
        self,
        model: Moondream,
        paths: ModelPaths,
        kernels: Kernels,
        memory: DeviceMemory,
        adapters: AdapterSlabs | None = None,
    ) -> None:
        self._adapters = adapters
        self._add_low_rank = kernels.add_low_rank
        self._model = model
        self._paths = paths
        self._memory = memory
        self._sampler = MoondreamSampler(model, memory.state, memory.rules, kernels.philox_uniform)
        tiler = Tiler(MoondreamTiling(model.config.vision), model.device, kernels.resample)
        self._tiles = TileSource(tiler.make_tiles, tiler.upload)
        self._features: dict[int, list[Tensor]] = {}  # of tiles encoded so far, by sequence id
        self._encode_tiles: Callable[[Tensor], Tensor] = paths.vision.encode
        self._encode_graphs: EncodeGraphs | None = None
        self._prefill_graphs: CapturedGraphs | None = None
        self._first_token_graphs: CapturedGraphs | None = None
        self._decode_graphs: CapturedGraphs | None = None
        if memory.graphs is not None:
            graphs, budget = memory.graphs, memory.graphs.budget
            self._decode_graphs = CapturedGraphs("decode steps", graphs.decode, budget)
            # [largest batch, dim]: written by graphs of layers, read by graphs that sample.
            self._decoded = torch.zeros(
                batch_sizes(memory.bounds.max_batch_size)[-1],
                model.config.text.dim,
                dtype=model.dtype,
                device=model.device,
            )
            if paths.captures_prefill:
                self._prefill_graphs = CapturedGraphs("prefill steps", graphs.prefill, budget)
                self._first_token_graphs = CapturedGraphs("first tokens", graphs.prefill, budget)
                # [most samples, dim]: written by prefill graphs, read by graphs that sample first tokens.
                self._prefilled = torch.zeros(
                    self._sample_counts()[-1], model.config.text.dim, dtype=model.dtype, device=model.device
                )
            if paths.captures_encode:
                vision = model.config.vision
                self._encode_tiles = self._encode_graphs = EncodeGraphs(
                    paths.vision.encode,
                    (vision.crop_size, vision.crop_size, vision.in_channels),
                    model.device,
                    graphs.prefill,
                    budget,
                    max_tiles=memory.bounds.max_tiles,
                    max_tiles_of_image=1 + vision.max_crops,
                )

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encode tiles. An image whose last tile is among them is projected into its entry."""
        pixels = [
            self._tiles.take(item.sequence.id, _image_of(item), item.first_tile, item.end_tile) for item in items
        ]
        features = self._encode_tiles(joined(pixels)).split([len(part) for part in pixels])
        complete: list[tuple[int, Tensor, tuple[int, int]]] = []
        for item, encoded in zip(items, features, strict=True):
            if not item.first_tile:
                self._features[item.sequence.id] = []
            known = self._features[item.sequence.id]
            known.append(encoded)
            if item.is_last:
                image = _image_of(item)
                complete.append((item.entry, joined(known), (image.rows, image.columns)))
                del self._features[item.sequence.id]
        if complete:
            entries, images, tilings = zip(*complete, strict=True)
            projected = self._paths.vision.project_all(images, tilings)
            for entry, embeddings in zip(entries, projected, strict=True):
                self._memory.embeddings[entry] = embeddings

    def forward(self, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """[N or B, dim], before the final LayerNorm.

        The layers need a graph for each size, sampling one for each number of rows and kind of needs. One graph for
        both would need far more captures, one for each combination.
        """
        if isinstance(inputs, DecodeInputs):
            if self._decode_graphs is None:
                return self._decode_hidden(inputs)
            has_values = inputs.needs.value_kinds != 0
            key = ("layers", inputs.size, has_values, inputs.uses_adapters)
            return self._decode_graphs.run(key, partial(self._decode, inputs))
        if self._prefill_graphs is None or not inputs.is_in_place:
            return self.prefill_hidden(inputs)
        key = (inputs.size, inputs.value_kinds, inputs.uses_adapters)
        return self._prefill_graphs.run(key, partial(self._prefill, inputs))

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Float32 [N or B, 4]: id, number of values and values of each sampled token."""
        if isinstance(inputs, DecodeInputs) and self._decode_graphs is not None:
            graphs, places = self._decode_graphs, self._decoded
            key = ("sample", inputs.size.num_rows, inputs.needs)
        elif isinstance(inputs, PrefillInputs) and self._first_token_graphs is not None and inputs.is_in_place:
            graphs, places = self._first_token_graphs, self._prefilled
            key = (inputs.size.num_samples, inputs.needs)
        else:
            return self._sample(hidden, inputs.sample_rows, inputs.needs)
        # `hidden` is at these places.
        return graphs.run(key, partial(self._sample, places[: len(hidden)], inputs.sample_rows, inputs.needs))

    def prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        """[N, dim], before the final LayerNorm."""
        with self._paths.arithmetic:
            return self._prefill_hidden(inputs)

    def _prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        fields, state = inputs.device, self._memory.state
        embeddings = self._model.embed_sampled(
            fields.token_ids, fields.num_values, fields.token_values, inputs.value_kinds
        )
        images = self._memory.embeddings.flatten(0, 1)[fields.embedding_rows.clamp(min=0)]
        embeddings = torch.where((fields.embedding_rows >= 0)[:, None], images, embeddings)
        chunks = PackedChunks.of(inputs, state)
        adapters = None
        if self._adapters is not None and inputs.uses_adapters:
            adapters = self._adapters.for_rows(state.adapter_slots[inputs.token_rows()], self._add_low_rank)
        return self._paths.text.prefill(embeddings, chunks, fields.sample_tokens, self._memory.cache, adapters)

    def release(self, sequence: scheduling.Sequence) -> None:
        """Free the tiles and features of an incomplete image."""
        self._features.pop(sequence.id, None)
        self._tiles.release(sequence.id)

    def forget_images(self) -> None:
        """Free them for all sequences."""
        self._features.clear()
        self._tiles.clear()

    def capture(self) -> None:
        """Capture the steps of usual traffic. Others are captured by `capture_wanted`."""
        graphs = self._memory.graphs
        assert graphs is not None, "captured where steps run by graphs"
        started = time.monotonic()
        # Products of the invariant path are chosen when they first run, and not within a capture.
        runs_before = self._paths.is_invariant
        if self._encode_graphs is not None:
            encodings = self._encode_graphs
            with measured_products():
                encodings.captured.capture_all(encodings.usual(is_measured=True), each_runs_before=True)
            encodings.captured.capture_all(encodings.usual(is_measured=False), each_runs_before=runs_before)
        if self._prefill_graphs is not None and self._first_token_graphs is not None:
            self._prefill_graphs.capture_all(self._usual_prefills(), each_runs_before=runs_before)
            self._first_token_graphs.capture_all(self._usual_first_tokens(), each_runs_before=runs_before)
        if self._decode_graphs is not None:
            self._decode_graphs.capture_all(self._usual_decodes(), each_runs_before=runs_before)
        graphs.prefill.release_warm_up_memory()
        _log.info(
            "captured %d CUDA graphs, %.0f MiB, in %.1f s",
            graphs.budget.num_graphs,
            graphs.budget.num_bytes / MIB,
            time.monotonic() - started,
        )

    def capture_wanted(self) -> bool:
        """Capture one step that has run more than once without a graph; False where there is none."""
        return any(graphs.capture_wanted() for graphs in self._all_graphs())

    def reset(self) -> None:
        """Free all graphs."""
        for graphs in self._all_graphs():
            graphs.clear()

    def _all_graphs(self) -> Iterator[CapturedGraphs]:
        encodings = None if self._encode_graphs is None else self._encode_graphs.captured
        for graphs in (self._decode_graphs, self._prefill_graphs, self._first_token_graphs, encodings):
            if graphs is not None:
                yield graphs

    def _prefill(self, inputs: PrefillInputs) -> Tensor:
        return self._prefilled[: inputs.size.num_samples].copy_(self.prefill_hidden(inputs))

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        return self._decoded[: inputs.size.num_rows].copy_(self._decode_hidden(inputs))

    def _sample(self, hidden: Tensor, rows: Tensor, needs: SampleNeeds) -> Tensor:
        with self._paths.arithmetic:
            return self._sampler.sample(hidden, rows, needs)

    def _decode_hidden(self, inputs: DecodeInputs) -> Tensor:
        with self._paths.arithmetic:
            return self._decode_step(inputs)

    def _decode_step(self, inputs: DecodeInputs) -> Tensor:
        rows, positions, new_pages = inputs.device
        state, cache = self._memory.state, self._memory.cache
        state.add_pages(rows, positions, new_pages, cache.page_size)
        last = state.read(rows)
        # All kinds where there are any: one graph then serves every mixture.
        kinds = _ALL_KINDS if inputs.needs.value_kinds else 0
        embeddings = self._model.embed_sampled(last.token_ids, last.num_values, state.values(rows), kinds)
        page_table = state.page_table[rows, : inputs.size.max_pages]
        adapters = None
        if self._adapters is not None and inputs.uses_adapters:
            adapters = self._adapters.for_rows(state.adapter_slots[rows], self._add_low_rank)
        return self._paths.text.decode(embeddings, positions, page_table, cache, adapters)

    def _usual_decodes(self) -> Works:
        memory, needs = self._memory, {bool(needs.value_kinds): needs for needs in _USUAL_NEEDS}
        for num_rows in reversed(batch_sizes(memory.bounds.max_batch_size)):
            size = DecodeSize(num_rows, memory.state.max_pages)
            fields = memory.inputs.decode(
                size, partial(fill_blank_decode, padding_row=memory.state.padding_row), in_place=True
            )
            for has_values, of_some in needs.items():
                for uses_adapters in self._usual_adapters:
                    inputs = DecodeInputs(fields, size, of_some, num_rows, uses_adapters)
                    yield ("layers", size, has_values, uses_adapters), partial(self._decode, inputs)
            for own in _USUAL_NEEDS:
                yield ("sample", num_rows, own), partial(self._sample, self._decoded[:num_rows], fields.rows, own)

    def _usual_prefills(self) -> Works:
        # Few prompts have tokens with values, which are references to places in the image.
        text, bounds = self._model.config.text, self._memory.bounds
        sizes = PrefillSize.usual(
            text.prefix_attn,
            self._largest_prefill,
            max_tokens=bounds.max_prefill_tokens,
            max_prompts=bounds.max_batch_size,
            max_context=text.max_context,
            shares_prefixes=bounds.shares_prefixes,
            cuts_at_share_points=bounds.cuts_at_share_points,
        )
        for size in sizes:
            for uses_adapters in self._usual_adapters:
                inputs = self._blank_prefill(size, uses_adapters=uses_adapters)
                yield (size, inputs.value_kinds, uses_adapters), partial(self._prefill, inputs)

    def _usual_first_tokens(self) -> Works:
        for num_samples in reversed(self._sample_counts()):
            size = PrefillSize(num_samples, num_samples, 1, num_samples, self._memory.state.max_pages)
            rows = self._blank_prefill(size).device.sample_rows
            hidden = self._prefilled[:num_samples]
            for needs in _USUAL_NEEDS:
                yield (num_samples, needs), partial(self._sample, hidden, rows, needs)

    @property
    def _usual_adapters(self) -> tuple[bool, ...]:
        return (False,) if self._adapters is None else (False, True)

    @property
    def _largest_prefill(self) -> PrefillSize:
        bounds = self._memory.bounds
        return largest_prefill(
            bounds.max_prefill_tokens,
            bounds.max_batch_size,
            self._memory.state.max_pages,
            cuts_at_share_points=bounds.cuts_at_share_points,
        )

    def _sample_counts(self) -> list[int]:
        """The numbers of tokens that prefill graphs sample, in ascending order."""
        largest = self._largest_prefill
        return sorted(
            {
                PrefillSize.bucket(largest.num_tokens, count, longest, largest).num_samples
                for count in range(1, largest.num_chunks + 1)
                for longest in (1, largest.num_tokens)
            }
        )

    def _blank_prefill(self, size: PrefillSize, *, uses_adapters: bool = False) -> PrefillInputs:
        """Padding of a size, in the buffers that graphs read."""
        fill = partial(fill_blank_prefill, size=size, padding_row=self._memory.state.padding_row)
        fields = self._memory.inputs.prefill(size, fill, in_place=True)
        return PrefillInputs(
            fields, size, 0, SampleNeeds(False, 0), size.num_samples, is_in_place=True, uses_adapters=uses_adapters
        )


def _image_of(item: EncodeItem) -> Tiles | DecodedImage:
    image = item.sequence.tiles
    assert isinstance(image, (Tiles, DecodedImage)), "only sequences with an image have tiles to encode"
    return image


def new_step_runner(
    model: Moondream,
    cache: KVCache,
    paths: ExecutionConfig,
    bounds: StepBounds,
    model_paths: ModelPaths | None = None,
    *,
    graph_bytes: int = _DEFAULT_GRAPH_BYTES,
    image_cache_bytes: int = 0,
    adapters: AdapterSlabs | None = None,
) -> StepRunner:
    """`model_paths`: the paths of the model, if they are built already.

    Captured graphs and their pools may take `graph_bytes` of device memory, cached image embeddings
    `image_cache_bytes`.
    """
    if model_paths is None:
        model_paths = ModelPaths.of(model, paths, max_batch_size=bounds.max_batch_size)
    text = model.config.text
    return StepRunner(
        partial(MoondreamExecutor, model, model_paths, paths.kernels, adapters=adapters),
        cache,
        StateShape(
            vocab_size=text.vocab_size,
            max_context=text.max_context,
            values_per_token=VALUES_PER_TOKEN,
            positions_per_image=model.config.vision.num_image_tokens,
            embedding_dim=text.dim,
            embedding_dtype=model.dtype,
            value_kinds=partial(value_kinds, ids=model.config.tokenizer),
        ),
        bounds,
        max_graph_bytes=graph_bytes if paths.with_graphs else None,
        image_cache_bytes=image_cache_bytes,
    )
