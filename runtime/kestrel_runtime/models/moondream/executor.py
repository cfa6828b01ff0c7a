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

from kestrel_ops import Kernels
from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize, batch_sizes
from kestrel_runtime.execution.captured_graphs import CapturedGraphs, Works
from kestrel_runtime.execution.executor import DeviceMemory
from kestrel_runtime.execution.logits.sample_needs import SampleNeeds
from kestrel_runtime.execution.step_inputs import (
    DecodeInputs,
    PackedChunks,
    PrefillInputs,
    fill_blank_decode,
    fill_blank_prefill,
)
from kestrel_runtime.imaging.tile_source import TileSource
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.sampling import COORDINATES_BIT, SIZES_BIT, MoondreamSampler
from kestrel_runtime.models.moondream.tiling import MoondreamTiling, Tiler
from kestrel_runtime.models.moondream.vision_graphs import EncodeGraphs
from kestrel_runtime.scheduling import sequence as scheduling
from kestrel_runtime.scheduling.batch import EncodeItem

_TEXT_NEEDS = (SampleNeeds(True, 0), SampleNeeds(False, 0))
_SPATIAL_NEEDS = tuple(  # points, or points and boxes, in the batch
    SampleNeeds(is_random, kinds)
    for kinds in (COORDINATES_BIT, COORDINATES_BIT | SIZES_BIT)
    for is_random in (True, False)
)
_MAX_START_S = 20.0
"""Limit of the captures before the port opens. Other steps are captured when they occur for the second time."""

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
            # [largest batch, dim]: of steps that are sampled under masks, which come after the forward pass.
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
        features = self._encode_tiles(torch.cat(pixels)).split([len(part) for part in pixels])
        complete: list[tuple[int, Tensor, tuple[int, int]]] = []
        for item, encoded in zip(items, features, strict=True):
            if not item.first_tile:
                self._features[item.sequence.id] = []
            known = self._features[item.sequence.id]
            known.append(encoded)
            if item.is_last:
                image = _image_of(item)
                complete.append((item.entry, torch.cat(known), (image.rows, image.columns)))
                del self._features[item.sequence.id]
        if complete:
            entries, images, tilings = zip(*complete, strict=True)
            projected = self._paths.vision.project_all(images, tilings)
            for entry, embeddings in zip(entries, projected, strict=True):
                self._memory.embeddings[entry] = embeddings

    def forward(self, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """[N or B, dim], before the final LayerNorm.

        The layers of a prefill need a graph for each size, sampling one for each number of rows and kind of needs.
        One graph for both would need far more captures, one for each combination.
        """
        if isinstance(inputs, DecodeInputs):
            if self._decode_graphs is None:
                return self._decode_hidden(inputs)
            key = ("forward", inputs.size, inputs.needs.value_kinds, inputs.uses_adapters)
            return self._decode_graphs.run(key, partial(self._decode_forward, inputs))
        if self._prefill_graphs is None or not inputs.is_in_place:
            return self.prefill_hidden(inputs)
        key = (inputs.size, inputs.value_kinds, inputs.uses_adapters)
        return self._prefill_graphs.run(key, partial(self._prefill, inputs))

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Float32 [N or B, 4]: id, number of values and values of each sampled token."""
        work = partial(self._sample, hidden, inputs.sample_rows, inputs.needs)
        if isinstance(inputs, DecodeInputs):
            if self._decode_graphs is None:
                return work()
            return self._decode_graphs.run(("sample", inputs.size.num_rows, inputs.needs), work)
        if self._first_token_graphs is None or not inputs.is_in_place:
            return work()
        return self._first_token_graphs.run((inputs.size.num_samples, inputs.needs), work)

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

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Float32 [B, 4]: id, number of values and values of each sampled token."""
        work = partial(self._decode, inputs)
        if self._decode_graphs is None:
            return work()
        return self._decode_graphs.run((inputs.size, inputs.needs, inputs.uses_adapters), work)

    def release(self, sequence: scheduling.Sequence) -> None:
        """Free the tiles and features of an incomplete image."""
        self._features.pop(sequence.id, None)
        self._tiles.release(sequence.id)

    def forget_images(self) -> None:
        """Free them for all sequences."""
        self._features.clear()
        self._tiles.clear()

    def capture(self) -> None:
        """Capture the steps of usual traffic. Other steps are captured when they occur again."""
        graphs = self._memory.graphs
        assert graphs is not None, "captured where steps run by graphs"
        started = time.monotonic()
        until = started + _MAX_START_S
        num_left = sum(captured.capture_all(works, until=until) for captured, works in self._usual_graphs())
        graphs.prefill.release_warm_up_memory()
        _log.info(
            "captured %d CUDA graphs, %.0f MiB, in %.1f s; %d are left for when they are needed",
            graphs.budget.num_graphs,
            graphs.budget.num_bytes / MIB,
            time.monotonic() - started,
            num_left,
        )

    def reset(self) -> None:
        """Free all graphs."""
        for graphs in (
            self._prefill_graphs,
            self._first_token_graphs,
            self._decode_graphs,
            self._encode_graphs and self._encode_graphs.captured,
        ):
            if graphs is not None:
                graphs.clear()

    def _prefill(self, inputs: PrefillInputs) -> Tensor:
        return self._prefilled[: inputs.size.num_samples].copy_(self.prefill_hidden(inputs))

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        return self._sample(self._decode_hidden(inputs), inputs.device.rows, inputs.needs)

    def _decode_forward(self, inputs: DecodeInputs) -> Tensor:
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
        embeddings = self._model.embed_sampled(
            last.token_ids, last.num_values, state.values(rows), inputs.needs.value_kinds
        )
        page_table = state.page_table[rows, : inputs.size.max_pages]
        adapters = None
        if self._adapters is not None and inputs.uses_adapters:
            adapters = self._adapters.for_rows(state.adapter_slots[rows], self._add_low_rank)
        return self._paths.text.decode(embeddings, positions, page_table, cache, adapters)

    def _usual_graphs(self) -> Iterator[tuple[CapturedGraphs, Works]]:
        """The graphs of each kind and the works to capture. The most common come first, since time is limited."""
        if self._decode_graphs is not None:
            yield self._decode_graphs, self._usual_decodes(_TEXT_NEEDS)
        if self._encode_graphs is not None:
            yield self._encode_graphs.captured, self._encode_graphs.usual()
        if self._prefill_graphs is not None and self._first_token_graphs is not None:
            yield self._prefill_graphs, self._usual_prefills()
            yield self._first_token_graphs, self._usual_first_tokens()
        if self._decode_graphs is not None:
            yield self._decode_graphs, self._usual_decodes(_SPATIAL_NEEDS)

    def _usual_decodes(self, kinds: Sequence[SampleNeeds]) -> Works:
        memory = self._memory
        for num_rows in reversed(batch_sizes(memory.bounds.max_batch_size)):
            size = DecodeSize(num_rows, memory.state.max_pages)
            fields = memory.inputs.decode(
                size, partial(fill_blank_decode, padding_row=memory.state.padding_row), in_place=True
            )
            for needs in kinds:
                inputs = DecodeInputs(fields, size, needs, num_rows, uses_adapters=False)
                yield (size, needs, False), partial(self._decode, inputs)

    def _usual_prefills(self) -> Works:
        # Few prompts have tokens with values, which are references to places in the image.
        text, bounds = self._model.config.text, self._memory.bounds
        sizes = PrefillSize.usual(
            text.prefix_attn,
            self._memory.state.max_pages,
            max_tokens=bounds.max_prefill_tokens,
            max_prompts=bounds.max_batch_size,
            max_context=text.max_context,
            shares_prefixes=bounds.shares_prefixes,
            cuts_at_share_points=bounds.cuts_at_share_points,
        )
        for inputs in map(self._blank_prefill, sizes):
            yield (inputs.size, inputs.value_kinds, inputs.uses_adapters), partial(self._prefill, inputs)

    def _usual_first_tokens(self) -> Works:
        for num_samples in reversed(self._sample_counts()):
            size = PrefillSize.bucket(num_samples, num_samples, 1, num_samples, self._memory.state.max_pages)
            rows = self._blank_prefill(size).device.sample_rows
            hidden = self._prefilled[:num_samples]
            for needs in (*_TEXT_NEEDS, *_SPATIAL_NEEDS):
                yield (num_samples, needs), partial(self._sample, hidden, rows, needs)

    def _sample_counts(self) -> list[int]:
        """The numbers of tokens that prefill graphs sample, in ascending order."""
        counts = range(1, self._memory.bounds.max_batch_size + 1)
        return sorted({PrefillSize.bucket(count, count, 1, count, 1).num_samples for count in counts})

    def _blank_prefill(self, size: PrefillSize) -> PrefillInputs:
        """Padding of a size, in the buffers that graphs read."""
        fill = partial(fill_blank_prefill, size=size, padding_row=self._memory.state.padding_row)
        fields = self._memory.inputs.prefill(size, fill, in_place=True)
        return PrefillInputs(
            fields, size, 0, SampleNeeds(False, 0), size.num_samples, is_in_place=True, uses_adapters=False
        )


def _image_of(item: EncodeItem) -> Tiles | DecodedImage:
    image = item.sequence.tiles
    assert isinstance(image, (Tiles, DecodedImage)), "only sequences with an image have tiles to encode"
    return image
