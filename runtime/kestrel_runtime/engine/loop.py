"""Runs the engine thread: one turn after the other, in the same order every time.

The life of a request in the thread:
  1. `add` puts a prepared sequence and its stream into the inbox; `cancel` puts a cancelled stream there.
  2. A turn takes the inbox, then drops sequences whose callers no longer wait (cancelled, past a deadline).
  3. `Scheduler.schedule` plans up to two steps, a prefill step (images and prompts) and a decode step, and
     allocates their pages.
  4. `StepRunner.launch` has the device encode crops, write the cache and sample tokens; `Scheduler.commit` records
     the step. If a launch raises, `Isolation` finds the poison request: the next turns run one sequence each.
  5. `Scheduler.complete` takes the tokens of complete steps; each sequence's parser turns them into events.
  6. A finished sequence returns its pages; the outbox posts all events of the turn at once.

     inbox ─▶ drop ─▶ schedule ─▶ launch ─▶ complete earlier steps ─▶ emit ─▶ post
       ▲                                                                       │
       └────────────────── waits here while there is no work ◀─────────────────┘

Prefill steps and decode steps run at the same time, so a long prompt delays no other sequence. A sequence whose
prompt is complete decodes with the others from the next turn on. An asynchronous device gets its next steps before
it has completed those in flight, so it never waits for output parsers.

     prefill  │      step 1      ││      step 3      ││      step 7      │
     decode                       │ 2 ││ 4 ││ 5 ││ 6 │ …
     thread   │launch 1│launch 2,3│complete 1│launch 4, complete 2│launch 5, complete 4│ …

The thread waits for decode steps, which are short, and only checks if prefill steps are complete. If nothing else
is left to do, `StepWaiter` waits for the first of these, and the thread for its end or for a request, which may
begin meanwhile. While no sequence decodes, the thread promotes the sequences of the first prefill step in flight:
they decode at once, in steps that depend on that step. Launching a prefill step takes the thread longer than a
decode step takes the device, so more decode steps are launched before it.

A step in flight that contains a sequence which has finished meanwhile is a tail step; its token is dropped. The
pages and the row of request state may have a new owner by then. Later decode steps run after the tail step anyway.
A prefill step that takes them over waits for it on the device (`Batch.after`). Pages that a prefill step in flight
writes have no new owner before it is complete.

The thread ends after `stop`, or after an error that `Isolation` does not handle, which it only logs. The watchdog,
which waits for the thread's end, calls `finish` and has the engine end every open stream.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from kestrel_runtime.api.engine import ClearedCache
from kestrel_runtime.api.errors import (
    ConstraintFailed,
    EngineUnavailable,
    InternalError,
    KestrelError,
    NumbersOverflowed,
)
from kestrel_runtime.api.events import Event, Finished, Started, Timing, Usage
from kestrel_runtime.api.stream import Outbox, Stream
from kestrel_runtime.constraints.masks import MaskRequest, step_masks
from kestrel_runtime.engine.due_deadlines import Deadlines
from kestrel_runtime.engine.isolation import Isolation
from kestrel_runtime.engine.open_streams import CacheClearings
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.engine.step_waiter import StepWaiter
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.fairness.queue_admission import QueueAdmission
from kestrel_runtime.output.embedding import EmbeddingParser, ImageEmbeddings
from kestrel_runtime.output.output_parser import OVERFLOWED
from kestrel_runtime.scheduling.batch import Batch, Plan
from kestrel_runtime.scheduling.page_manager import StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import AdapterLease, PreparedImage, TokenSequence

_MAX_PREFILLS = 2
"""The most prefill steps in flight: one that runs, and one that begins when it ends."""
_NUM_TOGETHER, _NUM_MANY = 4, 16
"""So many waiting requests begin at once, and so do all where so many others run. Fewer wait for the end of a step
with images: together they cost less, and the answers to that step's prompts have the device for themselves."""
_MAX_DECODES, _MAX_DECODES_BEFORE_PREFILL = 2, 5
"""The most decode steps in flight, the running one included; the second if a prefill step follows at once."""
_RATE_INTERVAL_S, _RATE_INTERVALS = 0.1, 50
_RATE_WINDOW_S = _RATE_INTERVALS * _RATE_INTERVAL_S
_BLOCKED_S = 0.05
"""The longest wait for an image that is being decoded, in seconds, before the thread looks at deadlines."""
_QUIET_S = 0.2
"""The idle time, in seconds, after which graphs are captured that the start has left or that were missed."""
_STARTING_S = 2.0
"""The time, in seconds, after its start in which the thread captures nothing: the port opens meanwhile, and the
first requests arrive at once."""

