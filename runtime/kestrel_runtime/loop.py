"""The engine's thread: one turn after the other, the same order every time.

A request's life in it:
  1. `add` puts a prepared sequence and its stream into the inbox; `cancel` puts a farewell there.
  2. A turn empties the inbox, then drops whom nobody waits for any more (cancelled, past a deadline).
  3. `Scheduler.next_batch` chooses who runs and takes pages.
  4. `ModelRunner.launch` has the device encode crops, fill the cache and draw tokens; `Scheduler.commit` counts
     that as done. Where it raises, `Recovery` finds out who must end, and the next turns try them one by one.
  5. `Scheduler.land` takes the tokens of steps that are over; each sequence's reader turns them into events.
  6. Who has finished gives its pages back; the outbox posts all events of the turn at once.

     inbox ─▶ drop ─▶ choose ─▶ launch ─▶ land what came before ─▶ read ─▶ post
       ▲                                                                    │
       └──────────────── waits here while there is no work ◀────────────────┘

A turn launches up to two steps: one of images and prompts, one of decoding. They run beside each other, so a long
prompt holds nobody's next token up; whoever's prompt is in decodes with the others from the next turn on. A device
that works by itself has its next steps before it is through with those under way: it never waits for readers.

     prompts  │      step 1      ││      step 3      ││      step 7      │
     decoding                     │ 2 ││ 4 ││ 5 ││ 6 │ …
     thread   │launch 1│launch 2,3│land 1│launch 4, land 2│launch 5, land 4│ …

While somebody decodes, prompts are waited for by looking whether they are over; while nobody does, the next step of
decoding is launched behind them at once. Launching prompts takes the thread longer than the device takes to decode,
so that before it some more steps of decoding are launched ahead.

What a sequence has drawn after its end, which a step under way could not know, is dropped. Its pages may have a
new owner by then: what steps of decoding write there comes before all that later ones and later prompts do, and
pages that prompts write to are kept until those have landed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kestrel_runtime.admission import Admission
from kestrel_runtime.culprits import Culprits
from kestrel_runtime.deadlines import Deadlines
from kestrel_runtime.emission import events_after
from kestrel_runtime.errors import EngineUnavailable, InternalError, KestrelError
from kestrel_runtime.in_flight import InFlightStep, StepId
from kestrel_runtime.recovery import Recovery
from kestrel_runtime.runner import Launch, ModelRunner
from kestrel_runtime.scheduler import Scheduler
from kestrel_runtime.sequence import Batch, Sequence
from kestrel_runtime.stream import Outbox, Stream
from kestrel_runtime.token_rate import TokenRate

_MOST_STEPS_OF_PROMPTS = 2
"""Under way at once: one that runs, and one that begins when it ends."""
_STEPS_AHEAD, _STEPS_AHEAD_OF_PROMPTS = 1, 4
"""Of decoding, behind the one that runs."""

_log = logging.getLogger(__name__)


class _Arrival(NamedTuple):
    sequence: Sequence
    stream: Stream


class EngineLoop:
    """Owns scheduler and runner; everything they hold is touched by its thread alone.

    Tells `admission` by stream who starts or leaves, and `culprits` who must not come again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        recovery: Recovery,
        admission: Admission,
        culprits: Culprits,
        *,
        on_death: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._recovery = recovery
        self._admission = admission
        self._culprits = culprits
        self._on_death = on_death
        self._outbox = Outbox()
        self._deadlines = Deadlines()
        self._streams: dict[Sequence, Stream] = {}
        self._sequences: dict[Stream, Sequence] = {}
        self._inbox: deque[_Arrival | Stream] = deque()  # a bare stream is one that was cancelled
        self._work = threading.Condition()
        self._is_closing = False
        self._is_over = False
        self._step_ids = itertools.count(1)
        self._prompts: deque[InFlightStep] = deque()
        self._decoding: deque[InFlightStep] = deque()
        self._followed: InFlightStep | None = None  # the prefill step in flight that decode steps depend on
        self._rate = TokenRate()
        self._thread = threading.Thread(target=self._run, name="kestrel-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, sequence: Sequence, stream: Stream) -> None:
        """From any thread: queue a prepared sequence."""
        self._send(_Arrival(sequence, stream))

    def cancel(self, stream: Stream) -> None:
        """From any thread: drop the stream's sequence before the next step, if it is here."""
        self._send(stream)

    @property
    def num_waiting(self) -> int:
        """Sequences without pages, those in the inbox included; a reading, not a promise."""
        return self._scheduler.num_waiting + len(self._inbox)

    @property
    def num_active(self) -> int:
        """Sequences that hold pages; a reading, not a promise."""
        return self._scheduler.num_active

    def tokens_per_second(self) -> float:
        """Tokens drawn over the last seconds, per second."""
        return self._rate.per_second(time.monotonic())

    def close(self) -> None:
        """Stop after the current step; what is left fails with `EngineUnavailable`."""
        with self._work:
            self._is_closing = True
            self._work.notify()
        self._thread.join()

    def step(self) -> None:
        """One turn of the ring."""
        self._take_inbox()
        now = time.monotonic()
        self._drop_unwanted(now)
        self._land_prompts_that_are_over()
        follows = self._follow_prompts()
        if not self._scheduler.can_look_ahead:  # asked when it is known who decodes
            self._land_all()
        # Those whose pages prompts may have from now on were in this one, at the latest.
        last = self._decoding[-1].handle if self._decoding else None
        batch = self._scheduler.next_batch(now, takes_prompts=len(self._prompts) < _MOST_STEPS_OF_PROMPTS)
        if self._decode(batch, now):
            self._launch(batch.prompting, self._prompts, last)
        if not self._runner.is_asynchronous:
            self._land_all()
        if last is not None and self._decoding:
            self._land(self._decoding)
        if self._prompts and (follows or (last is None and batch.is_empty)):
            self._land(self._prompts)
        self._outbox.post()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except Exception:
            # What the model raises is sorted out by `Recovery`. The rest is a broken device, or a bug of ours in
            # the books of who owns what, which cannot be trusted any more.
            _log.exception("the engine stopped")
            self._on_death()
        with self._work:
            self._is_over = True
        self._fail_all()

    def _wait_for_work(self) -> bool:
        with self._work:
            while self._is_idle and not self._is_closing:
                self._work.wait()
            return not self._is_closing

    @property
    def _is_idle(self) -> bool:
        return self._scheduler.is_idle and not (self._prompts or self._decoding or self._inbox)

    def _send(self, item: _Arrival | Stream) -> None:
        with self._work:
            if not self._is_over:
                self._inbox.append(item)
                self._work.notify()
                return
        if isinstance(item, _Arrival):
            self._admission.leave(item.stream)
            item.stream.fail(EngineUnavailable("the engine has stopped"))

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Stream):
                if item in self._sequences:
                    self._remove(self._sequences[item])
            elif item.stream.is_cancelled:
                self._admission.leave(item.stream)
            else:
                self._streams[item.sequence] = item.stream
                self._sequences[item.stream] = item.sequence
                self._deadlines.watch(item.sequence)
                self._scheduler.add(item.sequence)

    def _drop_unwanted(self, now: float) -> None:
        for sequence in self._deadlines.due(now):
            lateness = sequence.clock.lateness(now)
            if lateness is not None:
                self._fail(sequence, lateness)

    def _note_admissions(self, batch: Batch) -> None:
        now = time.monotonic()
        for item in (*batch.encode, *batch.prefill):
            if item.sequence.clock.admitted is None:
                item.sequence.clock.admitted = now
                self._admission.start(self._streams[item.sequence], now)

    def _follow_prompts(self) -> bool:
        """Where nobody decodes, have those do it whose prompts are the next to be in. Returns whether it did."""
        if not self._prompts or not self._prompts[0].sampled or self._scheduler.is_decoding:
            return False
        self._followed = self._prompts[0]
        self._scheduler.follow(self._followed.sampled)
        return True

    def _decode(self, batch: Batch, now: float) -> bool:
        """Begin steps of decoding, the batch's first, until enough are under way. False where one raised."""
        num_ahead = 0
        if self._runner.is_asynchronous:
            num_ahead = _STEPS_AHEAD if batch.prompting.is_empty else _STEPS_AHEAD_OF_PROMPTS
        prefill = self._followed
        while batch.decode and len(self._decoding) <= num_ahead:
            if not self._launch(batch.decoding, self._decoding, None if prefill is None else prefill.handle):
                return False
            if len(self._decoding) > num_ahead or not self._scheduler.can_look_ahead:
                break
            batch = self._scheduler.next_batch(now, takes_prompts=False)
        return True

    def _launch(self, batch: Batch, steps: deque[InFlightStep], after: Launch | None) -> bool:
        """Begin a step, if there is one. False where that raised, and the next turns are to find out why."""
        if batch.is_empty:
            return True
        self._note_admissions(batch)
        try:
            handle = self._runner.launch(batch, after)
        except Exception as error:
            if self._land_all():
                self._recover(batch, error)
            return False
        depends_on = self._followed.id if batch.decode and self._followed is not None else None
        sampled = self._scheduler.commit(batch)
        steps.append(InFlightStep(StepId(next(self._step_ids)), batch, sampled, handle, depends_on))
        return True

    def _land_prompts_that_are_over(self) -> None:
        while self._prompts and self._prompts[0].handle.is_over:
            self._land(self._prompts)

    def _land_all(self) -> bool:
        """False where a step failed, and all went back."""
        is_well = True
        while is_well and (self._prompts or self._decoding):
            is_well = self._land(self._decoding or self._prompts)
        return is_well

    def _land(self, steps: deque[InFlightStep]) -> bool:
        """Wait for the first of the steps and tell what it has drawn. False where it failed, and all went back."""
        while any(prefill.id == steps[0].depends_on for prefill in self._prompts):
            if not self._land(self._prompts):
                return False
        step = steps.popleft()
        try:
            drawn = step.handle.land()
        except Exception as error:
            self._abandon_flights()
            self._recover(step.batch, error)
            return False
        if step is self._followed:
            self._followed = None
        self._recovery.succeeded()
        now = time.monotonic()
        here = self._scheduler.land(step.batch, step.sampled, drawn)
        self._rate.add(now, len(here))
        for sequence in here:
            self._tell(sequence, now)
        return True

    def _abandon_flights(self) -> None:
        """Let what else is under way come to its end, untold."""
        for step in (*self._prompts, *self._decoding):
            with contextlib.suppress(Exception):
                step.handle.land()
        self._prompts.clear()
        self._decoding.clear()
        self._followed = None

    def _recover(self, batch: Batch, error: Exception) -> None:
        culprit = self._recovery.failed(batch, error)
        if culprit is not None:
            _log.error("%s fails by itself: it ends, and is refused from now on", culprit.fingerprint)
            self._culprits.remember(culprit.fingerprint)
            self._fail(culprit, InternalError(error))

    def _tell(self, sequence: Sequence, now: float) -> None:
        try:
            events = events_after(sequence, now)
        except Exception as error:  # a reader's bug, met by what the model happened to say
            _log.exception("the reader of %s failed", sequence.fingerprint)
            self._fail(sequence, InternalError(error))
            return
        if events:
            self._outbox.put(self._streams[sequence], events)
        if sequence.reader.finish_reason is not None:
            self._remove(sequence)

    def _fail(self, sequence: Sequence, error: KestrelError) -> None:
        self._streams[sequence].fail(error)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._runner.release(sequence)
        self._deadlines.forget(sequence)
        stream = self._streams.pop(sequence)
        del self._sequences[stream]
        self._admission.leave(stream)

    def _fail_all(self) -> None:
        self._take_inbox()
        for sequence in list(self._scheduler.sequences()):
            self._fail(sequence, EngineUnavailable("the engine has stopped"))
