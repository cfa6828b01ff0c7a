"""Runs the steps of a Moondream: crops to embeddings, packed prompts and decode steps to sampled tokens.

Uses the selected `Backends`, and replays captured graphs where they exist.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_ops import KeptFacts, Kernels, measured_products
from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.buckets import (
    DecodeSize,
    PrefillSize,
    batch_sizes,
    coarse_batch_sizes,
    largest_prefill,
)
from kestrel_runtime.execution.executor import DeviceMemory
from kestrel_runtime.execution.graph_policy import CapturedGraphs, Work, Works
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import RowNeeds, SampleNeeds
from kestrel_runtime.execution.step_inputs import (
    DecodeFields,
    DecodeInputs,
    PackedChunks,
    PrefillInputs,
    fill_blank_decode,
    fill_blank_prefill,
)
from kestrel_runtime.execution.step_runner import StateShape, StepRunner
from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.imaging.crops import Crops, DecodedImage
from kestrel_runtime.imaging.device_crops import CropSource, PrefetchedImage
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.layers import concatenated
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.sampling import (
    COORDINATES_BIT,
    SIZES_BIT,
    VALUES_PER_TOKEN,
    MoondreamSampler,
    value_kinds,
)
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper
from kestrel_runtime.models.moondream.vision.graphs import FASTEST_PRODUCTS, EncodeGraphs
from kestrel_runtime.scheduling.batch import EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import SequenceImage, TokenSequence

_ALL_KINDS = COORDINATES_BIT | SIZES_BIT
_USUAL_NEEDS = tuple(
    SampleNeeds(is_random, kinds, is_restricted=is_restricted)
    for kinds, is_restricted in ((0, False), (0, True), (COORDINATES_BIT, False), (_ALL_KINDS, False))
    for is_random in (True, False)
)
"""The usual needs: text, constrained text, points, and points and boxes in the batch."""
_COARSE_NEEDS = tuple(
    SampleNeeds(is_random, kinds, is_restricted=is_restricted)
    for is_random, kinds, is_restricted in (
        (False, 0, False),
        (True, 0, False),
        (True, 0, True),
        (True, _ALL_KINDS, False),
    )
)
"""The members of `_USUAL_NEEDS` with which a server begins. One of them also computes what the others need."""
_DEFAULT_GRAPH_BYTES = 4096 * MIB

_log = logging.getLogger(__name__)


class _LayersKey(NamedTuple):
    """Names what a graph of a decode step's layers depends on."""

    size: DecodeSize
    has_values: bool
    uses_adapters: bool


class _PromptKey(NamedTuple):
    """Names what a graph of a prefill step depends on."""

    size: PrefillSize
    value_kinds: int
    uses_adapters: bool


class _CompleteImage(NamedTuple):
    """An image whose crops are all encoded."""

    entry: int
    """Its entry of the embeddings."""
    parts: list[Tensor]
    """The features of its crops in their order, each part [some, patches, enc_dim]."""
    grid: tuple[int, int]
    """The rows and columns of its crops."""

    @property
    def num_crops(self) -> int:
        return 1 + self.grid[0] * self.grid[1]


class _SampleKey(NamedTuple):
    """Names what a graph that samples depends on."""

    num_rows: int
    needs: SampleNeeds


