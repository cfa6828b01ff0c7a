"""Runs steps on the model: crops to features, prompts into the cache, a new token for whoever is due.

Knows tensors and the model; decides nothing about who runs. Only `StepHandle.wait` waits for the device.

Images and prompts have a lane of the device, decoding another, more urgent one. They share weights, pages of the
cache and slots, and nothing else: neither memory of steps nor recordings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget, Works
from kestrel_runtime.execution.cuda_stream import Lane
from kestrel_runtime.execution.execution_config import FastPaths
from kestrel_runtime.execution.graph_capture import Recorder
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.prefill_graphs import PromptGraphs, PromptInputs
from kestrel_runtime.execution.request_state import Slots
from kestrel_runtime.execution.sampling import SETTINGS_PER_SEQUENCE, DrawNeeds, Sampler
from kestrel_runtime.execution.sampling_graphs import DrawGraphs
from kestrel_runtime.execution.step_inputs import PrefillPlan
from kestrel_runtime.execution.token_rules import RuleTable
from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.imaging.tile_source import TileSource
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles
from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.models.moondream.tiling import MoondreamTiling, Tiler
from kestrel_runtime.models.moondream.vision_graphs import EncodeGraphs
from kestrel_runtime.scheduling.batch import Batch, Chunk, EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import Sequence

# Columns of a decode step's inputs: small numbers, then floats by their bits, then pages.
_SLOT, _POSITION, _SETTINGS = 0, 1, slice(2, 2 + SETTINGS_PER_SEQUENCE)
_NUM_COLUMNS = _SETTINGS.stop
_TEXT_NEEDS = (DrawNeeds(False, False, True), DrawNeeds(False, False, False))  # drawn or greedy
_SPATIAL_NEEDS = tuple(  # the same with points, or with points and boxes, in the batch
    DrawNeeds(True, sizes, is_random) for sizes in (False, True) for is_random in (True, False)
)
_MOST_START_S = 20.0
"""For captures before the port opens; what is left then is captured when it has come twice."""
_NUM_SPARE_SLOTS = 1
"""For a request of our own beside those of callers."""

_DEFAULT_GRAPH_BYTES = 4096 * MIB

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Image:
    """What is known of a sequence's image: features of its crops, and once all are there its embeddings."""

    features: list[Tensor] = field(default_factory=list)
    embeddings: Tensor | None = None


class StepHandle:
    """A step in flight: what it samples is on the device until `wait`."""

    def __init__(self, sampled: Tensor | None, lane: Lane) -> None:
        """sampled: float32 [sequences, 4], as the sampler returns it in the lane; None where nobody is sampled."""
        self._sampled = sampled
        if sampled is not None and sampled.is_cuda:
            self._sampled = torch.empty(sampled.shape, pin_memory=True).copy_(sampled, non_blocking=True)
        self.done = lane.mark()

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""
        return self.done is None or self.done.query()

    def wait(self) -> list[Token]:
        """Wait for the step; its tokens, in the order of `Batch.sampled`. Raises what the device raises."""
        if self.done is not None:
            self.done.synchronize()
        if self._sampled is None:
            return []
        return [Token(int(id), tuple(values[: int(kind)])) for id, kind, *values in self._sampled.tolist()]


