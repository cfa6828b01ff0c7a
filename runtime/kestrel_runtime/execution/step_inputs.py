"""Lays out the inputs of a step on the host: typed fields in one packed buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.transfer import PackedLayout, StagedCopies, host_buffer
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Chunk
from kestrel_runtime.scheduling.sequence import SequenceImage, TokenSequence

_A = TypeVar("_A")

_id_of, _values_of = attrgetter("id"), attrgetter("value")


class DecodeFields(NamedTuple, Generic[_A]):
    """B rows: sequences, then padding."""

    rows: _A
    """[B] int64: rows of the request state; the padding row for padding."""
    positions: _A
    """[B] int64: position of the token that is fed in; -1 for padding, which writes nothing."""
    pages: _A
    """[B] int32: page of the position, which the row may not have yet; 0 for padding."""


class PrefillFields(NamedTuple, Generic[_A]):
    """T packed tokens of C chunks, N of which are followed by a sampled token. Padding chunks have no tokens."""

    token_ids: _A
    """[T] int64; 0 at image positions and padding."""
    num_values: _A
    """[T] int64: number of values that the token carries."""
    token_values: _A
    """[T, V] float32."""
    embedding_rows: _A
    """[T] int64: row of the embedding slab, all entries one after the other; -1 for a token."""
    positions: _A
    """[T] int64."""
    kv_slots: _A
    """[T] int64: page * page size + place in the page; -1 writes nothing."""
    visible_until: _A
    """[T] int32: the token attends to the positions below it; position + 1, or the end of its span."""
    query_starts: _A
    """[C + 1] int32: where each chunk starts in the packed tokens."""
    context_lengths: _A
    """[C] int32: positions of each sequence up to the chunk's end."""
    rows: _A
    """[C] int64: rows of the request state."""
    sample_tokens: _A
    """[N] int64: packed tokens that a token is sampled after; padding repeats token 0."""
    sample_rows: _A
    """[N] int64: rows of the request state; the padding row for padding."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode step."""

    device: DecodeFields[Tensor]
    size: DecodeSize
    needs: SampleNeeds
    num_sampled: int
    """Rows that are not padding."""
    uses_adapters: bool = False
    """True if any row uses an adapter."""

    @property
    def sample_rows(self) -> Tensor:
        """Returns the rows of the request state that get a token, [B] int64."""
        return self.device.rows


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prefill step."""

    device: PrefillFields[Tensor]
    size: PrefillSize
    value_kinds: int
    """Bit mask of the kinds of values that its tokens carry."""
    needs: SampleNeeds
    num_sampled: int
    is_in_place: bool
    """True if the fields are where captured graphs read them."""
    uses_adapters: bool = False
    """True if any chunk uses an adapter."""

    @property
    def sample_rows(self) -> Tensor:
        """Returns the rows of the request state that get a token, [N] int64."""
        return self.device.sample_rows

    def token_rows(self) -> Tensor:
        """Returns the row of the request state of each token, [T] int64; for padding any row."""
        fields = self.device
        numbers = torch.arange(self.size.num_tokens, dtype=torch.int32, device=fields.rows.device)
        chunks = torch.searchsorted(fields.query_starts[1:], numbers, right=True)
        return fields.rows[chunks.clamp(max=self.size.num_chunks - 1)]


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The arguments of the attention operations of a prefill step. T tokens, C chunks."""

    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: page * page size + place in the page."""
    page_table: Tensor
    """[C, max pages] int32; entries past a sequence's end are one of its pages."""
    query_starts: Tensor
    """[C + 1] int32."""
    lengths: Tensor
    """[C] int32: positions of each sequence up to its chunk's end."""
    visible_until: Tensor
    """[T] int32: each token attends to the positions below it."""
    max_chunk: int
    """Tokens of the longest chunk."""

    @classmethod
    def of(cls, inputs: PrefillInputs, state: RequestState) -> PackedChunks:
        """Returns the chunks of a prefill step, with the pages of their sequences."""
        fields = inputs.device
        return cls(
            positions=fields.positions,
            slots=fields.kv_slots,
            page_table=state.page_table[fields.rows, : inputs.size.max_pages],
            query_starts=fields.query_starts,
            lengths=fields.context_lengths,
            visible_until=fields.visible_until,
            max_chunk=inputs.size.max_chunk,
        )