class MoondreamExecutor:
    """The family's `Executor`."""

    def __init__(
        self,
        model: Moondream,
        backends: Backends,
        kernels: Kernels,
        memory: DeviceMemory,
        adapters: AdapterSlabs | None = None,
        facts: KeptFacts | None = None,
    ) -> None:
        """Builds the executor; `facts` spare it measurements of products that an earlier start has made."""
        self._adapters = adapters
        self._facts = facts
        self._add_low_rank = kernels.add_low_rank
        self._model = model
        self._backends = backends
        self._memory = memory
        self._sampler = MoondreamSampler(model, memory.state, memory.rules, kernels)
        cropper = Cropper(MoondreamCropping(model.config.vision), model.device, kernels.resample)
        self._crops = CropSource(cropper.make_crops, cropper.upload)
        # Of the crops encoded so far, by sequence id and by crop: [1, patches, enc_dim].
        self._features: dict[int, dict[int, Tensor]] = {}
        self._encode_crops: Callable[[Tensor], Tensor] = backends.vision.encode
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
            if backends.captures_prefill:
                self._prefill_graphs = CapturedGraphs("prefill steps", graphs.prefill, budget)
                self._first_token_graphs = CapturedGraphs("first tokens", graphs.prefill, budget)
                # [most samples, dim]: written by prefill graphs, read by graphs that sample first tokens.
                self._prefilled = torch.zeros(
                    self._sample_counts()[-1], model.config.text.dim, dtype=model.dtype, device=model.device
                )
            if backends.captures_encode:
                vision = model.config.vision
                self._encode_crops = self._encode_graphs = EncodeGraphs(
                    backends.vision.encode,
                    (vision.crop_size, vision.crop_size, vision.in_channels),
                    model.device,
                    graphs.prefill,
                    budget,
                    max_crops=memory.bounds.max_crops,
                    max_crops_of_image=1 + vision.max_crops,
                )

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encodes crops. An image whose last crop is among them is projected into its entry."""
        pixels: list[Tensor] = []
        for item in items:
            crops_id, image = _crops_id(item.sequence, item.image), _image_of(item)
            pixels += self._crops.take(crops_id, image, item.crops, is_last=item.is_last)
        features = self._memory.crops[:0]
        if pixels:
            features = self._encode_crops(concatenated(pixels))
            self._keep(items, features)
        for item in items:
            if isinstance(item.pixels, PrefetchedImage):
                item.pixels.prefetched.hash()  # behind the encoder's launch, for which the device waits
        complete: list[_CompleteImage] = []
        own_features = features.split([len(item.crops) for item in items])
        for item, encoded in zip(items, own_features, strict=True):
            image = _image_of(item)
            grid = image.rows, image.columns
            if len(item.crops) == image.num_crops:  # in their order, so that they need no copy
                complete.append(_CompleteImage(item.entry, [encoded], grid))
                self._features.pop(item.sequence.id, None)
                continue
            if item.is_first:
                self._features[item.sequence.id] = {}
            known = self._features[item.sequence.id]
            known.update(zip(item.crops, encoded.split(1), strict=True) if item.crops else ())
            if item.is_last:
                known.update((crop, self._memory.crops[place : place + 1]) for crop, place in item.found)
                parts = [known[crop] for crop in range(image.num_crops)]
                complete.append(_CompleteImage(item.entry, parts, grid))
                del self._features[item.sequence.id]
        for some in self._projected_together(complete):
            images, grids = [concatenated(image.parts) for image in some], [image.grid for image in some]
            for image, embeddings in zip(some, self._backends.vision.project_all(images, grids), strict=True):
                self._memory.embeddings[image.entry] = embeddings

    def _keep(self, items: Sequence[EncodeItem], features: Tensor) -> None:
        """Copies the features of crops that a step has encoded to their places in the pool."""
        places = [place for item in items for place in item.places or [None] * len(item.crops)]
        kept = [(row, place) for row, place in enumerate(places) if place is not None]
        if not kept:
            return
        rows, targets = to_device(list(zip(*kept, strict=True)), torch.int64, features.device)
        source = features if len(kept) == len(features) else features[rows]
        self._memory.crops.index_copy_(0, targets, source)

    def _projected_together(self, images: Sequence[_CompleteImage]) -> Iterator[list[_CompleteImage]]:
        """Yields the images in parts with as many crops as a step may encode: those that were found are not
        counted there, and a projection copies the features of all crops."""
        most, some, num_crops = self._memory.bounds.max_crops, list[_CompleteImage](), 0
        for image in images:
            if some and num_crops + image.num_crops > most:
                yield some
                some, num_crops = [], 0
            some.append(image)
            num_crops += image.num_crops
        if some:
            yield some

    def padded_decode(self, size: DecodeSize, needs: RowNeeds) -> DecodeSize:
        """Returns the size itself where its layers and what it samples have graphs, or else the next one that has
        both, or the first one that has layers; the size itself where none has.
        """
        graphs, sampling = self._decode_graphs, needs.sampling
        if graphs is None:
            return size
        layers = _LayersKey(size, sampling.value_kinds != 0, needs.uses_adapters)
        if layers in graphs and _captured_needs(graphs, size.num_rows, sampling) is not None:
            return size
        larger = (count for count in batch_sizes(self._memory.bounds.max_batch_size) if count > size.num_rows)
        sizes = (size, *(size._replace(num_rows=count) for count in larger))
        held_by = [each for each in sizes if layers._replace(size=each) in graphs]
        by_both = (each for each in held_by if _captured_needs(graphs, each.num_rows, sampling) is not None)
        chosen = next(by_both, held_by[0] if held_by else size)
        if chosen != size and layers not in graphs:
            graphs.note_missing(layers, partial(self._new_decode, layers))
        return chosen

    def padded_prefill(self, size: PrefillSize, value_kinds: int, *, uses_adapters: bool) -> PrefillSize:
        """Returns the same for a prefill step."""
        graphs, key = self._prefill_graphs, _PromptKey(size, value_kinds, uses_adapters)
        if graphs is None or key in graphs:
            return size
        others = [other for other in graphs if isinstance(other, _PromptKey) and other[1:] == key[1:]]
        held_by = min((other.size for other in others if other.size.holds(size)), default=None)
        if held_by is None:
            return size
        graphs.note_missing(key, partial(self._new_prefill, key))
        return held_by

    def forward(self, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Returns hidden states [N or B, dim], before the final LayerNorm.

        The layers need a graph for each size, sampling one for each number of rows and kind of needs. One graph for
        both would need far more captures, one for each combination.
        """
        if isinstance(inputs, DecodeInputs):
            if self._decode_graphs is None:
                return self._decode_hidden(inputs)
            layers = _LayersKey(inputs.size, inputs.needs.value_kinds != 0, inputs.uses_adapters)
            return self._decode_graphs.run(layers, partial(self._decode, inputs))
        if self._prefill_graphs is None or not inputs.is_in_place:
            return self.prefill_hidden(inputs)
        key = _PromptKey(inputs.size, inputs.value_kinds, inputs.uses_adapters)
        return self._prefill_graphs.run(key, partial(self._prefill, inputs))

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Samples a token for each row; returns float32 [N or B, width], laid out as `TokenSampler` writes it."""
        if isinstance(inputs, DecodeInputs) and self._decode_graphs is not None:
            graphs, places, num_rows = self._decode_graphs, self._decoded, inputs.size.num_rows
        elif isinstance(inputs, PrefillInputs) and self._first_token_graphs is not None and inputs.is_in_place:
            graphs, places, num_rows = self._first_token_graphs, self._prefilled, inputs.size.num_samples
        else:
            return self._sample(hidden, inputs.sample_rows, inputs.needs)
        needs = _captured_needs(graphs, num_rows, inputs.needs) or inputs.needs
        count, rows = hidden.shape[0], inputs.sample_rows
        # `hidden` is at these places. Views of tensors take long, and a replay needs none.
        return graphs.run(_SampleKey(num_rows, needs), lambda: self._sample(places[:count], rows, needs))

    def prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        """Returns hidden states [N, dim], before the final LayerNorm."""
        with self._backends.arithmetic:
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
        return self._backends.text.prefill(embeddings, chunks, fields.sample_tokens, self._memory.cache, adapters)

    def release(self, sequence: TokenSequence) -> None:
        """Frees the crops and features of incomplete images."""
        self._features.pop(sequence.id, None)
        for image in sequence.images:
            self._crops.release(_crops_id(sequence, image))

    def forget_images(self) -> None:
        """Frees them for all sequences."""
        self._features.clear()
        self._crops.clear()

    def capture(self) -> None:
        """Captures steps that hold those of usual traffic by padding, and leaves the latter to `capture_wanted`.

        With invariant backends all are captured now: products are chosen when they first run, and for steps left to
        later that could be after a capture.
        """
        graphs = self._memory.graphs
        assert graphs is not None, "captured where steps run by graphs"
        started = time.monotonic()
        runs_before = self._backends.is_invariant
        kinds: list[tuple[CapturedGraphs | None, Callable[[bool], Works]]] = [
            (self._prefill_graphs, self._usual_prefills),
            (self._first_token_graphs, self._usual_first_tokens),
            (self._decode_graphs, self._usual_decodes),
        ]
        if self._encode_graphs is not None:
            encodings = self._encode_graphs
            self._capture_measured(encodings, runs_before=runs_before)
            kinds.insert(
                0,
                (
                    encodings.captured,
                    lambda is_coarse: iter(()) if is_coarse else encodings.usual(is_measured=False),
                ),
            )
        for captured, works in kinds:
            if captured is not None:
                captured.capture_all(works(not runs_before), each_runs_before=runs_before)
                if not runs_before:
                    captured.leave(works(False))
        graphs.prefill.release_warm_up_memory()
        _log.info(
            "captured %d CUDA graphs, %.0f MiB, in %.1f s",
            graphs.budget.num_graphs,
            graphs.budget.num_bytes / MIB,
            time.monotonic() - started,
        )

    def _capture_measured(self, encodings: EncodeGraphs, *, runs_before: bool) -> None:
        kept = None if self._facts is None else self._facts.get(FASTEST_PRODUCTS)
        choices: dict[str, int] = dict(kept or {})
        with measured_products(choices):
            works = encodings.usual(is_measured=True)
            encodings.captured.capture_all(works, each_runs_before=runs_before or not kept)
        if self._facts is not None and choices != kept:
            self._facts.put(FASTEST_PRODUCTS, choices)

    def capture_wanted(self) -> bool:
        """Captures one step that has come more than once without a graph, or was left by `capture`."""
        return any(graphs.capture_wanted() for graphs in self._all_graphs())

    def reset(self) -> None:
        """Frees all graphs."""
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
        with self._backends.arithmetic:
            return self._sampler.sample(hidden, rows, needs)

    def _decode_hidden(self, inputs: DecodeInputs) -> Tensor:
        with self._backends.arithmetic:
            return self._decode_step(inputs)

    def _decode_step(self, inputs: DecodeInputs) -> Tensor:
        rows, positions, pages = inputs.device
        state, cache = self._memory.state, self._memory.cache
        state.add_pages(rows, positions, pages, cache.page_size)
        last = state.read(rows)
        # All kinds where there are any: one graph then serves every mixture.
        kinds = _ALL_KINDS if inputs.needs.value_kinds else 0
        values = state.values(rows) if kinds else None
        embeddings = self._model.embed_sampled(last.token_ids, last.num_values, values, kinds)
        page_table = state.page_table[rows, : inputs.size.max_pages]
        adapters = None
        if self._adapters is not None and inputs.uses_adapters:
            adapters = self._adapters.for_rows(state.adapter_slots[rows], self._add_low_rank)
        return self._backends.text.decode(embeddings, positions, page_table, cache, adapters)

    def _new_decode(self, key: _LayersKey) -> Work:
        """Returns the layers of a decode step of padding."""
        needs = SampleNeeds(False, _ALL_KINDS if key.has_values else 0)
        fields = self._blank_decode(key.size)
        return partial(self._decode, DecodeInputs(fields, key.size, needs, key.size.num_rows, key.uses_adapters))

    def _new_prefill(self, key: _PromptKey) -> Work:
        """Returns a prefill step of padding."""
        inputs = self._blank_prefill(key.size, value_kinds=key.value_kinds, uses_adapters=key.uses_adapters)
        return partial(self._prefill, inputs)

    def _usual_decodes(self, is_coarse: bool) -> Works:
        most, max_pages = self._memory.bounds.max_batch_size, self._memory.state.max_pages
        coarse = coarse_batch_sizes(most)
        for num_rows in reversed(coarse if is_coarse else batch_sizes(most)):
            size = DecodeSize(num_rows, max_pages)
            # Few batches have tokens with values, which are references to places in an image.
            for has_values in (True, False) if not is_coarse or num_rows == most else (False,):
                for uses_adapters in self._usual_adapters:
                    key = _LayersKey(size, has_values, uses_adapters)
                    yield key, self._new_decode(key)
            rows = self._blank_decode(size).rows
            for needs in _COARSE_NEEDS if is_coarse else _USUAL_NEEDS:
                yield _SampleKey(num_rows, needs), partial(self._sample, self._decoded[:num_rows], rows, needs)

    def _usual_prefills(self, is_coarse: bool) -> Works:
        # Few prompts have tokens with values.
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
        if is_coarse:
            sizes = PrefillSize.coarse(
                sizes, text.prefix_attn, self._largest_prefill, chunks_of_image=1 + bounds.cuts_at_share_points
            )
        for size in sizes:
            for uses_adapters in self._usual_adapters:
                key = _PromptKey(size, 0, uses_adapters)
                yield key, self._new_prefill(key)

    def _usual_first_tokens(self, is_coarse: bool) -> Works:
        for num_samples in reversed(self._sample_counts()):
            size = PrefillSize(num_samples, num_samples, 1, num_samples, self._memory.state.max_pages)
            rows = self._blank_prefill(size).device.sample_rows
            hidden = self._prefilled[:num_samples]
            for needs in _COARSE_NEEDS if is_coarse else _USUAL_NEEDS:
                yield _SampleKey(num_samples, needs), partial(self._sample, hidden, rows, needs)

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
        """Returns the numbers of tokens that prefill graphs sample, in ascending order."""
        largest = self._largest_prefill
        return sorted(
            {
                PrefillSize.bucket(largest.num_tokens, count, longest, largest).num_samples
                for count in range(1, largest.num_chunks + 1)
                for longest in (1, largest.num_tokens)
            }
        )

    def _blank_prefill(
        self, size: PrefillSize, *, value_kinds: int = 0, uses_adapters: bool = False
    ) -> PrefillInputs:
        """Returns padding of a size, in the buffers that graphs read."""
        fill = partial(fill_blank_prefill, size=size, padding_row=self._memory.state.padding_row)
        fields = self._memory.inputs.prefill(size, fill, in_place=True)
        needs = SampleNeeds(False, 0)
        return PrefillInputs(
            fields, size, value_kinds, needs, size.num_samples, is_in_place=True, uses_adapters=uses_adapters
        )

    def _blank_decode(self, size: DecodeSize) -> DecodeFields[Tensor]:
        """Returns the same for a decode step."""
        fill = partial(fill_blank_decode, padding_row=self._memory.state.padding_row)
        return self._memory.inputs.decode(size, fill, in_place=True)


def _captured_needs(graphs: CapturedGraphs, num_rows: int, needs: SampleNeeds) -> SampleNeeds | None:
    """Returns the needs of a graph that samples for `needs` in so many rows; None where none was captured."""
    if _SampleKey(num_rows, needs) in graphs:
        return needs
    usual = (own for own in _USUAL_NEEDS if own.include(needs) and _SampleKey(num_rows, own) in graphs)
    return next(usual, None)


def _crops_id(sequence: TokenSequence, image: SequenceImage) -> tuple[int, int]:
    return sequence.id, image.start


def _image_of(item: EncodeItem) -> Crops | DecodedImage:
    pixels = item.pixels
    assert isinstance(pixels, (Crops, DecodedImage)), "made by this family's cropping"
    return pixels


def new_step_runner(
    model: Moondream,
    cache: KVCache,
    execution: ExecutionConfig,
    bounds: StepBounds,
    backends: Backends | None = None,
    *,
    graph_bytes: int = _DEFAULT_GRAPH_BYTES,
    image_cache_bytes: int = 0,
    crop_cache_bytes: int = 0,
    adapters: AdapterSlabs | None = None,
    facts: KeptFacts | None = None,
) -> StepRunner:
    """Returns a step runner on `backends`, which are built if they are None.

    Captured graphs and their pools may take `graph_bytes` of device memory, cached image embeddings
    `image_cache_bytes`, encoded crops `crop_cache_bytes`.
    """
    if backends is None:
        backends = Backends.of(model, execution, max_batch_size=bounds.max_batch_size)
    text = model.config.text
    return StepRunner(
        partial(MoondreamExecutor, model, backends, execution.kernels, adapters=adapters, facts=facts),
        cache,
        StateShape(
            vocab_size=text.vocab_size,
            max_context=text.max_context,
            values_per_token=VALUES_PER_TOKEN,
            positions_per_image=model.config.vision.num_image_tokens,
            embedding_dim=text.dim,
            embedding_dtype=model.dtype,
            encoded_crop=(model.config.vision.num_image_tokens, model.config.vision.enc_dim),
            value_kinds=partial(value_kinds, ids=model.config.tokenizer),
        ),
        bounds,
        max_graph_bytes=graph_bytes if execution.with_graphs else None,
        image_cache_bytes=image_cache_bytes,
        crop_cache_bytes=crop_cache_bytes,
    )