class ModelRunner:
    """Model and cache behind one method. Holds a sequence's slot and image embeddings until `release`."""

    def __init__(
        self,
        model: Moondream,
        cache: KVCache,
        paths: FastPaths,
        bounds: StepBounds,
        model_paths: ModelPaths | None = None,
        *,
        graph_bytes: int = _DEFAULT_GRAPH_BYTES,
    ) -> None:
        """`model_paths`, built by `paths` for the model, where they were built before the cache.

        `graph_bytes` of the device's memory are for captured graphs and the pools that they compute in.
        """
        self._model = model
        self._cache = cache
        self._bounds = bounds
        self._prompting = Lane(model.device)
        self._decoding = Lane(model.device, is_urgent=True)
        self._with_graphs = paths.with_graphs
        self._is_fused = paths.text != "plain"
        self._images: dict[int, _Image] = {}
        tiler = Tiler(MoondreamTiling(model.config.vision), model.device, paths.kernels.resample)
        self._tiles = TileSource(tiler.make_tiles, tiler.upload)
        if model_paths is None:
            model_paths = ModelPaths.of(model, paths, max_batch_size=bounds.max_batch_size)
        self._text, self._vision = model_paths.text, model_paths.vision
        self._encode_crops: Callable[[Tensor], Tensor] = self._vision.encode
        self._encode_graphs: EncodeGraphs | None = None
        if self._with_graphs:
            self._graph_budget = GraphBudget(max_bytes=graph_bytes)
            self._prompt_recorder = Recorder(self._prompting)
            self._decode_recorder = Recorder(self._decoding)
            if paths.vision != "plain":
                vision = model.config.vision
                self._encode_crops = self._encode_graphs = EncodeGraphs(
                    self._vision.encode,
                    (vision.crop_size, vision.crop_size, vision.in_channels),
                    model.device,
                    self._prompt_recorder,
                    self._graph_budget,
                    max_crops=bounds.max_crops,
                    max_crops_of_image=1 + vision.max_crops,
                )
        self._set_up()

    @property
    def is_asynchronous(self) -> bool:
        """Whether a launched step runs while the caller goes on."""
        return self._model.device.type == "cuda"

    @torch.inference_mode()
    def record(self) -> None:
        """Capture the graphs that usual traffic needs, where any are; the rest is captured when it comes again.

        For the start alone: it waits for the device.
        """
        if not self._with_graphs:
            return
        started = time.monotonic()
        until = started + _MOST_START_S
        num_left = sum(graphs.capture_all(works, until=until) for graphs, works in self._usual_graphs())
        self._prompt_recorder.release_rehearsal_memory()
        _log.info(
            "captured %d CUDA graphs, %.0f MiB, in %.1f s; %d are left for when they are needed",
            self._graph_budget.num_graphs,
            self._graph_budget.num_bytes / MIB,
            time.monotonic() - started,
            num_left,
        )

    def _usual_graphs(self) -> Iterator[tuple[CapturedGraphs, Works]]:
        """The graphs of each kind and their usual works; what most requests need first, should time run out."""
        draws = [graphs for graphs in (self._decode_graphs, self._draw_graphs) if graphs is not None]
        for graphs in draws:
            yield graphs.captured, graphs.usual(_TEXT_NEEDS)
        if self._encode_graphs is not None:
            yield self._encode_graphs.captured, self._encode_graphs.usual()
        if self._prompt_graphs is not None:
            text = self._model.config.text
            yield self._prompt_graphs.captured, self._prompt_graphs.usual(text.prefix_attn, text.max_context)
        for graphs in draws:
            yield graphs.captured, graphs.usual(_SPATIAL_NEEDS)

    def run(self, batch: Batch) -> list[Token]:
        """Run a step to its end; returns its tokens, in the order of `Batch.sampled`."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch, after: Iterable[StepHandle] = ()) -> StepHandle:
        """Begin a step. It comes after all of its kind that were begun before, and after the steps `after`."""
        lane = self._decoding if batch.kind == "decode" else self._prompting
        with lane.entered():
            for handle in after:
                lane.wait_for(handle.done)
            sampled = self._decode(list(batch.decode)) if batch.kind == "decode" else self._take_in(batch)
            return StepHandle(sampled, lane)

    @torch.inference_mode()
    def last_hidden(self, batch: Batch) -> Tensor:
        """Run a step of crops and prompts and draw nothing: [prompts that end, dim], before the final LayerNorm."""
        with self._prompting.entered():
            hidden = self._fill(batch)
        self._prompting.synchronize()  # for whoever reads it elsewhere
        return hidden

    def image_embeddings(self, sequence: Sequence) -> Tensor:
        """The embeddings [image tokens, dim] of a sequence whose crops are all encoded."""
        embeddings = self._images[sequence.id].embeddings
        assert embeddings is not None, "the scheduler prefills an image after its crops"
        return embeddings

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._slots.close(sequence)
        self._images.pop(sequence.id, None)
        self._tiles.release(sequence.id)

    def forget_images(self) -> None:
        """Forget everybody's images; they must be encoded again before they are prefilled."""
        self._images.clear()
        self._tiles.clear()

    def empty_device_cache(self) -> None:
        """Give memory that is held for reuse back to the device, in the hope of larger pieces."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def restart(self) -> None:
        """Begin anew with the same weights: no images, a fresh cache. Sequences must begin their prompts again."""
        self.forget_images()
        for graphs in (self._decode_graphs, self._draw_graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.captured.clear()
        self.empty_device_cache()
        self._cache.renew()
        self._set_up()

    def _set_up(self) -> None:
        device, text = self._model.device, self._model.config.text
        ids = self._model.config.tokenizer
        rules = RuleTable(text.vocab_size, ids.coord_id, ids.size_id, device)
        self._most_pages = -(-text.max_context // self._cache.page_size)
        max_batch_size = self._bounds.max_batch_size
        self._slots = Slots(max_batch_size + _NUM_SPARE_SLOTS, self._most_pages, rules, device)
        self._sampler = Sampler(self._model, rules, self._slots)
        self._hidden = torch.zeros(max_batch_size, text.dim, device=device)  # of prompts, for whose tokens to draw
        self._decode_graphs: DrawGraphs | None = None
        self._draw_graphs: DrawGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._prefill_text: Callable[[Tensor, PrefillPlan, Tensor], Tensor] = self._run_prompts
        if self._with_graphs:
            nobody = torch.zeros(_NUM_COLUMNS + self._most_pages, dtype=torch.int32, device=device)
            nobody[_SLOT], nobody[_POSITION] = self._slots.nobody, -1
            self._decode_graphs = DrawGraphs(
                "decode steps",
                self._decode_rows,
                nobody,
                self._decode_recorder,
                self._graph_budget,
                max_batch_size=max_batch_size,
            )
            self._draw_graphs = DrawGraphs(
                "first tokens",
                self._draw_rows,
                nobody[:_NUM_COLUMNS],
                self._prompt_recorder,
                self._graph_budget,
                max_batch_size=max_batch_size,
            )
            if self._is_fused:
                inputs = PromptInputs(
                    text.dim,
                    self._most_pages,
                    self._model.text.wte.dtype,
                    device,
                    max_tokens=self._bounds.max_prefill_tokens,
                    max_chunks=max_batch_size,
                )
                self._prefill_text = self._prompt_graphs = PromptGraphs(
                    self._run_prompts, inputs, self._prompt_recorder, self._graph_budget
                )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was laid out here was so in no lane

    def _take_in(self, batch: Batch) -> Tensor | None:
        """Encode and prefill; the tokens that follow prompts, if there are any."""
        hidden = self._fill(batch)
        return self._draw(hidden, list(batch.sampled)) if batch.sampled else None

    def _fill(self, batch: Batch) -> Tensor:
        """Encode and prefill; the hidden states of the prompts that end, in order."""
        if batch.encode:
            self._encode(list(batch.encode))
        return self._prefill(list(batch.prefill)) if batch.prefill else self._hidden[:0]

    def _encode(self, items: list[EncodeItem]) -> None:
        pixels = [
            self._tiles.take(item.sequence.id, _image_of(item), item.first_tile, item.end_tile) for item in items
        ]
        features = self._encode_crops(torch.cat(pixels)).split([len(part) for part in pixels])
        whole: list[tuple[_Image, Tensor, tuple[int, int]]] = []
        for item, part in zip(items, features, strict=True):
            image = self._images.setdefault(item.sequence.id, _Image())
            image.features.append(part)
            source = _image_of(item)
            if item.end_tile == source.num_tiles:
                whole.append((image, torch.cat(image.features), (source.rows, source.columns)))
                image.features.clear()
        if whole:
            images, features, tilings = zip(*whole, strict=True)
            for image, embeddings in zip(images, self._vision.project_all(features, tilings), strict=True):
                image.embeddings = embeddings

    def _prefill(self, chunks: list[Chunk]) -> Tensor:
        """Fill the cache; the hidden states of the prompts that end, in order."""
        self._slots.open(*(chunk.sequence for chunk in chunks if chunk.start == 0))
        plan = PrefillPlan.of(chunks, self._cache.page_size, self._cache.device)
        embeddings = self._embeddings(chunks)
        ends = plan.query_starts[1:].long() - 1
        last = [place for place, chunk in enumerate(chunks) if chunk.num_samples]
        if len(last) < len(chunks):
            ends = ends[to_device(last, torch.int64, self._cache.device)]
        return self._prefill_text(embeddings, plan, ends)

    def _run_prompts(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        return self._text.prefill(embeddings, plan, rows, self._cache)

    def _draw(self, hidden: Tensor, sequences: list[Sequence]) -> Tensor:
        """Draw the tokens that follow prompts: hidden [B, dim] → [B, 4], valid until the next."""
        needs, rows = self._sampler.needs(sequences), np.empty((len(sequences), _NUM_COLUMNS), dtype=np.int32)
        self._fill_columns(rows, sequences)
        self._hidden[: len(hidden)] = hidden
        if self._draw_graphs is None:
            return self._draw_rows(to_device(rows, torch.int32, self._model.device), needs)
        return self._draw_graphs.replay(rows, needs)

    def _draw_rows(self, rows: Tensor, needs: DrawNeeds) -> Tensor:
        """What a draw is on the device: int32 [B, columns] → what is drawn after the first B hidden states."""
        slots, settings = rows[:, _SLOT].long(), rows[:, _SETTINGS].contiguous().view(torch.float32)
        return self._sampler.draw(self._hidden[: len(rows)], slots, settings, needs)

    def _decode(self, sequences: list[Sequence]) -> Tensor:
        needs, rows = self._sampler.needs(sequences), self._decode_inputs(sequences)
        if self._decode_graphs is None:
            return self._decode_rows(to_device(rows, torch.int32, self._model.device), needs)
        return self._decode_graphs.replay(rows, needs)

    def _decode_inputs(self, sequences: list[Sequence]) -> np.ndarray:
        """int32 [B, columns and pages]: a row for each sequence's next step."""
        width = None if self._decode_graphs is None else self._most_pages
        page_table = self._slots.page_table(sequences, width)
        rows = np.empty((len(sequences), _NUM_COLUMNS + page_table.shape[1]), dtype=np.int32)
        self._fill_columns(rows, sequences)
        rows[:, _NUM_COLUMNS:] = page_table
        return rows

    def _fill_columns(self, rows: np.ndarray, sequences: list[Sequence]) -> None:
        rows[:, _SLOT] = self._slots.of(sequences)
        # The newest token is not in the cache yet; its position is the number of those that are.
        rows[:, _POSITION] = [sequence.num_cached for sequence in sequences]
        rows[:, _SETTINGS] = self._sampler.settings(sequences).view(np.int32)

    def _decode_rows(self, rows: Tensor, needs: DrawNeeds) -> Tensor:
        """Everything of a decode step that happens on the device: int32 [B, columns and pages] → what is drawn."""
        slots, positions = rows[:, _SLOT].long(), rows[:, _POSITION].long()
        ids, kinds = self._slots.numbers[slots, :2].unbind(1)
        embeddings = self._model.embed_drawn(
            ids, kinds, self._slots.values[slots], with_coordinates=needs.coordinates, with_sizes=needs.sizes
        )
        hidden = self._text.decode(embeddings, positions, rows[:, _NUM_COLUMNS:].contiguous(), self._cache)
        settings = rows[:, _SETTINGS].contiguous().view(torch.float32)
        return self._sampler.draw(hidden, slots, settings, needs)

    def _embeddings(self, chunks: list[Chunk]) -> Tensor:
        """[tokens of all chunks, dim]."""
        texts = [_text_of(chunk) for chunk in chunks]
        embedded = self._model.embed([token for text in texts for token in text])
        parts: list[Tensor] = []
        first = 0
        for chunk, text in zip(chunks, texts, strict=True):
            end = first + len(text)
            if chunk.start == 0 and chunk.sequence.num_image_tokens:
                parts += [embedded[first : first + 1], self.image_embeddings(chunk.sequence)]
                first += 1
            parts.append(embedded[first:end])
            first = end
        return torch.cat(parts)


def _text_of(chunk: Chunk) -> list[Token]:
    """The chunk's tokens but for the image, which stands behind the first of the sequence."""
    sequence, start, end, _ = chunk
    num_image = sequence.num_image_tokens
    first = 0 if start == 0 else start - num_image
    return sequence.tokens[first : max(end - num_image, 1)]


def _image_of(part: EncodeItem) -> Tiles | DecodedImage:
    image = part.sequence.crops
    assert isinstance(image, (Tiles, DecodedImage)), "only sequences with an image have tiles to encode"
    return image
