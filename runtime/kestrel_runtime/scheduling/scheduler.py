"""Who runs in the next step, and who owns which page. Pure decisions: no torch, no threads, no clock.

Invariants
  I1  Only PREFILLING, PREFILLED and RUNNING sequences hold pages; a sequence that leaves those states gives all of
      them back, at once or, where steps under way still write its prompt to them, when those have landed.
  I2  Every RUNNING sequence with room for a token is in every decode batch, so nobody's next token waits for more
      than one step.
  I3  While somebody is decoding, a step carries at most `max_prefill_tokens` prompt tokens (or one image prefix,
      which cannot be split) and `max_crops_per_step` crops.
  I4  A page is taken when a token needs it. Where none is left the youngest sequence goes back to waiting, keeps
      its tokens, and is prefilled again; so the oldest always advances.
  I5  Sequences start in the order of `WaitingQueue`: who was sent back, then by priority, tenant and age. Nobody
      passes the one it names, not even where there is room for a smaller one.
  I6  After a failed step each sequence that was active does what it did once more, alone, and draws a token;
      before they all have, nobody else runs.
  I7  Steps may be chosen while the tokens of those before are being drawn, except where that takes their values:
      nobody is sent back, and no failed step is sorted out, while a token is pending.
  I8  Who is PREFILLED decodes when the end of its prompt has landed, or earlier where `follow` says that the steps
      to come wait for it: so those who decode need not wait for the prompts of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.scheduling.page_pool import PagePool
from kestrel_runtime.scheduling.sequence import Batch, Chunk, CropRange, Sequence, SequenceState
from kestrel_runtime.scheduling.waiting_queue import WaitingQueue


class _Suspect(NamedTuple):
    """Was active when a step failed; `is_decoding` tells what it did."""

    sequence: Sequence
    is_decoding: bool


class Scheduler:
    """Waiting and active sequences.

    `next_batch` chooses a step, `commit` counts it as done, `land` takes the tokens that it drew.
    """

    def __init__(
        self,
        pages: PagePool,
        *,
        max_batch_size: int,
        max_prefill_tokens: int,
        max_crops_per_step: int,
        ageing_s: float = 10.0,
    ) -> None:
        self._pages = pages
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_crops_per_step = max_crops_per_step
        self._waiting = WaitingQueue(ageing_s=ageing_s)
        self._active: list[Sequence] = []  # PREFILLING, PREFILLED and RUNNING, oldest first
        self._leaving: list[Sequence] = []  # FINISHED, with pages that steps under way write to
        self._suspects: deque[_Suspect] = deque()  # the first is on trial

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._active

    @property
    def is_trying(self) -> bool:
        """Whether the batch chosen last, or next, is a trial of one sequence alone."""
        return bool(self._suspects)

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next batch can be chosen while tokens are pending."""
        if self._suspects:
            return False
        if len(self._active) <= self._pages.num_free:  # a step needs at most a page for each
            return True
        needed = sum(self._needs_page(sequence) for sequence in self._active if self._has_room(sequence))
        return needed <= self._pages.num_free

    @property
    def is_decoding(self) -> bool:
        """Whether anybody decodes in the next step."""
        return any(self._has_room(sequence) for sequence in self._active)

    def pages_for(self, sequence: Sequence) -> int:
        """How many pages the sequence needs for the tokens it has."""
        return self._pages.pages_for(sequence.length)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence in the scheduler, active ones first."""
        yield from self._active
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Have a prepared sequence wait for its start."""
        assert sequence.state is SequenceState.WAITING
        assert sequence.num_prompt_positions < sequence.max_context, "checked when the request was prepared"
        self._waiting.push(sequence)

    def next_batch(self, now: float, *, takes_prompts: bool = True) -> Batch:
        """Choose what comes next and take the pages it needs; `now` is a moment of the clocks' time.

        Without `takes_prompts` that is decoding alone.
        """
        if self._suspects:
            return self._trial(*self._suspects[0])
        self._grow_running()
        running = [sequence for sequence in self._active if self._has_room(sequence)]
        if not takes_prompts:
            return Batch([], [], running)
        self._admit(now)
        encode, prefill = self._plan_prefill(bounded=bool(running))
        return Batch(encode, prefill, running)

    def commit(self, batch: Batch) -> list[Sequence]:
        """Count a batch as done. Returns the sequences that draw a token in it, which is pending from now on."""
        due = batch.due  # before tokens are pending: they move the end of their sequences
        for crop_range in batch.encode:
            crop_range.sequence.num_encoded_crops = crop_range.end
        for chunk in batch.prefill:
            chunk.sequence.num_cached = chunk.end
            chunk.sequence.num_chunks_under_way += 1
            if chunk.is_last:
                chunk.sequence.move_to(SequenceState.PREFILLED)
        for sequence in batch.decode:
            sequence.num_cached += 1
        for sequence in due:
            sequence.num_pending += 1
        return due

    def follow(self, drew: list[Sequence]) -> None:
        """From now on those who draw a token in a batch of prompts, as `commit` named them, decode, in steps that
        wait for it. Who has a part of its prompt there, and not the end, draws none.
        """
        for sequence in drew:
            if sequence.state is SequenceState.PREFILLED:
                sequence.move_to(SequenceState.RUNNING)

    def land(self, batch: Batch, drew: list[Sequence], drawn: dict[int, Token]) -> list[Sequence]:
        """A committed batch is over: take the tokens that it drew, by sequence id, for those that `commit` named.

        Returns those of `drew` that are still here, each with its new token as the last.
        """
        self.follow(drew)
        for chunk in batch.prefill:
            chunk.sequence.num_chunks_under_way -= 1
        self._release_leaving()
        here = [sequence for sequence in drew if sequence.state is not SequenceState.FINISHED]
        for sequence in here:
            sequence.num_pending -= 1
            sequence.tokens.append(drawn[sequence.id])
            self._waiting.serve(sequence)
        if self._suspects and self._suspects[0].sequence in here:
            self._suspects.popleft()
        return here

    def put_all_back(self) -> None:
        """A batch failed, and none is under way: all go back to waiting, without features of their images.

        Whoever was active is a suspect from now on, those who have passed a trial too: so their order stays. But a
        suspect whose trial failed comes first, so that in its next trial no other sequence is active.
        """
        known = {suspect.sequence: suspect for suspect in self._suspects}
        failed = self._suspects[0].sequence if self._suspects else None
        active = [known.pop(item, _Suspect(item, item.state is SequenceState.RUNNING)) for item in self._active]
        suspects = (*active, *known.values())
        self._suspects = deque(sorted(suspects, key=lambda suspect: suspect.sequence is not failed))
        for sequence in (*self._active, *self._leaving):
            sequence.num_pending = sequence.num_chunks_under_way = 0
        self._release_leaving()
        while self._active:
            self._active[-1].rewind_random()
            self._preempt(self._active[-1])
        for sequence in self._waiting:
            sequence.num_encoded_crops = 0

    def remove(self, sequence: Sequence) -> None:
        """Take a finished, cancelled or failed sequence out and give its pages back, as I1 says."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._active.remove(sequence)
        sequence.move_to(SequenceState.FINISHED)
        self._leaving.append(sequence)
        self._release_leaving()
        self._suspects = deque(suspect for suspect in self._suspects if suspect.sequence is not sequence)

    def _grow_running(self) -> None:
        for sequence in list(self._active):
            while self._needs_page(sequence) and self._has_room(sequence):
                if self._pages.num_free:
                    sequence.pages += self._pages.allocate(1)
                else:
                    self._preempt(self._active[-1])  # may be `sequence` itself, and then the loop ends

    @staticmethod
    def _has_room(sequence: Sequence) -> bool:
        """Whether the sequence decodes, and its context has room beyond what is known and pending."""
        return sequence.state is SequenceState.RUNNING and sequence.length < sequence.max_context

    def _needs_page(self, sequence: Sequence) -> bool:
        return self._pages.pages_for(sequence.length) > len(sequence.pages)

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_pending, "only a sequence whose tokens are known can be prefilled again"
        self._active.remove(sequence)
        self._release(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._waiting.put_back(sequence)

    def _release_leaving(self) -> None:
        for sequence in self._leaving:
            if not sequence.num_chunks_under_way:
                self._release(sequence)
        self._leaving = [sequence for sequence in self._leaving if sequence.num_chunks_under_way]

    def _release(self, sequence: Sequence) -> None:
        self._pages.free(sequence.pages)
        sequence.pages = []
        sequence.num_cached = 0

    def _admit(self, now: float) -> None:
        while len(self._active) < self._max_batch_size and (sequence := self._waiting.first(now)) is not None:
            # Room for its next token, and a page in reserve for each active sequence, keep a newcomer from being
            # sent back at once.
            if self._pages.pages_for(sequence.length + 1) + len(self._active) > self._pages.num_free:
                return
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        self._waiting.start(sequence)
        sequence.pages = self._pages.allocate(self.pages_for(sequence))
        sequence.move_to(SequenceState.PREFILLING)
        self._active.append(sequence)

    def _trial(self, sequence: Sequence, is_decoding: bool) -> Batch:
        """One sequence alone: its image and tokens in a step; where it was decoding, its last token in another."""
        if sequence.state is SequenceState.PREFILLING:
            sequence.move_to(SequenceState.RUNNING)
            return Batch([], [], [sequence])
        self._start(sequence)  # all suspects held pages together, so there are enough
        encode = [sequence.whole_image] if sequence.num_crops_to_encode else []
        return Batch(encode, [Chunk(sequence, 0, sequence.length - is_decoding)], [])

    def _plan_prefill(self, *, bounded: bool) -> tuple[list[CropRange], list[Chunk]]:
        crops_left = self._max_crops_per_step
        tokens_left = self._max_prefill_tokens
        encode: list[CropRange] = []
        prefill: list[Chunk] = []
        for sequence in self._active:
            if sequence.state is not SequenceState.PREFILLING:
                continue
            missing_crops = sequence.num_crops_to_encode
            if missing_crops:
                count = min(missing_crops, crops_left) if bounded else missing_crops
                if count:
                    start = sequence.num_encoded_crops
                    encode.append(CropRange(sequence, start, start + count))
                    crops_left -= count
                if count < missing_crops:
                    continue
            chunk = self._next_chunk(sequence, tokens_left, may_overshoot=not prefill)
            if chunk is not None:
                prefill.append(chunk)
                tokens_left -= chunk.end - chunk.start
            if tokens_left <= 0 or (not bounded and crops_left <= 0):
                break
        return encode, prefill

    @staticmethod
    def _next_chunk(sequence: Sequence, tokens_left: int, *, may_overshoot: bool) -> Chunk | None:
        start = sequence.num_cached
        end = min(sequence.length, start + tokens_left)
        if end < sequence.prefix_length:  # the prefix goes in whole, so it may exceed the bound, alone
            if not may_overshoot:
                return None
            end = sequence.prefix_length
        return Chunk(sequence, start, end) if end > start else None
