"""Describes the work of one step, as plain data without torch.

A step is planned, launched and completed at different times, and its sequences change in between. So a batch
records at its creation which sequences get a token and which steps it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, NamedTuple

from kestrel_runtime.scheduling.crop_cache import PlaceId
from kestrel_runtime.scheduling.embedding_cache import EntryId
from kestrel_runtime.scheduling.page_manager import PageCopy, StepId
from kestrel_runtime.scheduling.sequence import PreparedImage, SequenceImage, TokenSequence

# In every step, for every sequence: several times as fast as comprehensions.
_sequence_of, _writing_of, _matcher_of = (
    attrgetter("sequence"),
    attrgetter("cache.writing"),
    attrgetter("request.matcher"),
)


class EncodeItem(NamedTuple):
    """The crops of an image of a sequence that one step encodes, and those that it finds encoded."""

    sequence: TokenSequence
    image: SequenceImage
    crops: tuple[int, ...]
    """The numbers of the crops that the step encodes, in ascending order; there may be none."""
    places: tuple[PlaceId | None, ...] = ()
    """The places of the pool to which `crops` are copied; None for a crop that is not. Empty if none is copied."""
    found: tuple[tuple[int, PlaceId], ...] = ()
    """The crops that are read from the pool, each with its place; only of an image that is complete in this step.
    The step may itself write some of the places."""
    is_first: bool = True
    """True if nothing of the image has been encoded before."""
    is_last: bool = True
    """True if the image is complete in this step."""

    @property
    def entry(self) -> EntryId:
        """The entry of the embedding cache that the image is encoded into."""
        assert self.image.entry is not None, "an image gets an entry before it is encoded"
        return self.image.entry

    @property
    def pixels(self) -> PreparedImage:
        """The pixels of the image."""
        assert self.image.pixels is not None, "only decoded images are encoded"
        return self.image.pixels

    @classmethod
    def rest_of(cls, sequence: TokenSequence, image: SequenceImage) -> EncodeItem:
        """Returns all crops of a sequence's decoded image that are not encoded yet; they are not copied to the
        pool."""
        assert image.pixels is not None, "only decoded images are encoded"
        found = tuple(image.found_crops.items())
        return cls(sequence, image, image.crops_left(), found=found, is_first=not image.encoded_crops)


class Chunk(NamedTuple):
    """Positions [start, end) of a sequence that one prefill step writes to the KV cache."""

    sequence: TokenSequence
    start: int
    end: int
    num_samples: int = 0
    """Tokens sampled after this chunk: 1 where it ends the prompt, else 0."""
    is_first: bool = False
    """True if the sequence starts with this chunk, and needs a row of the request state."""

    @classmethod
    def of(cls, sequence: TokenSequence, start: int, end: int) -> Chunk:
        """Returns a chunk. It samples a token if it ends with the sequence's last position."""
        return cls(sequence, start, end, int(end == sequence.length), start == sequence.cache.num_matched)


class Batch(NamedTuple):
    """One step: either images and prompt chunks, or the next token of running sequences."""

    kind: Literal["prefill", "decode"]
    encode: tuple[EncodeItem, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[TokenSequence, ...]
    sampled: tuple[TokenSequence, ...]
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
    read: tuple[TokenSequence, ...] = ()
    """The sequences whose image embeddings, complete after this step's crops, the step copies to the host."""

    @classmethod
    def of_prefill(
        cls,
        encode: Iterable[EncodeItem] = (),
        prefill: Iterable[Chunk] = (),
        *,
        read: Iterable[TokenSequence] = (),
        after: frozenset[StepId] = frozenset(),
    ) -> Batch:
        """Returns a prefill step. If a sequence is in several lists, its crops are encoded before its chunk is
        computed or its embeddings are read."""
        chunks = tuple(prefill)
        sampled = tuple(chunk.sequence for chunk in chunks if chunk.num_samples)
        copies = tuple(copy for chunk in chunks if chunk.is_first for copy in chunk.sequence.cache.copies)
        is_restricted = _is_restricted(sampled)
        return cls(
            "prefill", tuple(encode), chunks, (), sampled, copies, after, frozenset(), is_restricted, tuple(read)
        )

    @classmethod
    def of_decode(cls, sequences: Iterable[TokenSequence] = ()) -> Batch:
        """Returns a decode step, in which each sequence gets a token. It depends on the prefill steps that still
        write the sequences' prompts."""
        running = tuple(sequences)
        depends_on = frozenset[StepId]().union(*filter(None, map(_writing_of, running)))
        return cls("decode", (), (), running, running, (), frozenset(), depends_on, _is_restricted(running))

    @property
    def sequences(self) -> list[TokenSequence]:
        """All sequences of the step, each once."""
        parts = (*self.encode, *self.prefill)
        return list(dict.fromkeys((*map(_sequence_of, parts), *self.read, *self.decode)))

    @property
    def is_empty(self) -> bool:
        return not (self.encode or self.prefill or self.read or self.decode)


def _is_restricted(sampled: tuple[TokenSequence, ...]) -> bool:
    return any(map(_matcher_of, sampled))


class Plan(NamedTuple):
    """The work of one turn of the loop: up to two steps, which run concurrently. No sequence is in both."""

    prefill: Batch
    decode: Batch

    @property
    def is_empty(self) -> bool:
        return self.prefill.is_empty and self.decode.is_empty