_fingerprint_of = attrgetter("request.fingerprint")
_log = logging.getLogger(__name__)


class _Arrival(NamedTuple):
    sequence: TokenSequence
    stream: Stream


class _DecodedImage(NamedTuple):
    sequence: TokenSequence
    pixels: Future[list[PreparedImage]]


class _AdapterLoaded(NamedTuple):
    sequence: TokenSequence
    lease: Future[AdapterLease]


class _PrefillOver(NamedTuple):
    step: StepId


_Arriving = _Arrival | _DecodedImage | _AdapterLoaded | _PrefillOver | Stream | None
"""An item of the inbox: a bare stream was cancelled; None only wakes the thread."""


class InFlightStep(NamedTuple):
    """A step that was launched and is not complete.

    Its batch names the steps that it depends on by id: a reference would keep such a step, its sequences and their
    images alive, and through it all earlier steps.
    """

    id: StepId
    batch: Batch
    handle: StepHandle
    fingerprints: frozenset[str] = frozenset()
    """The fingerprints of its sequences."""

    def __str__(self) -> str:
        return f"step {self.id}, a {describe(self.batch)}"


class EngineLoop:
    """Owns scheduler and runner; only its thread touches what they hold.

    Reports to `admission` by stream who starts or leaves.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        isolation: Isolation,
        admission: QueueAdmission,
        decode_again: Callable[[TokenSequence], Future[Any]] | None = None,
        make_masks: Callable[[list[MaskRequest]], list[Any]] | None = None,
        lease_adapter: Callable[[str, str], Future[AdapterLease]] | None = None,
        poison_requests: PoisonRequests | None = None,
        record: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """Connect the loop with the parts that it calls.

        `decode_again` has a worker decode the image of a sequence whose pages were cached and are evicted.
        `make_masks` computes the masks of sequences with constraints. `lease_adapter` has the adapter of a name
        loaded for a tenant. Isolated `poison_requests` run alone. `record` gets the fingerprints of the requests in
        flight, before each launch.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._isolation = isolation
        self._admission = admission
        self._decode_again = decode_again
        self._make_masks = make_masks
        self._outbox = Outbox()
        self._deadlines = Deadlines()
        self._streams: dict[TokenSequence, Stream] = {}
        self._sequences: dict[Stream, TokenSequence] = {}
        self._inbox: SimpleQueue[_Arriving] = SimpleQueue()
        self._arriving: set[Stream] = set()  # whose sequences are in the inbox
        self._lease_adapter = lease_adapter
        self._poison_requests = poison_requests or PoisonRequests()
        self._record = record
        self._adapter_leases: dict[TokenSequence, Future[AdapterLease]] = {}  # that parked sequences wait for
        self._reclaims_adapters = False
        self._clearings = CacheClearings()
        self._step_ids = itertools.count(1)
        self._prefills: deque[InFlightStep] = deque()
        self._decodes: deque[InFlightStep] = deque()
        self._step_waiter = StepWaiter()
        self._awaited_prefill = self._ended_prefill = StepId(0)  # the last ones
        self._tokens, self._answers = RecentRate(), RecentRate()
        self._launching: Batch | None = None
        self._num_captures_awaited = 0
        self._may_want_captures = True  # the start leaves some; later since the last step
        self._captures_from = 0.0
        self._num_marks = 0  # rises with each launch and completion
        self._num_marks_before = -1  # the last turn
        self._is_waiting = True
        self._is_stopping = False
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="kestrel-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._captures_from = time.monotonic() + _STARTING_S
        self._thread.start()

    def add(self, sequence: TokenSequence, stream: Stream) -> None:
        """Queues a prepared sequence. May be called from any thread."""
        if self._is_finished:
            self._admission.leave(stream)
            _end_adapter_lease(sequence)
            stream.fail(EngineUnavailable("the engine has stopped"))
        else:
            self._arriving.add(stream)
            self._inbox.put(_Arrival(sequence, stream))

    def cancel(self, stream: Stream) -> None:
        """Drops the stream's sequence, if any, before the next step. May be called from any thread."""
        self._inbox.put(stream)

    def forget_cached(self, namespace: str | None, image: bytes | None = None) -> Future[ClearedCache]:
        """Removes what is cached for a namespace, or for all, before the next step. For any thread.

        With `image`, only what belongs to the image of this digest. The future may fail with `EngineUnavailable`.
        """
        done = self._clearings.add(namespace, image)
        self._inbox.put(None)
        return done

    @property
    def num_waiting(self) -> int:
        """The number of sequences without pages, the inbox included; it may change at any moment."""
        return self._scheduler.num_waiting + len(self._arriving)

    @property
    def num_active(self) -> int:
        """The number of sequences that hold pages; it may change at any moment."""
        return self._scheduler.num_active

    @property
    def num_captures_awaited(self) -> int:
        """The number of graph captures during which a request arrived."""
        return self._num_captures_awaited

    def tokens_per_second(self) -> float:
        """Returns the tokens sampled per second, over the last seconds."""
        return self._tokens.per_second(time.monotonic())

    def requests_per_second(self) -> float:
        """Returns the requests completed per second, over the last seconds."""
        return self._answers.per_second(time.monotonic())

    def reclaim_adapters(self) -> None:
        """Has sequences give back the leases of adapters that are reclaimed. May be called from any thread."""
        self._reclaims_adapters = True
        self._inbox.put(None)

    def stop(self) -> None:
        """Ends after the current turn, without waiting. May be called from any thread."""
        self._is_stopping = True
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the thread's end; returns True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def activities(self) -> Mapping[str, int]:
        """Progress counters by activity, for the watchdog, from any thread.

        They cover the thread and the oldest step of each kind: a prefill step may hang while decode steps complete.
        """
        found: dict[str, int] = {}
        if not self._is_waiting:
            found["engine thread"] = self._num_marks
        for name, steps in (("prefill step", self._prefills), ("decode step", self._decodes)):
            with contextlib.suppress(IndexError):  # the last one has been completed meanwhile
                found[name] = steps[0].id
        return found

    def in_flight(self) -> list[str]:
        """Describes for the log the step that is being launched and those in flight. For any thread."""
        launching = self._launching
        found = [] if launching is None else [f"launching a {describe(launching)}"]
        return found + [str(step) for step in (*self._prefills.copy(), *self._decodes.copy())]

    def finish(self) -> None:
        """Posts the remaining events of a thread that has ended or hangs, and accepts no more. For another thread.

        Remaining sequences are dropped without an event: `OpenStreams` ends their streams.
        """
        self._is_finished = True
        self._outbox.post()
        self._clearings.close()
        self._step_waiter.stop()
        if self._thread.is_alive():  # it hangs, and may still touch the books
            return
        try:
            self._take_inbox()
            for sequence in list(self._scheduler.sequences()):
                self._remove(sequence)
        except Exception:  # the thread may have ended in the middle of a change
            _log.warning("the engine's books are inconsistent after its end", exc_info=True)

    def run_turn(self) -> None:
        """Run one turn."""
        self._num_marks_before = self._num_marks
        self._take_inbox()
        if self._clearings.pending:
            self._clearings.carry_out(self._forget_cached)
        now = time.monotonic()
        self._drop_expired(now)
        self._complete_finished_prefills()
        if self._reclaims_adapters:
            self._give_adapters_back()
        self._promote()
        if not self._scheduler.can_look_ahead:  # asked when it is known who decodes
            self._complete_all()
        oldest = self._decodes[0] if self._decodes else None
        plan = self._scheduler.schedule(now, may_prefill=self._may_prefill())
        for sequence in self._scheduler.take_preempted():
            self._runner.close_row(sequence)
        for sequence in self._scheduler.take_without_pixels():
            self._have_decoded(sequence)
        if self._launch_decodes(plan, now):
            # A restricted step completes those before it, and sequences that leave by this free their rows.
            self._launch(self._scheduler.behind_tail_steps(plan.prefill), self._prefills)
        if not self._runner.is_asynchronous:
            self._complete_all()
        is_oldest = oldest is not None and self._decodes and self._decodes[0] is oldest
        if is_oldest and not self._depends_on_prefill(oldest):  # younger ones keep the device busy
            self._complete(self._decodes)
        if self._record is not None and not (self._prefills or self._decodes):
            self._record(())
        self._outbox.post()

    def _may_prefill(self) -> bool:
        """Returns whether another prefill step may begin."""
        if not self._prefills:
            return True
        are_few = self._scheduler.num_waiting < _NUM_TOGETHER and self._scheduler.num_active < _NUM_MANY
        waits = are_few and bool(self._prefills[0].batch.encode)
        return not waits and len(self._prefills) < _MAX_PREFILLS

    def _record_flight(self, batch: Batch) -> frozenset[str]:
        """Records the fingerprints of a batch and of the steps in flight; returns those of the batch."""
        own = frozenset(map(_fingerprint_of, batch.sequences))
        if self._record is not None:
            self._record(own.union(*[step.fingerprints for step in (*self._prefills, *self._decodes)]))
        return own

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.run_turn()
        except BaseException:  # SystemExit and KeyboardInterrupt too: whatever it is, the engine has ended
            # `Isolation` handles errors of the model. The rest is a broken device or a bug of ours; the books of
            # who owns what cannot be trusted any more.
            _log.critical("the engine thread ends", exc_info=True)

    def _wait_for_work(self) -> bool:
        """Wait until there is work; returns False if the thread must end."""
        is_blocked = self._scheduler.is_blocked
        if self._prefills and self._num_marks == self._num_marks_before:
            self._have_awaited(self._prefills[0])
            self._receive_within(_BLOCKED_S)
        elif (is_blocked or self._scheduler.is_idle) and not (self._prefills or self._decodes):
            quiet_s = None
            if self._may_want_captures:
                quiet_s = max(_QUIET_S, self._captures_from - time.monotonic())
            if not self._receive_within(_BLOCKED_S if is_blocked else quiet_s) and not is_blocked:
                self._capture_wanted()
        return not self._is_stopping

    def _receive_within(self, timeout_s: float | None) -> bool:
        """Wait for an item of the inbox; returns False if none came, and deadlines may have passed."""
        self._is_waiting = True
        try:
            self._receive(self._inbox.get(timeout=timeout_s))
        except Empty:
            return False
        finally:
            self._is_waiting = False
        return True

    def _have_awaited(self, prefill: InFlightStep) -> None:
        if self._awaited_prefill < prefill.id:
            self._awaited_prefill = prefill.id
            self._step_waiter.call_after(prefill.handle.done, partial(self._inbox.put, _PrefillOver(prefill.id)))

    def _capture_wanted(self) -> None:
        """Capture graphs until none is wanted, or something comes in."""
        while self._inbox.empty():
            if not self._runner.capture_wanted():
                self._may_want_captures = False
                return
            if not self._inbox.empty():
                self._num_captures_awaited += 1

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _forget_cached(self, namespace: str | None, image: bytes | None) -> ClearedCache:
        return ClearedCache(*self._scheduler.forget_cached(namespace, image))

    def _have_decoded(self, sequence: TokenSequence) -> None:
        assert self._decode_again is not None, "only with it are images left out"
        pixels = self._decode_again(sequence)
        pixels.add_done_callback(lambda done: self._inbox.put(_DecodedImage(sequence, done)))

    def _take_pixels(self, sequence: TokenSequence, pixels: Future[list[PreparedImage]]) -> None:
        error = EngineUnavailable("the engine has stopped") if pixels.cancelled() else pixels.exception()
        is_here = sequence in self._streams  # else it has left meanwhile
        if is_here and error is None:
            self._scheduler.add_pixels(sequence, pixels.result())
        elif is_here and error is not None:
            self._fail(sequence, error if isinstance(error, KestrelError) else InternalError(error))

    def _give_adapters_back(self) -> None:
        """Have sequences whose adapters are reclaimed wait for new leases; those that cannot yet do so later."""
        self._reclaims_adapters = False
        self._complete_all()  # if a step fails, all sequences run alone first
        for sequence in list(self._scheduler.sequences()):
            lease = sequence.adapter
            if lease is None or not lease.is_reclaimed:
                continue
            if self._scheduler.take_adapter(sequence):
                self._lease_again(sequence, lease)
            else:
                self._reclaims_adapters = True

    def _lease_again(self, sequence: TokenSequence, lease: AdapterLease) -> None:
        assert self._lease_adapter is not None, "sequences have adapters only with it"
        lease.end()
        other = self._adapter_leases[sequence] = self._lease_adapter(lease.name, lease.tenant)
        other.add_done_callback(lambda done: self._inbox.put(_AdapterLoaded(sequence, done)))

    def _take_adapter(self, sequence: TokenSequence, done: Future[AdapterLease]) -> None:
        is_here = self._adapter_leases.pop(sequence, None) is not None  # else it has left meanwhile
        error = EngineUnavailable("the engine has stopped") if done.cancelled() else done.exception()
        lease = None if error is not None else done.result()
        before = sequence.adapter
        if lease is not None and not (is_here and before is not None and before.digest == lease.digest):
            lease.end()  # its tokens so far come from another version
            error = EngineUnavailable("the adapter was replaced by another version")
        if is_here and error is not None:
            self._fail(sequence, error if isinstance(error, KestrelError) else InternalError(error))
        elif is_here:
            sequence.adapter = lease
            self._scheduler.give_adapter(sequence)

    def _receive(self, item: _Arriving) -> None:
        if isinstance(item, _Arrival):
            self._take_in(*item)
        elif isinstance(item, Stream):
            if item in self._sequences:
                self._remove(self._sequences[item])
        elif isinstance(item, _DecodedImage):
            self._take_pixels(*item)
        elif isinstance(item, _AdapterLoaded):
            self._take_adapter(*item)
        elif isinstance(item, _PrefillOver):
            self._ended_prefill = item.step

    def _take_in(self, sequence: TokenSequence, stream: Stream) -> None:
        self._arriving.discard(stream)
        if stream.is_cancelled:
            self._admission.leave(stream)
            _end_adapter_lease(sequence)
            return
        self._clearings.apply_to(sequence)
        self._streams[sequence] = stream
        self._sequences[stream] = sequence
        self._deadlines.watch(sequence)
        self._scheduler.add(sequence)
        if self._poison_requests.is_isolated(sequence.request.fingerprint):
            self._scheduler.run_alone(sequence)
        if sequence.adapter is not None and sequence.adapter.is_reclaimed:
            self._reclaims_adapters = True

    def _drop_expired(self, now: float) -> None:
        for sequence in self._deadlines.due(now):
            expiry = sequence.clock.expiry(now)
            if expiry is not None:
                self._fail(sequence, expiry)

    def _note_starts(self, batch: Batch) -> None:
        now = time.monotonic()
        for sequence in batch.sequences if batch.kind == "prefill" else ():
            if sequence.clock.started is None:
                sequence.clock.started = now
                self._admission.start(self._streams[sequence], now)

    def _promote(self) -> None:
        """If no sequence decodes, let those decode whose prompts end in the first prefill step in flight."""
        if self._prefills and not self._scheduler.is_decoding:
            self._scheduler.promote(self._prefills[0].batch)

    def _launch_decodes(self, plan: Plan, now: float) -> bool:
        """Launch decode steps, the plan's first, until enough are in flight; returns False if a launch raised."""
        batch, max_decodes = plan.decode, 1
        if self._runner.is_asynchronous:
            max_decodes = _MAX_DECODES if plan.prefill.is_empty else _MAX_DECODES_BEFORE_PREFILL
        while not batch.is_empty and len(self._decodes) < max_decodes:
            if not self._launch(batch, self._decodes):
                return False
            if batch.is_restricted or len(self._decodes) == max_decodes or not self._scheduler.can_look_ahead:
                break
            batch = self._scheduler.schedule(now, may_prefill=False).decode
        return True

    def _launch(self, batch: Batch, steps: deque[InFlightStep]) -> bool:
        """Launch a step, if it has any work; returns False if that raised, and the next turns find the cause."""
        if batch.is_empty:
            return True
        self._note_starts(batch)
        self._num_marks += 1
        self._may_want_captures = True
        self._launching = batch
        fingerprints = self._record_flight(batch)
        try:
            handle = self._runner.launch(batch, self._handles_of(batch.after | batch.depends_on))
        except Exception as error:
            if self._complete_all():
                self._isolate(batch, error)
            return False
        finally:
            self._launching = None
        step = InFlightStep(StepId(next(self._step_ids)), batch, handle, fingerprints)
        self._scheduler.commit(step.id, batch)
        steps.append(step)
        return not batch.is_restricted or self._sample(step, steps)

    def _sample(self, step: InFlightStep, steps: deque[InFlightStep]) -> bool:
        """Launch the rest of a restricted step, the last of `steps`, while its forward pass runs.

        Its masks depend on the tokens of earlier steps, which are completed first. Returns False if a step failed,
        and all sequences wait again.
        """
        while (earlier := self._awaited_by(step, steps)) is not None:
            if not self._complete(earlier):
                return False
        masks, failed = step_masks(step.batch, self._make_masks)
        for sequence in failed:
            _log.warning("the constraint of %s takes too much work", sequence.request.fingerprint)
            self._fail(sequence, ConstraintFailed())
        try:
            self._runner.sample(step.handle, masks)
        except Exception as error:
            self._abandon_in_flight()
            self._isolate(step.batch, error)
            return False
        return True

    def _awaited_by(self, step: InFlightStep, steps: deque[InFlightStep]) -> deque[InFlightStep] | None:
        """Returns the queue whose first step must complete before this step's masks; None if there is none."""
        if steps is self._decodes and steps[0] is not step:
            return steps
        return self._prefills if self._depends_on_prefill(step) else None

    def _depends_on_prefill(self, step: InFlightStep) -> bool:
        return any(prefill.id in step.batch.depends_on for prefill in self._prefills)

    def _handles_of(self, ids: frozenset[StepId]) -> list[StepHandle]:
        return [step.handle for step in (*self._prefills, *self._decodes) if step.id in ids] if ids else []

    def _complete_finished_prefills(self) -> None:
        while self._prefills and self._has_ended(self._prefills[0]):
            self._complete(self._prefills)

    def _has_ended(self, prefill: InFlightStep) -> bool:
        """Returns True if waiting for the step would return at once, or raise at once."""
        try:
            return prefill.id <= self._ended_prefill or prefill.handle.is_complete()
        except Exception:  # the device reports an error to its first caller; `_complete` gets it again
            return True

    def _complete_all(self) -> bool:
        """Complete all steps in flight; returns False if one failed, and all sequences wait again."""
        is_well = True
        while is_well and (self._prefills or self._decodes):
            is_well = self._complete(self._decodes or self._prefills)
        return is_well

    def _complete(self, steps: deque[InFlightStep]) -> bool:
        """Wait for the first of the steps and deliver its tokens, after those of the steps that it depends on.

        Returns False if one of them failed, and all sequences wait again.
        """
        while self._depends_on_prefill(steps[0]):
            if not self._complete(self._prefills):
                return False
        step = steps[0]  # in its place until it is complete: the watchdog names what is in flight
        try:
            tokens = step.handle.wait()
        except Exception as error:
            steps.popleft()
            self._abandon_in_flight()
            self._isolate(step.batch, error)
            return False
        steps.popleft()
        self._num_marks += 1
        now = time.monotonic()
        here = self._scheduler.complete(step.id, step.batch, tokens, now)
        self._isolation.succeeded([*here, *step.batch.read])
        embeddings = step.handle.embeddings() if step.batch.read else ()
        for sequence, found in zip(step.batch.read, embeddings, strict=True):
            if sequence in self._streams:  # else it has left meanwhile
                self._end_with_embeddings(sequence, found, now)
        self._tokens.add(now, len(here))
        for sequence in here:
            if sequence.tokens[-1].id == OVERFLOWED:
                self._end_overflowed(sequence)
                continue
            try:
                events = events_after(sequence, now)
            except Exception as error:  # a bug of the parser, which the model's tokens revealed
                _log.exception("the output parser of %s failed", sequence.request.fingerprint)
                self._fail(sequence, InternalError(error))
            else:
                self._deliver(sequence, events, now)
        return True

    def _abandon_in_flight(self) -> None:
        """Wait for the end of the other steps in flight; their tokens are dropped."""
        for step in (*self._prefills, *self._decodes):
            with contextlib.suppress(Exception):
                step.handle.wait()
        self._prefills.clear()
        self._decodes.clear()

    def _isolate(self, batch: Batch, error: Exception) -> None:
        poison = self._isolation.failed(batch, error)
        if poison is not None:
            _log.error("%s fails by itself: it ends, and is refused from now on", poison.request.fingerprint)
            self._fail(poison, InternalError(error))

    def _end_with_embeddings(self, sequence: TokenSequence, embeddings: ImageEmbeddings, now: float) -> None:
        if not embeddings.is_finite:
            self._end_overflowed(sequence)
            return
        parser = sequence.request.parser
        assert isinstance(parser, EmbeddingParser), "only its sequences read embeddings"
        sequence.clock.first_token = now
        pieces = parser.take(embeddings)
        self._deliver(sequence, [Started(_usage(sequence, 0)), *pieces, _finished(sequence, now)], now)

    def _deliver(self, sequence: TokenSequence, events: list[Event], now: float) -> None:
        stream, request = self._streams[sequence], sequence.request
        if request.parser.finish_reason is None:
            if events and not stream.wants_only_end:
                self._outbox.put(stream, events)
            return
        if request.end_check is not None:
            self._outbox.post()  # earlier events arrive before it
            request.end_check.deliver(stream, events)
        else:
            self._outbox.put(stream, events)
        self._answers.add(now, 1)
        self._poison_requests.completed(request.fingerprint)
        self._scheduler.finish(sequence)
        self._leave(sequence)

    def _end_overflowed(self, sequence: TokenSequence) -> None:
        name = "" if sequence.adapter is None else sequence.adapter.name
        of_adapter = f", with adapter {name!r}" if name else ""
        _log.warning("%s ends: the numbers of the model overflow%s", sequence.request.fingerprint, of_adapter)
        self._fail(sequence, NumbersOverflowed(name))

    def _fail(self, sequence: TokenSequence, error: KestrelError) -> None:
        self._streams[sequence].fail(error)
        self._remove(sequence)

    def _remove(self, sequence: TokenSequence) -> None:
        self._scheduler.remove(sequence)
        self._leave(sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        """Ends everything of a sequence that the scheduler has removed."""
        self._runner.release(sequence)
        _end_adapter_lease(sequence)
        if sequence in self._adapter_leases:
            self._adapter_leases.pop(sequence).cancel()
        self._deadlines.forget(sequence)
        stream = self._streams.pop(sequence)
        del self._sequences[stream]
        self._admission.leave(stream)


def _end_adapter_lease(sequence: TokenSequence) -> None:
    """Release the sequence's adapter: steps in flight may still read it, but their tokens are dropped."""
    if sequence.adapter is not None:
        sequence.adapter.end()


def describe(batch: Batch) -> str:
    """Describes a step's batch, for logs: names sequences by fingerprint, which does not reveal the request."""
    names = ", ".join(sequence.request.fingerprint or str(sequence.id) for sequence in batch.sequences)
    return f"{batch.kind} step of {names}"


def events_after(sequence: TokenSequence, now: float) -> list[Event]:
    """Have the sequence's parser consume its newest token; returns the events for the caller.

    Ends the answer if the context is full. Raises the errors of the parser.
    """
    parser, clock = sequence.request.parser, sequence.clock
    events: list[Event] = list(parser.consume(sequence.tokens[-1]))
    if clock.first_token is None:
        clock.first_token = now
        events.insert(0, Started(_usage(sequence, num_output_tokens=0)))
    if parser.finish_reason is None and sequence.is_full:
        events += parser.truncate()
    if parser.finish_reason is not None:
        events.append(_finished(sequence, now))
    return events


def _finished(sequence: TokenSequence, now: float) -> Finished:
    parser = sequence.request.parser
    assert parser.finish_reason is not None, "the answer is complete"
    return Finished(
        parser.output(),
        parser.finish_reason,
        _usage(sequence, sequence.num_generated),
        _timing(sequence, now),
        parser.stop_sequence,
        sequence.images[0].size_px if sequence.images else None,
    )


def _usage(sequence: TokenSequence, num_output_tokens: int) -> Usage:
    if sequence.request.embeddings is not None:
        num_positions = sequence.num_image_positions
        was_cached = any(image.has_cached_embeddings for image in sequence.images)
        return Usage(num_positions, num_positions, num_cached_tokens=num_positions if was_cached else 0)
    num_cached = sequence.cache.num_cached_prompt or 0
    return Usage(sequence.num_prompt_positions, sequence.num_image_positions, num_output_tokens, num_cached)


def _timing(sequence: TokenSequence, now: float) -> Timing:
    clock = sequence.clock
    submitted = clock.submitted
    preprocess_started = now if clock.preprocess_started is None else clock.preprocess_started
    prepared = now if clock.prepared is None else clock.prepared
    started = now if clock.started is None else clock.started
    first_token = now if clock.first_token is None else clock.first_token
    return Timing(
        queue_s=(preprocess_started - submitted) + (started - prepared),
        preprocess_s=prepared - preprocess_started,
        prefill_s=first_token - started,
        time_to_first_token_s=first_token - submitted,
        decode_s=now - first_token,
    )


class RecentRate:
    """Counts how many there were per second over the last seconds. One thread adds, any thread reads."""

    def __init__(self) -> None:
        # The number of each interval with a count, from time 0, and the count.
        self._counts: deque[tuple[int, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Add `count` events at `now`, in seconds of the monotonic clock."""
        number = int(now / _RATE_INTERVAL_S)
        if self._counts and self._counts[-1][0] == number:
            self._counts[-1] = (number, self._counts[-1][1] + count)
            return
        self._counts.append((number, count))
        while self._counts[0][0] <= number - _RATE_INTERVALS:
            self._counts.popleft()

    def per_second(self, now: float) -> float:
        """Returns the mean over the window that ends with the interval of `now`."""
        since = int(now / _RATE_INTERVAL_S) - _RATE_INTERVALS
        return sum(count for number, count in list(self._counts) if number > since) / _RATE_WINDOW_S
