"""Describes one request inside the engine: what it asks for, its images, its place in the cache, and its states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from operator import itemgetter
from typing import Any, Protocol

from msgspec import Struct, field

from kestrel_runtime.api.deadlines import deadline_error
from kestrel_runtime.api.errors import KestrelError, QueueTimeout
from kestrel_runtime.api.requests import Priority
from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.fairness.preemption import MIN_TOKENS
from kestrel_runtime.output.embedding import EmbeddingForm
from kestrel_runtime.output.output_parser import OutputParser, Token
from kestrel_runtime.scheduling.cache_keys import CacheScope, Digest, EmbeddingKey, PrefixKeys
from kestrel_runtime.scheduling.crop_cache import PlaceId
from kestrel_runtime.scheduling.embedding_cache import EntryId
from kestrel_runtime.scheduling.page_manager import PageCopy, PageId, StepId
from kestrel_runtime.scheduling.positions import bidirectional_spans, text_runs

_MAX_LAYOUTS = 256


@lru_cache(_MAX_LAYOUTS)
def _layout(
    images: tuple[tuple[int, int], ...], answer_ends: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], int]:
    """Returns spans, share points and number of positions of images at these starts, with so many positions."""
    spans = bidirectional_spans([(start, start + num_positions) for start, num_positions in images])
    return spans, tuple(sorted((*map(_end_of, spans), *answer_ends))), sum(map(_end_of, images))


class SequenceState(IntEnum):
    """The states of a sequence."""

    WAITING = auto()
    """Prepared; holds no page."""
    PARKED = auto()
    """Like WAITING, but it cannot start until its prefix, its pixels or its adapter are available."""
    PREFILLING = auto()
    """Holds pages; steps write its prompt to the cache."""
    PREFILLED = auto()
    """The step that writes the end of its prompt is in flight."""
    RUNNING = auto()
    """Decodes: each step adds a token."""
    FINISHED = auto()
    """Done, cancelled or failed; holds no page. Pages that steps in flight still write to are quarantined."""


_end_of = itemgetter(1)
_TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.PARKED, SequenceState.PREFILLING, SequenceState.FINISHED},
    SequenceState.PARKED: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.PREFILLING: {
        SequenceState.PREFILLED,
        SequenceState.RUNNING,
        SequenceState.WAITING,
        SequenceState.FINISHED,
    },
    SequenceState.PREFILLED: {SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.FINISHED: set(),
}


class SequenceClock(Struct):
    """Moments in a request's life, in seconds of the monotonic clock; None until they come."""

    submitted: float
    deadline: float | None = None
    """After it the caller no longer waits for the answer."""
    queue_deadline: float | None = None
    """After it the request must not start any more."""
    preprocess_started: float | None = None
    prepared: float | None = None
    started: float | None = None
    first_token: float | None = None

    def expiry(self, now: float) -> KestrelError | None:
        """Returns the error with which the request ends if a deadline has passed at `now`, else None."""
        if self.deadline is not None and (passed := deadline_error(self.deadline, now)) is not None:
            return passed
        if self.started is None and self.queue_deadline is not None and now >= self.queue_deadline:
            return QueueTimeout(now - self.submitted)
        return None


