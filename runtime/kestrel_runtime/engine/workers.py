"""Runs jobs on a pool of threads, in a fair order and within a memory budget.

Rules
  J1  Jobs start in the order of `WaitingQueue`: by tenant, priority and age. A job costs the memory that it needs.
  J2  A job starts when its memory can be taken from the budget. Smaller jobs may overtake a job that waits for
      memory, as long as they do not take the memory that it waits for.
  J3  With several threads, large jobs never occupy all of them: a small job waits for small jobs only.
  J4  Closing waits for running jobs for a bounded time. The threads are daemons: a job that never ends delays
      neither `close` nor the end of the process.
  J5  With several threads, jobs of one tenant that compile constraints occupy half of them at most: such a job
      waits for the compiler most of the time, and the other threads run other jobs meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.fairness.image_budget import MemoryBudget
from kestrel_runtime.fairness.waiting_queue import WaitingQueue

Result = TypeVar("Result")

_LARGE_BYTES = 128 * 2**20
"""The least size of a large job. Decoding an image of this size takes about a third of a second."""
_SMALLEST_COST = 2**16
_CLOSING_S = 2.0

_log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """Raised in a job that is abandoned, since its caller is gone or the workers close.

    Not an `Exception`, because decoders treat every `Exception` as a damaged file.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[Result]):
    """Work for a thread. `num_bytes` of the memory budget are taken while it runs."""

    work: Callable[[], Result]
    submitted: float
    priority: Priority = Priority.NORMAL
    tenant: str = ""
    num_bytes: int = 0
    standing: Priority = Priority.NORMAL
    """The priority compared with jobs of other tenants."""
    compiles: bool = False
    """True if the job may compile a constraint."""
    then: Callable[[Result], None] | None = None
    """Work for the same thread once the result of `work` has been passed on."""

    @property
    def cost(self) -> int:
        return max(self.num_bytes, _SMALLEST_COST)

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= _LARGE_BYTES


