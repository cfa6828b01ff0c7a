"""Decides which sequences run in the next step, and preempts sequences if rows or pages do not suffice for all.

The decisions depend on no torch, threads or clock.

Invariants
  I1  Only PREFILLING, PREFILLED and RUNNING sequences hold pages. A sequence that leaves these states returns all
      of its pages at once; `PageManager` decides when they can be allocated again.
  I2  Each RUNNING sequence whose context is not full is in every decode batch, so its next token takes one step.
  I3  While any sequence decodes, a prefill step has at most `max_prefill_tokens` prompt tokens (or the span of one
      image, which cannot be split) and encodes at most `max_crops_per_step` crops. If sequences of several tenants
      are active, at most `max_prefill_tokens_of_others` of the tokens belong to the tenants that were not served
      least: their long prompts delay the others less. That bound holds for another second, in which a tenant whose
      request has ended may send its next one.
  I4  A page is allocated when a token needs it. If none is available, a sequence is preempted: it waits again,
      keeps its tokens, and is prefilled with them later. It is the youngest of the tenant with the largest share
      (`TenantShares`). So the oldest sequence always advances if all are of one tenant.
  I5  Sequences start in the order of `WaitingQueue`: by tenant, and of each tenant preempted ones first, then by
      priority and age. A smaller sequence never overtakes a larger one that waits for pages. If the first finds
      no row or no pages, sequences of tenants with larger shares yield: they are preempted. If prompts of
      several tenants are computed, that of the tenant which was served least is computed first.
  I6  After a failed step each sequence that was active repeats its part of the step alone and samples a token (an
      isolation run). No other sequence runs until all of them have, except while all that are left wait for the
      pixels of their images: others may hold the memory for these. All steps of a sequence for which `run_alone`
      was called run alone.
  I7  Steps may be planned while tokens of earlier steps are pending, unless the plan needs their values: no
      sequence is preempted or yields, and no failed step is isolated, while a token is pending.
  I8  A PREFILLED sequence decodes once the step that ends its prompt is complete; `promote` lets it decode earlier,
      in decode steps that depend on that step. So decoding sequences need not wait for prompts of others.
  I9  Positions that a sequence finds in the prefix cache when it starts are not computed again, except the last.
      Pages are published when the step that wrote them is complete, for sequences that are still here.
  I10 A sequence whose images are not all in its cached pages has an entry for embeddings from its start to its end,
      or until it waits again and another one needs the entry. It uses the entry for one image after the other: for
      the next one when the span of the last one is written. If the embeddings of an image are cached, it gets their
      entry, and no crop is encoded; entries of further images are held as far as E5 allows.
  I11 An image that several sequences need is computed once: the others are PARKED until it is published. If the
      sequence that computes it leaves, the first of them computes it.
  I12 Whatever a sequence waits for, it waits for before it holds a page. When it starts, each of its images has its
      pages, its embeddings or its pixels. One that lacks any is PARKED without pixels until a worker has decoded
      all of its images, whose memory is taken together. So active sequences wait for nothing but their own steps,
      and the oldest ends.
  I13 A sequence that reads embeddings has a row and an entry, but no pages. The step that encodes the last crop of
      its image, or a later one, copies the embeddings to the host, and ends the sequence.
  I14 Crops that the pool has are not encoded. An image leases those that it has found until the step that completes
      it is launched. The pool delays no start and no step: what it has no place for is encoded and not kept.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from kestrel_runtime.fairness.preemption import TenantShares
from kestrel_runtime.fairness.waiting_queue import WaitingQueue
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch, Chunk, EncodeItem, Plan
from kestrel_runtime.scheduling.cache_keys import Digest
from kestrel_runtime.scheduling.crop_cache import CropCache, CropKey, LateKey, PlaceId
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache, LeaseId
from kestrel_runtime.scheduling.page_manager import PageManager, PrefixMatch, StepId
from kestrel_runtime.scheduling.sequence import PreparedImage, SequenceImage, SequenceState, TokenSequence

_NO_MATCH = PrefixMatch()
_NEXT_REQUEST_S = 1.0
_MAX_READ = 8
"""The most sequences whose embeddings one step copies to the host, some megabytes each."""


class _Start(Struct):
    """A way for a waiting sequence to start: the cached pages that it uses, and the active sequences that yield to
    it."""

    match: PrefixMatch
    yielding: list[TokenSequence]


class _Isolated(NamedTuple):
    """A sequence that was active when a step failed, and runs alone. `is_decoding`: it was decoding then."""

    sequence: TokenSequence
    is_decoding: bool


class Scheduler:
    """Divides the rows of the batch and the pages of the KV cache between waiting and active sequences.

    For each step, `schedule` plans it and allocates pages, `commit` records its launch, and `complete` takes the
    tokens that it sampled.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_batch_size: int,
        max_prefill_tokens: int,
        max_crops_per_step: int,
        max_prefill_tokens_of_others: int | None = None,
        ageing_s: float = 10.0,
        cuts_at_share_points: bool = False,
        embeddings: EmbeddingCache | None = None,
        crops: CropCache | None = None,
    ) -> None:
        """Creates a scheduler without sequences.

        `embeddings` needs an entry for one sequence more than `max_batch_size`, for a probe; the default caches
        none. The default of `crops` keeps none. With `cuts_at_share_points`, a new chunk begins where an image or
        an earlier answer ends, also within one step: what follows reads the positions before it from pages, whether
        they were cached or have just been computed. A step has at most as many chunks as one image for each
        sequence makes.
        """
        self._pages = pages
        self._embeddings = EmbeddingCache(max_batch_size + 1) if embeddings is None else embeddings
        self._crops = CropCache() if crops is None else crops
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_crops_per_step = max_crops_per_step
        self._max_prefill_tokens_of_others = max_prefill_tokens_of_others or max_prefill_tokens
        self._cuts_at_share_points = cuts_at_share_points
        self._max_chunks = max_batch_size * (1 + cuts_at_share_points)
        self._waiting = WaitingQueue(ageing_s=ageing_s)
        self._shared_prefills = SharedPrefills()
        self._without_pixels: dict[
            TokenSequence, bool
        ] = {}  # parked for their pixels; whether these have been asked for
        self._without_adapter: set[TokenSequence] = set()  # parked until they have a slot again
        self._active: list[TokenSequence] = []  # PREFILLING, PREFILLED and RUNNING, oldest first
        self._num_active_of: dict[str, int] = {}  # by tenant, without zeros
        self._several_until = 0.0  # until when prompts are computed as if several tenants were active
        self._start_numbers = itertools.count()
        self._isolated: deque[_Isolated] = deque()  # the first runs alone
        self._is_isolating = False  # the last plan was, or the next one is, an isolation run
        self._alone: list[TokenSequence] = []  # all steps of the first run alone
        self._in_flight: set[StepId] = set()
        self._tail_steps: set[StepId] = set()  # decode steps in flight with sequences that have left
        self._preempted: list[TokenSequence] = []  # since they were taken
        self._now = 0.0  # of the last plan
        self.num_lookups = 0
        """Sequences that searched the prefix cache at their first start."""
        self.num_hits = 0
        """Sequences that found cached positions."""

    @property
    def num_waiting(self) -> int:
        num_parked = len(self._shared_prefills) + len(self._without_pixels) + len(self._without_adapter)
        return len(self._waiting) + num_parked

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def is_idle(self) -> bool:
        return not (self._active or self.num_waiting)

    @property
    def is_blocked(self) -> bool:
        """True if no step can be planned until pixels, an adapter or another sequence arrive."""
        return bool(self._without_pixels or self._without_adapter) and not (self._waiting or self._active)

    @property
    def is_isolating(self) -> bool:
        """True if the last or the next plan is an isolation run, of one sequence alone."""
        return self._is_isolating and bool(self._isolated)

    @property
    def can_look_ahead(self) -> bool:
        """True if the next steps can be planned while tokens are pending."""
        if self._isolated or self._alone or self._some_yield():
            return False
        if len(self._active) <= self._pages.num_available:  # a step needs at most a page for each
            return True
        needed = sum(self._needs_page(sequence) for sequence in self._active if sequence.has_room)
        return needed <= self._pages.num_available

    @property
    def is_decoding(self) -> bool:
        """True if any sequence decodes in the next step."""
        return any(sequence.has_room for sequence in self._active)

    def sequences(self) -> Iterator[TokenSequence]:
        """Yields every sequence in the scheduler, active ones first."""
        yield from self._active
        yield from self._waiting
        yield from self._shared_prefills
        yield from self._without_pixels
        yield from self._without_adapter

    def add(self, sequence: TokenSequence) -> None:
        """Queues a prepared sequence."""
        assert sequence.state is SequenceState.WAITING
        assert sequence.num_prompt_positions < sequence.request.max_context, "checked when the request was prepared"
        self._waiting.push(sequence)

    def run_alone(self, sequence: TokenSequence) -> None:
        """Makes all steps of a waiting sequence run alone. Of several such sequences, one runs at a time."""
        self._alone.append(sequence)

    def schedule(self, now: float, *, may_prefill: bool = True) -> Plan:
        """Plans the next steps and allocates the pages they need; `now` is in seconds of the clock of the
        sequences.

        Without `may_prefill` the plan has a decode step only.
        """
        self._now = now
        isolated = next((item for item in self._isolated if item.sequence not in self._without_pixels), None)
        self._is_isolating = isolated is not None
        if isolated is not None:
            self._isolated.remove(isolated)
            self._isolated.appendleft(isolated)
            return self._isolation_run(*isolated)
        self._grow_running()
        if self._alone and (plan := self._plan_alone(self._alone[0])) is not None:
            return plan
        if may_prefill:
            self._admit()  # running sequences may yield, which then do not decode
        decode = Batch.of_decode(sequence for sequence in self._active if sequence.has_room)
        if not may_prefill:
            return Plan(self._prefill_batch(), decode)
        return Plan(self._prefill_batch(*self._plan_prefill(bounded=not decode.is_empty)), decode)

    def commit(self, step: StepId, batch: Batch) -> None:
        """Records that a batch was launched as `step`; each token that it samples is pending from now on."""
        self._in_flight.add(step)
        for item in batch.encode:
            item.image.encoded_crops.update(item.crops)
            if item.places:
                self._crops.fill(item.places, step)
            if item.is_last:
                item.image.is_encoded = True
                self._embeddings.fill(_lease_id(item.sequence, item.image), step)
                self._crops.release(_lease_id(item.sequence, item.image))  # later steps run behind this one
        for sequence, _, end, num_samples, _ in batch.prefill:
            cache = sequence.cache
            cache.num_cached = end
            cache.writing.add(step)
            if cache.copies:
                self._pages.commit_copies(sequence.id, step)
                cache.copies = ()
            if num_samples:
                sequence.move_to(SequenceState.PREFILLED)
        for sequence in batch.read:
            sequence.move_to(SequenceState.PREFILLED)
        for sequence in batch.decode:
            cache = sequence.cache
            cache.num_cached += 1
            cache.last_decode = step
        for sequence in batch.sampled:
            sequence.num_pending += 1

    def promote(self, batch: Batch) -> None:
        """Lets the sequences whose prompts end in a prefill batch decode from now on, in steps that depend on
        it."""
        for sequence in batch.sampled:
            if sequence.state is SequenceState.PREFILLED:
                sequence.move_to(SequenceState.RUNNING)

    def behind_tail_steps(self, batch: Batch) -> Batch:
        """Returns a prefill step that runs after the decode steps in flight of sequences that have left, if a
        sequence starts in it: these steps may still write to the pages and the row of the request state that the
        sequence gets."""
        starts = any(chunk.is_first for chunk in batch.prefill)
        return batch._replace(after=frozenset(self._tail_steps)) if starts else batch

    def complete(self, step: StepId, batch: Batch, tokens: list[Token], now: float = 0.0) -> list[TokenSequence]:
        """Takes the tokens of a completed step, in the order of `batch.sampled`. `now` is as for `schedule`.

        Returns the sampled sequences that are still here, each with its new token as the last.
        """
        if batch.kind == "prefill":
            self.promote(batch)
        self._forget_step(step)
        self._embeddings.complete(step, now)
        self._crops.complete(step, now)
        for chunk in batch.prefill:
            # A sequence that was preempted meanwhile does not have these pages any more.
            if step in chunk.sequence.cache.writing:
                self._publish(chunk.sequence, chunk.end, now)
        for chunk in batch.prefill:
            chunk.sequence.cache.writing.discard(step)
        here: list[TokenSequence] = []
        finished, page_size, is_decode = SequenceState.FINISHED, self._pages.page_size, bool(batch.decode)
        for sequence, token in zip(batch.sampled, tokens, strict=True):
            if sequence.state is finished:
                continue
            sequence.num_pending -= 1
            sequence.tokens.append(token)
            here.append(sequence)
            if is_decode:
                num_written = len(sequence.tokens) + sequence.num_image_positions - 1
                if not num_written % page_size:
                    self._publish(sequence, num_written, now)
            elif len(sequence.images) > 1:  # its images are written; others may hold their entries
                self._release_embeddings(sequence)
        self._waiting.serve(here)
        if self._isolated and self._isolated[0].sequence in (*here, *batch.read):
            self._isolated.popleft()
        return here

    def preempt_all(self) -> None:
        """Preempts all sequences after a failed step. No step may be in flight. Their images must be encoded again.

        Every active sequence is isolated, including those that have passed an isolation run, so that their order
        stays. But a sequence that failed in its isolation run is moved to the front, so that no other sequence is
        active in its next one.
        """
        known = {item.sequence: item for item in self._isolated}
        failed = self._isolated[0].sequence if self.is_isolating else None
        active = [known.pop(item, _Isolated(item, item.state is SequenceState.RUNNING)) for item in self._active]
        isolated = (*active, *known.values())
        self._isolated = deque(sorted(isolated, key=lambda item: item.sequence is not failed))
        self._is_isolating = True
        for step in list(self._in_flight):
            self._forget_step(step)
        for sequence in self._active:
            sequence.num_pending = 0
            sequence.cache.writing.clear()
        while self._active:
            self._preempt(self._active[-1])
        self._pages.forget_cached()  # it is unknown what the failed step has written
        self._embeddings.reset()
        self._crops.reset()
        for sequence in self._waiting:
            self._release_embeddings(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Removes a finished, cancelled or failed sequence and releases its pages, as I1 requires."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.PARKED:
            self._shared_prefills.remove(sequence)
            self._without_pixels.pop(sequence, None)
            self._without_adapter.discard(sequence)
        else:
            self._deactivate(sequence)
        self._release_embeddings(sequence)
        sequence.move_to(SequenceState.FINISHED)
        if self._isolated:
            self._isolated = deque(item for item in self._isolated if item.sequence is not sequence)
        if self._alone:
            self._alone = [other for other in self._alone if other is not sequence]

    def finish(self, sequence: TokenSequence) -> None:
        """Removes a sequence whose answer is complete. If a next turn may follow it, all of its positions are
        published first; of others only the full pages are."""
        keys, num_positions = sequence.cache.keys, sequence.num_written
        if sequence.request.is_turn and keys is not None and sequence.state is SequenceState.RUNNING:
            keys.add_share_point(sequence.tokens, num_positions, self._pages.page_size)
            self._publish(sequence, num_positions, self._now)
        self.remove(sequence)

    def take_preempted(self) -> list[TokenSequence]:
        """Returns the sequences that have been preempted since the last call.

        They have no row of the request state any more, since others may start before they return.
        """
        found, self._preempted = self._preempted, []
        return found

    def take_without_pixels(self) -> list[TokenSequence]:
        """Returns the sequences whose images must be decoded because they are no longer cached; each is returned
        once."""
        found = [sequence for sequence, is_asked_for in self._without_pixels.items() if not is_asked_for]
        self._without_pixels.update(dict.fromkeys(found, True))
        return found

    def add_pixels(self, sequence: TokenSequence, pixels: Sequence[PreparedImage]) -> None:
        """Gives a sequence the pixels of all its images. The sequence waits for its start again."""
        del self._without_pixels[sequence]
        for image, own in zip(sequence.images, pixels, strict=True):
            image.pixels = own
        self._wait_again(sequence)

    def take_adapter(self, sequence: TokenSequence) -> bool:
        """Parks a sequence whose adapter gives up its slot, until `give_adapter`. No token of it may be pending.

        Returns False if that must wait: while its image is being decoded, or it runs alone.
        """
        if self._isolated or sequence in self._without_pixels:
            return False
        if sequence.state is SequenceState.PARKED:
            self._shared_prefills.remove(sequence)
        else:
            if sequence.state is not SequenceState.WAITING:
                self._preempt(sequence)
            self._waiting.remove(sequence)
            self._release_embeddings(sequence)  # others may start meanwhile, and need entries
            sequence.move_to(SequenceState.PARKED)
        self._without_adapter.add(sequence)
        return True

    def give_adapter(self, sequence: TokenSequence) -> None:
        """Lets a parked sequence wait for its start, since its adapter has a slot again."""
        self._without_adapter.remove(sequence)
        self._wait_again(sequence)

    def forget_cached(self, namespace: str | None = None, image: bytes | None = None) -> tuple[int, int, int]:
        """Removes the cached data of a namespace, or of one image in it; all data if both are None.

        Returns the numbers of pages, images and crops. Current sequences publish no more of this data. With one
        image all crops of the namespace are removed, since a crop does not know its images.
        """
        for sequence in list(self.sequences()):
            if sequence.belongs_to(namespace, image):
                sequence.leave_caches()
                self._stop_filling(sequence)
        num_pages = self._pages.forget_cached(namespace, image)
        return num_pages, self._embeddings.forget(namespace, image), self._crops.forget(namespace)

    def allocate_probe(self, probe: TokenSequence) -> None:
        """Allocates pages and an entry for a request of the engine itself, which is not scheduled. No step may be
        in flight."""
        assert not self._in_flight, "a probe runs alone"
        self._allocate(probe, _NO_MATCH)

    def release_probe(self, probe: TokenSequence) -> None:
        """Releases the pages and the entry of a probe."""
        self._release(probe)
        self._release_embeddings(probe)

    def _grow_running(self) -> None:
        page_size = self._pages.page_size
        for sequence in list(self._active):
            # Most often the last page has room.
            while sequence.length > len(sequence.cache.pages) * page_size and sequence.has_room:
                if self._pages.num_available:
                    # Decode steps run in the order of their launches, so this one runs after earlier writers.
                    sequence.cache.pages += self._pages.append(sequence.id, sequence.length)
                else:
                    self._preempt(self._shares().first_to_preempt())  # may be `sequence`, and then the loop ends

    def _needs_page(self, sequence: TokenSequence) -> bool:
        return sequence.length > len(sequence.cache.pages) * self._pages.page_size

    def _preempt(self, sequence: TokenSequence) -> None:
        assert not sequence.num_pending, "only a sequence whose tokens are known can be prefilled again"
        self._deactivate(sequence)
        if len(sequence.images) > 1:  # it starts with another image, or with others in its pages
            self._release_embeddings(sequence)
        self._preempted.append(sequence)
        self._wait_again(sequence)

    def _deactivate(self, sequence: TokenSequence) -> None:
        self._active.remove(sequence)
        num_left = self._num_active_of.pop(sequence.tenant) - 1
        if num_left:
            self._num_active_of[sequence.tenant] = num_left
        self._release(sequence)

    def _wait_again(self, sequence: TokenSequence) -> None:
        sequence.move_to(SequenceState.WAITING)
        self._waiting.push_returning(sequence, sequence.start_number)

    def _allocate(self, sequence: TokenSequence, match: PrefixMatch) -> None:
        cache, num_matched = sequence.cache, match.num_positions
        pages, cache.copies = self._pages.allocate(sequence.id, match, sequence.length)
        cache.pages = list(pages)
        cache.num_cached = cache.num_matched = num_matched
        images = sequence.images_behind(num_matched)
        if images:
            # Those without pixels first, since an entry to write may take the place of cached embeddings.
            for image in sorted(images[1:], key=_has_pixels):
                self._hold_embeddings(sequence, image)
            if images[0].entry is None:
                self._lease_entry(sequence, images[0])

    def _hold_embeddings(self, sequence: TokenSequence, image: SequenceImage) -> None:
        """Gives an image its cached embeddings, if there are any and their entry can be held."""
        if not sequence.request.computes_anew:
            image.entry = self._embeddings.hold(_lease_id(sequence, image), image.key)
            image.has_cached_embeddings = image.entry is not None

    def _lease_entry(self, sequence: TokenSequence, image: SequenceImage) -> None:
        """Gives an image the entry that its sequence writes, or its cached embeddings."""
        computes_anew, embeddings = sequence.request.computes_anew, self._embeddings
        waiting = None
        if not embeddings.num_leases_left:
            waiting = next(item for item in self._waiting if _has_entry(item))
        is_cached = not computes_anew and image.key in embeddings
        if waiting is not None and not is_cached:
            self._release_embeddings(waiting)
        lease = embeddings.lease(
            _lease_id(sequence, image),
            image.key,
            computes_anew=computes_anew,
            is_transient=sequence.request.is_transient,
        )
        image.entry, image.has_cached_embeddings = lease
        if waiting is not None and is_cached:  # now, since it may have taken the place of these embeddings
            self._release_embeddings(waiting)

    def _pass_entry_on(self, sequence: TokenSequence, image: SequenceImage) -> bool:
        """Gives an image the entry of the one before it. Returns False while a step has yet to read that entry."""
        if sequence.cache.writing:
            return False
        for other in sequence.images:
            if other.entry is not None and other.end > sequence.cache.num_cached:
                if not self._embeddings.is_held(_lease_id(sequence, other)):
                    return False
            elif other.entry is not None:
                self._embeddings.release(_lease_id(sequence, other))
                other.forget_embeddings()
        self._lease_entry(sequence, image)
        return True

    def _release_embeddings(self, sequence: TokenSequence) -> None:
        """Ends the sequence's leases of entries for embeddings, and of crops."""
        for image in sequence.images:
            if image.entry is not None or image.pixels is not None:  # else it was in cached pages
                self._embeddings.release(_lease_id(sequence, image))
                self._crops.release(_lease_id(sequence, image))
                image.forget_embeddings()

    def _release(self, sequence: TokenSequence) -> None:
        self._stop_filling(sequence)
        cache = sequence.cache
        if cache.last_decode is not None and cache.last_decode in self._in_flight:
            self._tail_steps.add(cache.last_decode)
        self._pages.release(sequence.id, cache.writing)
        cache.pages, cache.copies, cache.writing = [], (), set()
        cache.num_cached = cache.num_matched = 0

    def _forget_step(self, step: StepId) -> None:
        self._in_flight.remove(step)
        self._tail_steps.discard(step)
        self._pages.complete(step)

    def _admit(self) -> None:
        while (sequence := self._first_waiting()) is not None:
            is_full = len(self._active) >= self._max_batch_size
            if is_full and not self._has_others(sequence.tenant):
                return
            match = self._match(sequence, sequence.length - 1)
            if not is_full and self._park_for_prefix(sequence, match):
                continue
            start = self._possible_start(sequence, match)
            if start is None:
                return
            if start.yielding:
                if any(item.num_pending for item in start.yielding):
                    return
                if self._park_for_prefix(sequence, match):
                    continue
                if not self._lacks_pixels(sequence, start.match):  # else it is parked
                    for item in start.yielding:
                        self._preempt(item)
            self._start_or_park(sequence, start.match)

    def _first_waiting(self) -> TokenSequence | None:
        return self._waiting.first(self._now, lambda: self._shares().share_of)

    def _has_others(self, tenant: str) -> bool:
        """Returns True if a sequence of another tenant is active."""
        return len(self._num_active_of) > (tenant in self._num_active_of)

    def _some_yield(self) -> bool:
        """Returns True if sequences would yield in the next plan."""
        if self._waiting.has_one_tenant or not self._waiting:
            return False
        sequence = self._first_waiting()
        if sequence is None or not self._has_others(sequence.tenant):
            return False
        start = self._possible_start(sequence, self._match(sequence, sequence.length - 1))
        return start is not None and bool(start.yielding)

    def _shares(self) -> TenantShares:
        return TenantShares(
            self._active,
            max_rows=self._max_batch_size,
            num_pages=self._pages.num_pages,
            page_size=self._pages.page_size,
        )

    def _park_for_prefix(self, sequence: TokenSequence, match: PrefixMatch) -> bool:
        """Parks a waiting sequence if its image is being computed for another one. Returns True if it is parked."""
        share_point = sequence.missing_share_point(match.num_positions, self._pages.page_size)
        if (
            share_point is None
            or sequence.request.computes_anew
            or not self._shared_prefills.is_filled(share_point)
        ):
            return False
        self._waiting.start(sequence)
        self._release_embeddings(sequence)  # others may start meanwhile, and need entries
        sequence.move_to(SequenceState.PARKED)
        self._shared_prefills.park(share_point, sequence)
        return True

    def _possible_start(self, sequence: TokenSequence, match: PrefixMatch) -> _Start | None:
        """Returns how a waiting sequence can start now, with its cached pages or without, or None if it must
        wait."""
        start = self._start_with(sequence, match)
        if start is None and match.is_partial_last:
            # Copying a page takes one page more than computing everything again, and maybe no further page becomes
            # free.
            start = self._start_with(sequence, _NO_MATCH)
        return start

    def _start_with(self, sequence: TokenSequence, match: PrefixMatch) -> _Start | None:
        """Returns how a waiting sequence can start with these cached pages, or None.

        There must be pages for its next token, and a page in reserve for each active sequence; otherwise it would
        be preempted at once.
        """
        num_needed = self._pages.num_needed(match, sequence.length + 1)
        num_spare = self._pages.num_available - num_needed
        if len(self._active) < self._max_batch_size and len(self._active) <= num_spare:
            return _Start(match, [])
        if not self._has_others(sequence.tenant):
            return None
        dropped = self._pages.dropped_with(match)

        def suffice(yielding: list[TokenSequence]) -> bool:
            nonlocal num_spare
            if yielding:
                num_spare += self._pages.num_freed(yielding[-1].id, dropped)
            num_left = len(self._active) - len(yielding)
            return num_left < self._max_batch_size and num_left <= num_spare

        num_pages = self._pages.pages_for(sequence.length + 1) - match.num_positions // self._pages.page_size
        yielding = self._shares().yielding_to(sequence, num_pages, suffice, self._waiting.service_of)
        return None if yielding is None else _Start(match, yielding)

    def _start_or_park(self, sequence: TokenSequence, match: PrefixMatch) -> None:
        if self._lacks_pixels(sequence, match):
            self._waiting.start(sequence)
            self._release_embeddings(sequence)
            # A sequence that waits for the memory of its images holds none of it: others may wait for it, too.
            for image in sequence.images:
                image.pixels = None
            sequence.move_to(SequenceState.PARKED)
            self._without_pixels[sequence] = False
        else:
            self._start(sequence, match)

    def _lacks_pixels(self, sequence: TokenSequence, match: PrefixMatch) -> bool:
        """Returns True if the sequence cannot start with these cached pages before its images are decoded."""
        if sequence.decode_job is None:  # none was left out
            return False
        images, num_holds = sequence.images_behind(match.num_positions), self._embeddings.num_holds_left
        for place, image in enumerate(images):
            if image.pixels is not None or image.entry is not None:
                continue
            if image.key not in self._embeddings or (place and not num_holds):
                return True
            num_holds -= place > 0
        return False

    def _match(self, sequence: TokenSequence, max_positions: int) -> PrefixMatch:
        if sequence.cache.keys is None or sequence.request.computes_anew:
            return _NO_MATCH
        return self._pages.match(sequence.cache.keys, max_positions)

    def _start(self, sequence: TokenSequence, match: PrefixMatch) -> None:
        self._waiting.start(sequence)
        self._allocate(sequence, match)
        cache, num_matched = sequence.cache, match.num_positions
        if cache.num_cached_prompt is None:
            cache.num_cached_prompt = num_matched
            self.num_lookups += cache.keys is not None and not sequence.request.computes_anew
            self.num_hits += num_matched > 0
        share_point = sequence.missing_share_point(num_matched, self._pages.page_size)
        if share_point is not None:
            self._shared_prefills.begin(share_point, sequence)
        sequence.move_to(SequenceState.PREFILLING)
        sequence.num_tokens_at_start = len(sequence.tokens)
        if sequence.start_number is None:
            sequence.start_number = next(self._start_numbers)
        active, tenant = self._active, sequence.tenant
        if active and sequence.start_number < _start_number(active[-1]):  # it was preempted
            insort(active, sequence, key=_start_number)
        else:
            active.append(sequence)
        self._num_active_of[tenant] = self._num_active_of.get(tenant, 0) + 1

    def _publish(self, sequence: TokenSequence, num_positions: int, now: float) -> None:
        """Publishes the first `num_positions` positions of a sequence, which completed steps have written."""
        keys = sequence.cache.keys
        if keys is None:
            return
        keys.extend(sequence.tokens, num_positions, self._pages.page_size)
        request = sequence.request
        self._pages.publish(
            sequence.id,
            keys,
            num_positions,
            replaces=request.computes_anew,
            is_transient=request.is_transient,
            now=now,
        )
        filled = self._shared_prefills.key_of(sequence)
        share_point = sequence.missing_share_point(num_positions, self._pages.page_size)
        if filled != share_point:
            self._stop_filling(sequence)
            if share_point is not None:
                self._shared_prefills.begin(share_point, sequence)

    def _stop_filling(self, sequence: TokenSequence) -> None:
        for parked in self._shared_prefills.end(sequence):
            self._wait_again(parked)

    def _isolation_run(self, sequence: TokenSequence, is_decoding: bool) -> Plan:
        """Plans one sequence alone: its images and tokens in steps with one span each; if it was decoding, its last
        token in another."""
        end = sequence.length - is_decoding
        reads_embeddings = sequence.request.embeddings is not None
        if sequence.state is SequenceState.PREFILLING and sequence.cache.num_cached >= end and not reads_embeddings:
            sequence.move_to(SequenceState.RUNNING)
            return Plan(self._prefill_batch(), Batch.of_decode([sequence]))
        if sequence.state is not SequenceState.PREFILLING and sequence not in self._without_pixels:
            self._start_alone(sequence, is_decoding=is_decoding)
        if sequence in self._without_pixels:
            return Plan(self._prefill_batch(), Batch.of_decode())
        start = sequence.cache.num_cached
        item, ready_end = self._next_encoding(sequence, None, may_wait=True)
        if reads_embeddings:
            return Plan(self._prefill_batch([] if item is None else [item], read=[sequence]), Batch.of_decode())
        span_starts = [span_start for span_start, span_end in sequence.spans if span_end > start]
        end = min(end, ready_end, *span_starts[1:])
        encode, chunks = [] if item is None else [item], self._cut(sequence, start, end)
        return Plan(self._prefill_batch(encode, chunks), Batch.of_decode())

    def _plan_alone(self, sequence: TokenSequence) -> Plan | None:
        """Plans the next step of a sequence whose steps all run alone. Returns None while the sequence waits."""
        if sequence.state is SequenceState.WAITING:
            self._isolated.appendleft(_Isolated(sequence, is_decoding=False))
            self._is_isolating = True
            return self._isolation_run(*self._isolated[0])
        if sequence.state is SequenceState.PARKED:
            return None
        return Plan(self._prefill_batch(), Batch.of_decode([sequence] if sequence.has_room else []))

    def _start_alone(self, sequence: TokenSequence, *, is_decoding: bool) -> None:
        match = self._match(sequence, sequence.length - 1 - is_decoding)
        # All isolated sequences held pages together. If they shared more pages then than they find now, or if
        # others have started while they waited, other sequences wait again.
        while True:
            if self._pages.num_needed(match, sequence.length) <= self._pages.num_available:
                if len(self._active) < self._max_batch_size:
                    break
            elif not self._active:
                match = _NO_MATCH
                continue
            self._preempt(self._active[-1])
        self._start_or_park(sequence, match)

    def _prefill_batch(
        self,
        encode: Iterable[EncodeItem] = (),
        prefill: Iterable[Chunk] = (),
        read: Iterable[TokenSequence] = (),
    ) -> Batch:
        return self.behind_tail_steps(Batch.of_prefill(encode, prefill, read=read))

    def _plan_prefill(self, *, bounded: bool) -> tuple[list[EncodeItem], list[Chunk], list[TokenSequence]]:
        crops_left = self._max_crops_per_step
        tokens_left = self._max_prefill_tokens
        if len(self._num_active_of) > 1:
            self._several_until = self._now + _NEXT_REQUEST_S
            least_served = min(map(self._waiting.service_of, self._num_active_of))
        else:
            # A single active tenant counts as one of several if another tenant was active a moment ago.
            least_served = -1.0 if self._now < self._several_until else float("inf")
        others_left = self._max_prefill_tokens_of_others
        encode: list[EncodeItem] = []
        prefill: list[Chunk] = []
        read: list[TokenSequence] = []
        prefilling = [sequence for sequence in self._active if sequence.state is SequenceState.PREFILLING]
        if len({sequence.tenant for sequence in prefilling}) > 1:
            prefilling.sort(key=lambda sequence: self._waiting.service_of(sequence.tenant))
        chunks_left = self._max_chunks
        for sequence in prefilling:
            is_first = not (encode or prefill)
            item, ready_end = self._next_encoding(sequence, crops_left if bounded else None, may_wait=is_first)
            if item is not None:
                encode.append(item)
                crops_left -= len(item.crops)
            if sequence.request.embeddings is not None:
                (image,) = sequence.images
                is_ready = item.is_last if item is not None else not image.needs_encoding
                if is_ready and len(read) < _MAX_READ:
                    read.append(sequence)
                if not bounded and crops_left <= 0:
                    break
                continue
            is_other = self._waiting.service_of(sequence.tenant) > least_served
            num_allowed = min(tokens_left, others_left) if is_other else tokens_left
            chunks = self._next_chunks(sequence, num_allowed, ready_end, may_exceed_limit=not prefill)[:chunks_left]
            prefill += chunks
            chunks_left -= len(chunks)
            num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            tokens_left -= num_tokens
            others_left = max(0, others_left - num_tokens * is_other)
            if tokens_left <= 0 or not chunks_left or (not bounded and crops_left <= 0):
                break
        return encode, prefill, read

    def _next_encoding(
        self, sequence: TokenSequence, max_crops: int | None, *, may_wait: bool
    ) -> tuple[EncodeItem | None, int]:
        """Returns the crops that a sequence encodes in the next step, of one image and at most `max_crops`, and the
        end of the positions that the step can then compute. None stands for no item, and for no limit.

        Without `may_wait` an image whose digests are awaited, and are not there, is left to a later step.
        """
        item: EncodeItem | None = None
        for image, (start, end) in zip(sequence.images, sequence.spans, strict=True):
            if end <= sequence.cache.num_cached or (image.entry is not None and not image.needs_encoding):
                continue
            if item is not None or (image.entry is None and not self._pass_entry_on(sequence, image)):
                return item, start
            if image.needs_encoding:
                item = self._encode_crops(sequence, image, max_crops, may_wait=may_wait)
                if item is None or not item.is_last:
                    return item, start
        return item, sequence.length

    def _encode_crops(
        self, sequence: TokenSequence, image: SequenceImage, max_crops: int | None, *, may_wait: bool
    ) -> EncodeItem | None:
        """Finds crops of an image in the pool, and plans to encode at most `max_crops` of the others. Returns None
        if the image is not complete and no crop may be encoded, or if its digests are awaited."""
        scope, computes_anew = image.crop_scope, sequence.request.computes_anew
        digests: Sequence[bytes] | None = ()
        if scope is not None and image.pixels is not None:
            awaits = self._crops.has_recent_hits(scope.namespace, self._now)
            digests = image.pixels.crop_digests(waits=awaits and may_wait)
            if digests is None and awaits:  # neither are its crops made yet; the step goes ahead without it
                return None
        crops: list[int] = []
        places: list[PlaceId | None] = []
        late: Callable[[], Sequence[bytes] | None] | None = None
        num_left = 0
        for crop in image.crops_left():
            key: CropKey | LateKey | None = None
            if scope is not None and digests:
                key = CropKey(scope.namespace, digests[crop])
                found = None if computes_anew else self._crops.find(_lease_id(sequence, image), key, self._now)
                if found is not None:
                    image.found_crops[crop] = found
                    continue
            elif scope is not None and digests is None and image.pixels is not None:
                late = late or partial(image.pixels.crop_digests, waits=True)
                key = LateKey(scope.namespace, late, crop)
            if max_crops is not None and len(crops) >= max_crops:
                num_left += 1
                continue
            crops.append(crop)
            if key is not None:
                places.append(self._crops.reserve(key, self._now, replaces=computes_anew))
        if num_left and not crops:
            return None
        is_last = not num_left
        found = tuple(image.found_crops.items()) if is_last else ()
        is_first = not image.encoded_crops
        return EncodeItem(sequence, image, tuple(crops), tuple(places), found, is_first, is_last)

    def _next_chunks(
        self, sequence: TokenSequence, tokens_left: int, ready_end: int, *, may_exceed_limit: bool
    ) -> list[Chunk]:
        """Returns the next positions of a sequence, up to `ready_end`. They end outside of every span."""
        start = sequence.cache.num_cached
        end = min(ready_end, start + tokens_left)
        for span_start, span_end in sequence.spans:
            # A chunk that begins with a span, and is the first of a step, may exceed the limit, alone.
            if span_start == start and end < span_end <= ready_end:
                end = span_end if may_exceed_limit else start
            elif span_start < end < span_end:
                end = span_start
        return self._cut(sequence, start, end) if end > start else []

    def _cut(self, sequence: TokenSequence, start: int, end: int) -> list[Chunk]:
        """Returns positions [start, end) in chunks that end at share points."""
        if start >= end:
            return []
        points = sequence.share_points if self._cuts_at_share_points else ()
        if not points or points[-1] <= start:  # most often, as behind a cached image
            return [Chunk.of(sequence, start, end)]
        cuts = [start, *[point for point in points if start < point < end], end]
        return [Chunk.of(sequence, *ends) for ends in itertools.pairwise(cuts)]


class SharedPrefills:
    """Tracks which sequence computes (fills) which prefix, and which sequences are parked until the prefix is
    published or its filler leaves.

    A sequence fills one key at most, and is parked under one key at most.
    """

    def __init__(self) -> None:
        self._key_of: dict[TokenSequence, Digest] = {}  # of the fillers
        self._parked: dict[Digest, list[TokenSequence]] = {}  # in the order of parking; a key for each filler

    def __len__(self) -> int:
        return sum(map(len, self._parked.values())) if self._parked else 0

    def __iter__(self) -> Iterator[TokenSequence]:
        for sequences in self._parked.values():
            yield from sequences

    def is_filled(self, key: Digest) -> bool:
        """Returns True if a sequence computes the prefix of the key."""
        return key in self._parked

    def key_of(self, filler: TokenSequence) -> Digest | None:
        """Returns the key of the prefix that the sequence computes for others, too."""
        return self._key_of.get(filler)

    def begin(self, key: Digest, filler: TokenSequence) -> None:
        """Records that the sequence computes the prefix of the key. Has no effect if another one does."""
        if key not in self._parked:
            self._key_of[filler] = key
            self._parked[key] = []

    def park(self, key: Digest, sequence: TokenSequence) -> None:
        """Parks a sequence until the filler of the key has published it."""
        self._parked[key].append(sequence)

    def end(self, filler: TokenSequence) -> list[TokenSequence]:
        """Ends the filling by a sequence that has published its prefix, or leaves. Returns the sequences that
        waited for it."""
        key = self._key_of.pop(filler, None)
        return [] if key is None else self._parked.pop(key)

    def remove(self, sequence: TokenSequence) -> None:
        """Removes a parked sequence, which leaves."""
        for sequences in self._parked.values():
            if sequence in sequences:
                sequences.remove(sequence)
                return


def _lease_id(sequence: TokenSequence, image: SequenceImage) -> LeaseId:
    return sequence.id, image.start


def _has_entry(sequence: TokenSequence) -> bool:
    return any(image.entry is not None for image in sequence.images)


def _has_pixels(image: SequenceImage) -> bool:
    return image.pixels is not None


def _start_number(sequence: TokenSequence) -> int:
    assert sequence.start_number is not None, "only sequences that have started are compared"
    return sequence.start_number