class PreparedImage(Protocol):
    """The pixels of one image. The model family encodes them crop by crop."""

    @property
    def num_crops(self) -> int:
        """The number of crops that the vision encoder computes for the image."""
        ...

    def crop_digests(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns a digest of the pixels of each crop; empty if none are computed.

        They may still be computed on a device: then it returns None, or waits for them if `waits` is true.
        """
        ...


class AdapterLease(Protocol):
    """A request's lease of an adapter, which keeps one version of the adapter in its slot. May be used in any
    thread."""

    @property
    def name(self) -> str:
        """The name of the adapter in the request."""
        ...

    @property
    def tenant(self) -> str:
        """The tenant of the request; "" if tenants are not distinguished."""
        ...

    @property
    def is_reclaimed(self) -> bool:
        """True if another tenant needs the slot: the request ends this lease and asks for another one."""
        ...

    @property
    def slot(self) -> int:
        """The number of the slot, from 1."""
        ...

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the adapter's content."""
        ...

    def end(self) -> None:
        """Ends the lease, so that the slot may be written again. Has no effect the second time."""
        ...


class TokenMatcher(Protocol):
    """Follows the tokens of one constrained sequence. One thread at a time."""

    def take(self, generated: Sequence[Token]) -> None:
        """Follows the sequence: all tokens that it has generated, even if some were removed since the last call.

        Raises `ConstraintFailed` if a token is not allowed, or if following it takes too much work.
        """
        ...


class EndDelivery(Protocol):
    """Delivers the last events of one sequence."""

    def deliver(self, stream: Any, events: list[Any]) -> None:
        """Delivers the events to the stream of the caller, or an error in place of the last. May be called in any
        thread."""
        ...


class SequenceRequest(Struct):
    """Describes what a request asks for: whose it is, and how its answer is sampled, parsed and checked."""

    parser: OutputParser
    temperature: float
    top_p: float
    seed: int
    """The seed of the sequence's random numbers."""
    max_context: int
    """Positions after which the sequence must end: its context is full, or its parser takes no further token."""
    controls: SamplingParams | None = None
    """The settings, if they limit the choice of tokens or adjust logits (`SamplingParams.controls_tokens`)."""
    num_logprobs: int | None = None
    """The number of most likely tokens that the parser gets for each token; None if it needs no logprobs."""
    matcher: TokenMatcher | None = None
    """Decides which tokens the answer may have; None without a constraint."""
    end_check: EndDelivery | None = None
    """Checks the whole answer before its last events are delivered; None if no check is needed."""
    fingerprint: str = ""
    """The hash of the request: equal requests have equal fingerprints."""
    priority: Priority = Priority.NORMAL
    standing: Priority = Priority.NORMAL
    """The priority compared with sequences of other tenants."""
    tenant: str = ""
    """The tenant that sent the request; "" if tenants are not distinguished."""
    computes_anew: bool = False
    """True if the sequence uses no cached data, and replaces it."""
    is_transient: bool = False
    """True if what the sequence publishes takes the place of nothing that others have published."""
    is_turn: bool = False
    """True if the request is a turn of a conversation, whose next turn continues behind the answer."""
    embeddings: EmbeddingForm | None = None
    """The form in which the sequence reads the embeddings of its image; None if it generates tokens."""


class SequenceImage(Struct, eq=False):
    """An image of a sequence: its positions, its pixels and its embeddings."""

    start: int
    """The first of its positions."""
    num_positions: int
    pixels: PreparedImage | None = None
    """The pixels that the vision encoder computes; None while they are not decoded."""
    size_px: tuple[int, int] | None = None
    """Width and height, upright; None until the image has been decoded once."""
    key: EmbeddingKey | None = None
    """The key of the embeddings; None if the sequence neither uses cached embeddings nor adds to them."""
    crop_scope: CacheScope | None = None
    """The scope of its crops in the crop cache; None if it neither uses cached crops nor adds to them."""
    encoded_crops: set[int] = field(default_factory=set)
    """The crops that its sequence has encoded."""
    found_crops: dict[int, PlaceId] = field(default_factory=dict)
    """The crops that were found in the crop cache, with their places."""
    is_encoded: bool = False
    """True if a step that completes its embeddings has been launched."""
    entry: EntryId | None = None
    """The entry of the embeddings; None if it needs none, or does not have one yet."""
    has_cached_embeddings: bool = False
    """True if its entry was cached, so that no crop needs encoding."""

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return self.start + self.num_positions

    @property
    def needs_encoding(self) -> bool:
        """True if its pixels are there and its embeddings are not."""
        return not (self.has_cached_embeddings or self.is_encoded or self.pixels is None)

    def crops_left(self) -> tuple[int, ...]:
        """Returns the crops that are neither encoded nor found."""
        if self.pixels is None or not self.needs_encoding:
            return ()
        if not (self.encoded_crops or self.found_crops):
            return tuple(range(self.pixels.num_crops))
        known = self.encoded_crops, self.found_crops
        return tuple(crop for crop in range(self.pixels.num_crops) if not any(crop in some for some in known))

    def forget_embeddings(self) -> None:
        """Forgets its entry and its crops, which it does not have any more."""
        self.entry, self.has_cached_embeddings, self.is_encoded = None, False, False
        self.encoded_crops.clear()
        self.found_crops.clear()


class CacheState(Struct):
    """The pages of a sequence, and which of its positions are in them."""

    keys: PrefixKeys | None = None
    """The keys of its positions in the prefix cache; None if the sequence neither uses the cache nor adds to it."""
    pages: list[PageId] = field(default_factory=list)
    """The pages that the page manager gave it, in the order of its positions."""
    num_cached: int = 0
    """Positions whose keys and values are in the cache."""
    num_matched: int = 0
    """Positions that were in the prefix cache when the sequence last started."""
    num_cached_prompt: int | None = None
    """Positions that were in the prefix cache at its first start; None before."""
    copies: tuple[PageCopy, ...] = ()
    """Copies of partly shared pages, which its next prefill step makes."""
    writing: set[StepId] = field(default_factory=set)
    """Prefill steps in flight that write its prompt to its pages."""
    last_decode: StepId | None = None
    """The last decode step that wrote to its pages; it may be complete."""


class TokenSequence(Struct, eq=False):
    """A prompt and the tokens that have been generated after it.

    Positions: the first token (BOS) is at 0; each image has positions of its own between two tokens.
    """

    id: int
    tokens: list[Token]
    """Prompt and generated tokens, BOS first, without image tokens."""
    num_prompt_tokens: int
    """The number of `tokens` that belong to the prompt."""
    request: SequenceRequest
    clock: SequenceClock
    images: list[SequenceImage] = field(default_factory=list)
    """Its images, in the order of their positions."""
    decode_job: Any = None
    """A worker's job that decodes all its images, if the pixels of any were left out because its pages or
    embeddings were cached."""
    answer_ends: tuple[int, ...] = ()
    """The positions behind the earlier answers of a conversation."""
    cache: CacheState = field(default_factory=CacheState)
    adapter: AdapterLease | None = None
    """Keeps its adapter in a slot until the sequence leaves the engine; None without an adapter."""
    state: SequenceState = SequenceState.WAITING
    start_number: int | None = None
    """The number of its first start among all sequences of the engine; None before. Preemption does not change
    it."""
    num_tokens_at_start: int = 0
    """The number of `tokens` at its last start."""
    num_pending: int = 0
    """Tokens that steps in flight sample: they have positions and pages, but are not in `tokens` yet."""
    tenant: str = ""
    """The tenant of the request, a field of its own since every step asks for it."""
    num_image_positions: int = 0
    """The number of positions of all images."""
    num_further_positions: int = 0
    """The positions that the cache has in addition to tokens: those of images. A sequence that reads embeddings has
    none in the cache, not those of its tokens either."""
    spans: tuple[tuple[int, int], ...] = ()
    """The spans of its images (`bidirectional_spans`), in their order."""
    share_points: tuple[int, ...] = ()
    """The positions behind which other sequences may differ: ends of images and of earlier answers, in order."""

    def __post_init__(self) -> None:
        places: tuple[tuple[int, int], ...] = ()
        for image in self.images:
            places += ((image.start, image.num_positions),)
        self.spans, self.share_points, num_positions = _layout(places, self.answer_ends)
        request, self.num_image_positions = self.request, num_positions
        self.tenant = request.tenant
        self.num_further_positions = num_positions if request.embeddings is None else -len(self.tokens)

    @property
    def priority(self) -> Priority:
        return self.request.priority

    @property
    def standing(self) -> Priority:
        return self.request.standing

    @property
    def adapter_slot(self) -> int:
        """The slot of the sequence's adapter; 0 without one."""
        return 0 if self.adapter is None else self.adapter.slot

    @property
    def length(self) -> int:
        """The number of positions of images and all tokens, pending ones included; 0 for a sequence that reads
        embeddings, which needs no pages."""
        return len(self.tokens) + self.num_pending + self.num_further_positions

    @property
    def is_full(self) -> bool:
        """True if the sequence has as many known tokens as it may have."""
        return len(self.tokens) + self.num_image_positions >= self.request.max_context

    @property
    def has_room(self) -> bool:
        """True if the sequence decodes and may have a token in addition to those known and pending."""
        return self.state is SequenceState.RUNNING and self.length < self.request.max_context

    def images_behind(self, num_positions: int) -> list[SequenceImage]:
        """Returns the images that the first `num_positions` do not cover."""
        return [image for image in self.images if image.end > num_positions]

    def text_runs(self, start: int, end: int) -> Iterable[tuple[int, Sequence[Token]]]:
        """Returns the known tokens at positions [start, end), in runs between images: the first position of each
        run, and its tokens."""
        if self.spans and start >= self.spans[-1][1]:  # most often: behind the last image
            num_images = self.num_image_positions
            return ((start, self.tokens[start - num_images : end - num_images]),)
        return text_runs(self.tokens, self.images, start, end)

    def missing_share_point(self, num_positions: int, page_size: int) -> Digest | None:
        """Returns the key of the first image that the first `num_positions` do not cover; None if they cover all,
        or without keys."""
        if self.cache.keys is None or not self.spans or num_positions >= self.spans[-1][1]:
            return None
        return self.cache.keys.missing_share_point(num_positions, page_size)

    def belongs_to(self, namespace: str | None, image: bytes | None) -> bool:
        """Returns True if the sequence would publish pages, embeddings or crops of a namespace, or of an image in
        it. None means all."""
        keys = (self.cache.keys, *(item.key for item in self.images))
        scopes = [key.scope for key in keys if key is not None]
        scopes += [item.crop_scope for item in self.images if item.crop_scope is not None]
        return any(scope.is_part_of(namespace, image) for scope in scopes)

    def leave_caches(self) -> None:
        """Stops reading from the caches and adding to them."""
        self.cache.keys = None
        for image in self.images:
            image.key = image.crop_scope = None

    def num_own_pages(self, page_size: int) -> int:
        """Returns the number of pages that it holds and did not find in the prefix cache when it last started."""
        return len(self.cache.pages) - self.cache.num_matched // page_size

    @property
    def num_written(self) -> int:
        """The number of positions that completed steps have written, once the prompt is written: all but that of
        the last token."""
        return len(self.tokens) + self.num_image_positions - 1

    @property
    def num_prompt_positions(self) -> int:
        return self.num_prompt_tokens + self.num_image_positions

    @property
    def submitted(self) -> float:
        return self.clock.submitted

    @property
    def cost(self) -> int:
        """The cost of the sequence's start for its tenant, in units of one generated token."""
        return self.num_prompt_positions

    @property
    def generated(self) -> list[Token]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def may_yield(self) -> bool:
        """True if the sequence may be preempted for another tenant (Y2 in `fairness/preemption.py`)."""
        if self.state is SequenceState.PREFILLING:
            return self.cache.num_cached == self.cache.num_matched
        has_returned = self.num_tokens_at_start > self.num_prompt_tokens
        num_tokens = len(self.tokens) + self.num_pending - self.num_tokens_at_start
        return num_tokens >= (MIN_TOKENS if has_returned else 1)

    def move_to(self, state: SequenceState) -> None:
        """Enters another state. An illegal transition is a bug of the engine."""
        assert state in _TRANSITIONS[self.state], f"{self.state.name} → {state.name}"
        self.state = state