class InputBuffers:
    """Sends the inputs of steps to the device without waiting for it.

    For steps with captured graphs the device buffer stays where it is: one for all decode steps, one for all
    prefills, since steps of a kind run one after the other. Other steps get new ones.
    """

    def __init__(self, device: torch.device, values_per_token: int) -> None:
        self._device = device
        self._values_per_token = values_per_token
        self._static: dict[type, StagedCopies] = {}

    def reserve(self, largest_decode: DecodeSize, largest_prefill: PrefillSize) -> None:
        """Allocates the buffers of steps with captured graphs."""
        for fields, layout in (
            (DecodeFields, _decode_layout(largest_decode)),
            (PrefillFields, _prefill_layout(largest_prefill, self._values_per_token)),
        ):
            self._static[fields] = StagedCopies(layout.num_bytes, self._device)

    def decode(
        self, size: DecodeSize, fill: Callable[[DecodeFields[NDArray[Any]]], None], *, in_place: bool
    ) -> DecodeFields[Tensor]:
        """Has `fill` write the fields, and sends them; with `in_place` to where captured graphs read them."""
        return self._send(DecodeFields, size, _decode_layout, fill, in_place=in_place)

    def prefill(
        self, size: PrefillSize, fill: Callable[[PrefillFields[NDArray[Any]]], None], *, in_place: bool
    ) -> PrefillFields[Tensor]:
        """Sends the inputs of a prefill step, as `decode` does."""
        new_layout = partial(_prefill_layout, values_per_token=self._values_per_token)
        return self._send(PrefillFields, size, new_layout, fill, in_place=in_place)

    def _send(
        self,
        fields: Any,
        size: Any,
        new_layout: Callable[[Any], PackedLayout],
        fill: Callable[[Any], None],
        *,
        in_place: bool,
    ) -> Any:
        if in_place:
            staged = self._static[fields]
            return fields(**staged.send(size, lambda: new_layout(size), lambda arrays: fill(fields(**arrays))))
        layout = new_layout(size)
        packed = host_buffer(layout.num_bytes, self._device)
        fill(fields(**layout.arrays(packed)))
        return fields(**layout.tensors(packed.to(self._device, non_blocking=True)))


