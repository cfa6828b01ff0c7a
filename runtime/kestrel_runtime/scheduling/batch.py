"""Describes the work of one step, as plain data without torch.

A step is planned, launched and completed at different times, and its sequences change in between. So a batch
records at its creation which sequences get a token and which steps it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kestrel_runtime.scheduling.embedding_cache import EntryId
from kestrel_runtime.scheduling.page_manager import PageCopy, StepId
from kestrel_runtime.scheduling.sequence import Sequence


class EncodeItem(NamedTuple):
    """Crops [first_crop, end_crop) of a sequence's image that one step encodes."""

    sequence: Sequence
    first_crop: int
    end_crop: int

    @property
    def entry(self) -> EntryId:
        """The entry of the embedding cache that the image is encoded into."""
        assert self.sequence.embedding_entry is not None, "a sequence gets an entry before its image is encoded"
        return self.sequence.embedding_entry

    @property
    def is_last(self) -> bool:
        """True if these are the last crops of the image."""
        return self.sequence.crops is not None and self.end_crop == self.sequence.crops.num_crops

    @classmethod
    def rest_of(cls, sequence: Sequence) -> EncodeItem:
        """Returns all crops of the sequence's image that are not encoded yet."""
        assert sequence.crops is not None, "only sequences with an image have crops"
        return cls(sequence, sequence.num_encoded_crops, sequence.crops.num_crops)


class Chunk(NamedTuple):
    """Positions [start, end) of a sequence that one prefill step writes to the KV cache."""

    sequence: Sequence
    start: int
    end: int
    num_samples: int = 0
    """Tokens sampled after this chunk: 1 where it ends the prompt, else 0."""
    is_first: bool = False
    """True if the sequence starts with this chunk, and needs a row of the request state."""

    @classmethod
    def of(cls, sequence: Sequence, start: int, end: int) -> Chunk:
        """Returns a chunk. It samples a token if it ends with the sequence's last position."""
        return cls(sequence, start, end, int(end == sequence.length), start == sequence.num_matched)


class Batch(NamedTuple):
    """One step: either images and prompt chunks, or the next token of running sequences."""

    kind: Literal["prefill", "decode"]
    encode: tuple[EncodeItem, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    """The sequences that get a token in this step, in the order of the step's outputs."""
    copies: tuple[PageCopy, ...]
    """Copies of pages that the step makes before anything else."""
    after: frozenset[StepId]
    """Steps of the other kind that the device must complete first, because they may still write the pages and rows
    of this step."""
    depends_on: frozenset[StepId]
    """Steps of the other kind whose results this step reads: the device must complete them first, and the loop must
    report them first."""
    is_restricted: bool
    """True if a sampled token needs a mask, which depends on the previous tokens."""

    @classmethod
    def of_prefill(
        cls,
        encode: Iterable[EncodeItem] = (),
        prefill: Iterable[Chunk] = (),
        *,
        after: frozenset[StepId] = frozenset(),
    ) -> Batch:
        """Returns a prefill step. If a sequence is in both lists, its crops are encoded before its chunk is
        computed."""
        chunks = tuple(prefill)
        sampled = tuple(chunk.sequence for chunk in chunks if chunk.num_samples)
        copies = tuple(copy for chunk in chunks if chunk.is_first for copy in chunk.sequence.copies)
        is_restricted = _is_restricted(sampled)
        return cls("prefill", tuple(encode), chunks, (), sampled, copies, after, frozenset(), is_restricted)

    @classmethod
    def of_decode(cls, sequences: Iterable[Sequence] = ()) -> Batch:
        """Returns a decode step, in which each sequence gets a token. It depends on the prefill steps that still
        write the sequences' prompts."""
        running = tuple(sequences)
        writing = [sequence.writing for sequence in running if sequence.writing]
        depends_on = frozenset[StepId]().union(*writing)
        return cls("decode", (), (), running, running, (), frozenset(), depends_on, _is_restricted(running))

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, each once."""
        parts = (*self.encode, *self.prefill)
        return list(dict.fromkeys([*(part.sequence for part in parts), *self.decode]))

    @property
    def is_empty(self) -> bool:
        return not (self.encode or self.prefill or self.decode)


def _is_restricted(sampled: tuple[Sequence, ...]) -> bool:
    return any(sequence.matcher is not None for sequence in sampled)


class Plan(NamedTuple):
    """The work of one turn of the loop: up to two steps, which run concurrently. No sequence is in both."""

    prefill: Batch
    decode: Batch

    @property
    def is_empty(self) -> bool:
        return self.prefill.is_empty and self.decode.is_empty
