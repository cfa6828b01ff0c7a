"""Threads that do what waits, in a fair order and within a budget of memory. Knows no requests.

Rules
  J1  Jobs start in the order of `WaitingQueue`: by priority, tenant and age. A job costs the memory that it needs.
  J2  A job starts when its memory can be taken from the budget. One that cannot start yet is passed by those that
      can, as long as they leave it the room that it waits for.
  J3  Large jobs never occupy every thread, where there are several: a small one waits for small ones at most.
  J4  Closing waits for running jobs for a bounded time. The threads are daemons: a job that never ends delays
      neither `close` nor the end of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.memory.image_budget import MemoryBudget
from kestrel_runtime.scheduling.waiting_queue import WaitingQueue

Result = TypeVar("Result")

_LARGE_BYTES = 128 * 2**20
"""From here on a job is large. It takes about a third of a second to decode as much."""
_SMALLEST_COST = 2**16
_CLOSING_S = 2.0

_log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """The job was given up: its caller is gone, or the workers close.

    No `Exception`, so that decoders, which take these for damaged files, do not catch it.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[Result]):
    """Work, on whose behalf it is done and what it takes. `num_bytes` are set aside while it runs."""

    work: Callable[[], Result]
    submitted: float
    priority: Priority = Priority.NORMAL
    tenant: str = ""
    num_bytes: int = 0

    @property
    def cost(self) -> int:
        return max(self.num_bytes, _SMALLEST_COST)

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= _LARGE_BYTES


class Workers:
    """A pool of threads with a queue in front of it."""

    def __init__(self, num_threads: int, name: str, budget: MemoryBudget, *, ageing_s: float = 10.0) -> None:
        self._num_threads = num_threads
        self._name = name
        self._budget = budget
        self._lock = threading.Lock()
        self._queue: WaitingQueue[Job[Any]] = WaitingQueue(ageing_s=ageing_s)
        self._futures: dict[Job[Any], _JobFuture[Any]] = {}  # of the jobs in the queue
        self._running: dict[Job[Any], _JobFuture[Any]] = {}
        self._passing: set[Job[Any]] = set()  # running jobs that passed one which waited for memory
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        # An entry has one thread look for a job. Finalizers of images put them too: this queue is re-entrant.
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        budget.on_freed(self._wake_one)

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def submit(self, job: Job[Result]) -> Future[Result]:
        """Have a thread do the job. The future can be cancelled until one does, and the job is then forgotten.

        Raises RuntimeError where the pool is closed, or the system has no thread left.
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
        """Cancel what has not begun, and wait for the rest for `wait_limit_s` seconds; then give it up.

        Jobs that are given up fail with `Interrupted`; their threads go on until they end by themselves.
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
            _log.warning("%d jobs did not end in %g s and are given up", len(abandoned), wait_limit_s)
        for future in abandoned:
            future.set_exception(Interrupted())

    def discard(self, job: Job[Any]) -> None:
        """Forget a job that was cancelled, and all that it refers to."""
        with self._lock:
            if self._futures.pop(job, None) is not None:
                self._queue.remove(job)
        self._wake_one()  # others may have waited behind it

    def _wake_one(self) -> None:
        # One is enough: who wakes up looks at everything that has changed by then, and wakes the next.
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
            return  # the threads that exist do the job
        self._threads.append(thread)

    def _run(self) -> None:
        while not self._is_closing:
            with self._lock:
                taken = self._take()
            if taken is None:
                self._wake_ups.get()
            else:
                self._do(*taken)
            del taken  # the job knows its request's image
        self._wake_one()

    def _take(self) -> tuple[Job[Any], _JobFuture[Any]] | None:
        """The job that starts now, with its memory taken, if there is one."""
        while True:
            now = time.monotonic()
            first = job = self._queue.first(now, self._has_share)
            if first is not None and not self._can_start(first):
                job = self._queue.first(now, partial(self._can_pass, first))
            if job is None:
                return None
            self._queue.start(job)
            future = self._futures.pop(job)
            if future.set_running_or_notify_cancel():  # else it was cancelled a moment ago
                break
        self._running[job] = future
        self._budget.take(job.tenant, job.num_bytes)
        if job is not first:
            self._passing.add(job)
        if len(self._queue):
            self._wake_one()
        return job, future

    def _has_share(self, job: Job[Any]) -> bool:
        return not job.num_bytes or self._budget.has_share(job.tenant)

    def _can_start(self, job: Job[Any]) -> bool:
        if job.is_large and sum(other.is_large for other in self._running) >= max(1, self._num_threads - 1):
            return False
        return not job.num_bytes or self._budget.has_room(job.num_bytes)

    def _can_pass(self, first: Job[Any], job: Job[Any]) -> bool:
        if not self._has_share(job) or not self._can_start(job):
            return False
        # `first` waits for those that were running when it came, so it must fit beside all others.
        awaited = sum(other.num_bytes for other in self._running if other not in self._passing)
        return not job.num_bytes or self._budget.has_room(job.num_bytes + first.num_bytes - awaited)

    def _do(self, job: Job[Any], future: _JobFuture[Any]) -> None:
        result, failure = None, None
        try:
            result = job.work()
        except BaseException as error:
            failure = error
        self._budget.give_back(job.tenant, job.num_bytes)
        with self._lock:
            is_given_up = self._running.pop(job, None) is None
            self._passing.discard(job)
        if not is_given_up:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
        del job, future, failure  # the error knows this frame, which would know the error


class _JobFuture(Future[Result]):
    """Takes its job out of the queue when it is cancelled."""

    def __init__(self, workers: Workers, job: Job[Result]) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = lambda: workers.discard(job)

    def set_running_or_notify_cancel(self) -> bool:
        self._withdraw = None  # the job knows its request's image, and is done before the future is
        return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        withdraw, self._withdraw = self._withdraw, None
        if is_cancelled and withdraw is not None:
            withdraw()
        return is_cancelled