class Workers:
    """Bounds the memory of decoded images: runs jobs in a pool of threads, within a `MemoryBudget`."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        budget: MemoryBudget,
        *,
        ageing_s: float = 10.0,
        on_thread: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Each thread runs its jobs within `on_thread`."""
        self._num_threads = num_threads
        self._name = name
        self._budget = budget
        self._on_thread = on_thread
        self._lock = threading.Lock()
        self._queue: WaitingQueue[Job[Any]] = WaitingQueue(ageing_s=ageing_s)
        self._futures: dict[Job[Any], _JobFuture[Any]] = {}  # of the jobs in the queue
        self._running: dict[Job[Any], _JobFuture[Any]] = {}
        self._num_compiling: Counter[str] = Counter()  # running jobs that compile, by tenant
        self._passing: set[Job[Any]] = set()  # running jobs that overtook one which waited for memory
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        # Each entry wakes one thread. Finalizers of images add entries too, so the queue must be re-entrant.
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        budget.on_freed(self._wake_one)

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def submit(self, job: Job[Result]) -> Future[Result]:
        """Queue a job. Its future can be cancelled until a thread starts it.

        Raises RuntimeError if the pool is closed or no thread can be started.
        """
        assert job.num_bytes <= self._budget.limit_bytes, "such a job would wait for ever"
        future: _JobFuture[Result] = _JobFuture(self, job)
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the workers are closed")
            if len(self._threads) < self._num_threads:
                self._start_thread()
            self._queue.push(job)
            self._futures[job] = future
        self._wake_one()
        return future

    def close(self, wait_limit_s: float = _CLOSING_S) -> None:
        """Cancel jobs that have not started, and wait at most `wait_limit_s` seconds for the others.

        Jobs that still run then fail with `Interrupted`; their threads continue until the work returns.
        """
        with self._lock:
            self._is_closing = True
            waiting = list(self._futures.values())
            threads = list(self._threads)
        for future in waiting:
            future.cancel()
        self._wake_one()
        end = time.monotonic() + wait_limit_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            abandoned = list(self._running.values())
            self._running.clear()
        if abandoned:
            _log.warning("%d jobs did not end in %g s and are abandoned", len(abandoned), wait_limit_s)
        for future in abandoned:
            future.set_exception(Interrupted())

    def discard(self, job: Job[Any]) -> None:
        """Remove a cancelled job from the queue, so that nothing refers to its work."""
        with self._lock:
            if self._futures.pop(job, None) is not None:
                self._queue.remove(job)
        self._wake_one()  # other jobs may have waited for it

    def _wake_one(self) -> None:
        # One wake-up is enough: the thread that wakes looks at all changes up to then, and wakes the next thread.
        if self._wake_ups.empty():
            self._wake_ups.put(None)

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return  # the existing threads run the job
        self._threads.append(thread)

    def _run(self) -> None:
        with self._on_thread():
            while not self._is_closing:
                with self._lock:
                    taken = self._take()
                if taken is None:
                    self._wake_ups.get()
                else:
                    self._do(*taken)
                del taken  # the job refers to its request's image
        self._wake_one()

    def _take(self) -> tuple[Job[Any], _JobFuture[Any]] | None:
        """Take the job that starts now, and its memory, or return None."""
        while True:
            now = time.monotonic()
            first = job = self._queue.first(now, may_start=self._has_share)
            if first is not None and not self._can_start(first):
                job = self._queue.first(now, may_start=partial(self._can_pass, first))
            if job is None:
                return None
            self._queue.start(job)
            future = self._futures.pop(job)
            if future.set_running_or_notify_cancel():  # False if it has just been cancelled
                break
        self._running[job] = future
        if job.compiles:
            self._num_compiling[job.tenant] += 1
        self._budget.take(job.tenant, job.num_bytes)
        if job is not first:
            self._passing.add(job)
        if len(self._queue):
            self._wake_one()
        return job, future

    def _has_share(self, job: Job[Any]) -> bool:
        if job.compiles and self._num_compiling[job.tenant] >= max(1, self._num_threads // 2):
            return False
        return not job.num_bytes or self._budget.has_share(job.tenant)

    def _can_start(self, job: Job[Any]) -> bool:
        if job.is_large and sum(other.is_large for other in self._running) >= max(1, self._num_threads - 1):
            return False
        return not job.num_bytes or self._budget.has_room(job.num_bytes)

    def _can_pass(self, first: Job[Any], job: Job[Any]) -> bool:
        if not self._has_share(job) or not self._can_start(job):
            return False
        # `first` waits for the jobs that ran before it came first, so it must fit together with all others.
        awaited = sum(other.num_bytes for other in self._running if other not in self._passing)
        return not job.num_bytes or self._budget.has_room(job.num_bytes + first.num_bytes - awaited)

    def _do(self, job: Job[Any], future: _JobFuture[Any]) -> None:
        result, failure = None, None
        try:
            result = job.work()
        except BaseException as error:
            failure = error
        with self._lock:
            # Together: a job that waits for this memory is passed only if it fits once all running jobs have ended.
            self._budget.give_back(job.tenant, job.num_bytes)
            is_abandoned = self._running.pop(job, None) is None
            self._passing.discard(job)
            if job.compiles:
                self._num_compiling[job.tenant] -= 1
                self._num_compiling += Counter()  # forgets zeros
        if not is_abandoned:
            if failure is None:
                future.set_result(result)
                if job.then is not None:
                    self._go_on(job.then, result)
            else:
                future.set_exception(failure)
        del job, future, failure  # the error refers to this frame, which would refer to the error

    @staticmethod
    def _go_on(then: Callable[[Result], None], result: Result) -> None:
        try:
            then(result)
        except Exception:  # the thread must live on
            _log.exception("the rest of a job failed")


class _JobFuture(Future[Result]):
    """A future whose cancellation removes its job from the queue."""

    def __init__(self, workers: Workers, job: Job[Result]) -> None:
        super().__init__()
        self._on_cancel: Callable[[], None] | None = lambda: workers.discard(job)

    def set_running_or_notify_cancel(self) -> bool:
        self._on_cancel = None  # the job refers to its request's image; free it before the future is done
        return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        on_cancel, self._on_cancel = self._on_cancel, None
        if is_cancelled and on_cancel is not None:
            on_cancel()
        return is_cancelled