def fill_decode(
    fields: DecodeFields[NDArray[Any]], sequences: Sequence[TokenSequence], state: RequestState, page_size: int
) -> None:
    """Lays out a decode step of `sequences`; the rest of the rows is padding."""
    count = len(sequences)
    fields.rows[count:], fields.positions[count:], fields.pages[count:] = state.padding_row, -1, 0
    fields.rows[:count] = state.rows(sequences)
    # The last token is not in the cache yet; its position is the number of those that are.
    caches = [sequence.cache for sequence in sequences]
    fields.positions[:count] = [cache.num_cached for cache in caches]
    fields.pages[:count] = [cache.pages[cache.num_cached // page_size] for cache in caches]


def fill_prefill(
    fields: PrefillFields[NDArray[Any]],
    chunks: Sequence[Chunk],
    sampled: Sequence[TokenSequence],
    state: RequestState,
    first_embedding: Callable[[SequenceImage], int],
    page_size: int,
) -> None:
    """Lays out a prefill of `chunks`, after which `sampled`, each the end of its chunk, get a token.

    `first_embedding` returns the first row of an image among the embeddings of all entries.
    """
    # What all chunks have is computed for all at once, since a step may begin many prompts behind known images.
    count, lengths = len(chunks), [chunk.end - chunk.start for chunk in chunks]
    *firsts, num_tokens = itertools.accumulate(lengths, initial=0)
    for array, padding in ((fields.num_values, 0), (fields.embedding_rows, -1)):
        array[:] = padding
    fields.token_values[:] = 0
    fields.token_ids[num_tokens:] = fields.positions[num_tokens:] = fields.visible_until[num_tokens:] = 0
    fields.kv_slots[num_tokens:] = -1
    fields.query_starts[:count], fields.query_starts[count:] = firsts, num_tokens
    fields.context_lengths[:count], fields.context_lengths[count:] = [chunk.end for chunk in chunks], 0
    fields.rows[:count], fields.rows[count:] = state.rows([chunk.sequence for chunk in chunks]), state.padding_row
    fields.sample_tokens[len(sampled) :], fields.sample_rows[len(sampled) :] = 0, state.padding_row
    fields.sample_rows[: len(sampled)] = state.rows(sampled)
    offsets = [chunk.start - first for chunk, first in zip(chunks, firsts, strict=True)]
    positions = np.arange(num_tokens) + _of_tokens(offsets, lengths)
    fields.positions[:num_tokens] = positions
    fields.visible_until[:num_tokens] = positions + 1
    pages, page_offsets = list[int](), list[int]()
    token_ids, last_token = list[int](), dict[int, int]()
    for (sequence, start, end, _, _), first in zip(chunks, firsts, strict=True):
        first_page = start // page_size
        page_offsets.append(len(pages) - first_page)
        pages += sequence.cache.pages[first_page : -(-end // page_size)]
        for position, tokens in sequence.text_runs(start, end):
            place = first + position - start
            token_ids += [0] * (place - len(token_ids))
            token_ids += map(_id_of, tokens)
            if any(map(_values_of, tokens)):
                _fill_values(fields, place, tokens)
        if sequence.spans and start < sequence.spans[-1][1]:
            own = slice(first, first + end - start)
            _fill_images(
                fields.visible_until[own], fields.embedding_rows[own], sequence, start, end, first_embedding
            )
        last_token[sequence.id] = first + end - start - 1
    fields.token_ids[:num_tokens] = token_ids + [0] * (num_tokens - len(token_ids))
    numbers, places = np.divmod(positions, page_size)
    numbers += _of_tokens(page_offsets, lengths)
    fields.kv_slots[:num_tokens] = np.array(pages)[numbers] * page_size + places
    fields.sample_tokens[: len(sampled)] = [last_token[sequence.id] for sequence in sampled]


def fill_blank_prefill(fields: PrefillFields[NDArray[Any]], size: PrefillSize, padding_row: int) -> None:
    """Lays out tokens that write nothing, in as many chunks as the size has, each from a sequence's start."""
    for array in fields:
        array[:] = 0
    fields.embedding_rows[:] = fields.kv_slots[:] = -1
    fields.rows[:] = fields.sample_rows[:] = padding_row
    starts = np.linspace(0, size.num_tokens, size.num_chunks + 1).astype(np.int32)
    fields.query_starts[:] = starts
    fields.context_lengths[:] = lengths = np.diff(starts)
    fields.positions[:] = np.concatenate([np.arange(length) for length in lengths])
    fields.visible_until[:] = fields.positions + 1
    fields.sample_tokens[:] = starts[1:][: size.num_samples] - 1


def fill_blank_decode(fields: DecodeFields[NDArray[Any]], padding_row: int) -> None:
    """Lays out a decode step of padding."""
    fields.rows[:], fields.positions[:], fields.pages[:] = padding_row, -1, 0


def value_counts(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Returns how many values each token of the chunks carries, for tokens with any."""
    for chunk in chunks:
        for _, tokens in chunk.sequence.text_runs(chunk.start, chunk.end):
            yield from map(len, filter(None, map(_values_of, tokens)))


def _of_tokens(values: list[int], lengths: list[int]) -> NDArray[Any] | int:
    """Returns a value of each chunk for each of its tokens."""
    return values[0] if len(values) == 1 else np.repeat(values, lengths)


def _fill_values(fields: PrefillFields[NDArray[Any]], first: int, tokens: Sequence[Token]) -> None:
    for place, token in enumerate(tokens, first):
        if token.value:
            fields.num_values[place] = len(token.value)
            fields.token_values[place, : len(token.value)] = token.value


def _fill_images(
    visible: NDArray[Any],
    embedding_rows: NDArray[Any],
    sequence: TokenSequence,
    start: int,
    end: int,
    first_embedding: Callable[[SequenceImage], int],
) -> None:
    """Lays out the images among positions [start, end), which attend up to the ends of their spans."""
    for image in sequence.images:
        image_start, image_end = max(start, image.start), min(end, image.end)
        if image_start < image_end:
            first = first_embedding(image) + image_start - image.start
            embedding_rows[image_start - start : image_end - start] = np.arange(
                first, first + image_end - image_start
            )
    for span_start, span_end in sequence.spans:
        is_whole = start <= span_start and span_end <= end
        assert is_whole or span_end <= start or end <= span_start, "no step divides a span"
        visible[max(span_start - start, 0) : max(span_end - start, 0)] = span_end


def _decode_layout(size: DecodeSize) -> PackedLayout:
    count = (size.num_rows,)
    return PackedLayout({"rows": ("int64", count), "positions": ("int64", count), "pages": ("int32", count)})


def _prefill_layout(size: PrefillSize, values_per_token: int) -> PackedLayout:
    tokens, chunks, samples = (size.num_tokens,), (size.num_chunks,), (size.num_samples,)
    return PackedLayout(
        {
            # At the same place in the buffer whatever else the size is: sampling has graphs of its own.
            "sample_rows": ("int64", samples),
            "token_ids": ("int64", tokens),
            "num_values": ("int64", tokens),
            "token_values": ("float32", (size.num_tokens, values_per_token)),
            "embedding_rows": ("int64", tokens),
            "positions": ("int64", tokens),
            "kv_slots": ("int64", tokens),
            "visible_until": ("int32", tokens),
            "query_starts": ("int32", (size.num_chunks + 1,)),
            "context_lengths": ("int32", chunks),
            "rows": ("int64", chunks),
            "sample_tokens": ("int64", samples),
        }
    )
