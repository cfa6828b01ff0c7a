"""Threads that do what is most urgent first. Knows no requests."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(order=True, slots=True)
class _Job(Generic[Result]):
    urgency: float
    number: int
    """Of two that are as urgent, the one that came first goes first."""
    work: Callable[[], Result] = field(compare=False)
    future: Future[Result] = field(compare=False)


class Workers:
    """A pool of threads with a line in front of it that is ordered by urgency."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._line: list[_Job[Any]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result], urgency: float) -> Future[Result]:
        """Have a thread do `work`; the lowest `urgency` goes first. The future can be cancelled until one does.

        Raises RuntimeError where the pool is closed, or the system has no thread left.
        """
        future: Future[Result] = Future()
        job = _Job(urgency, next(self._numbers), work, future)
        with self._lock:
            heapq.heappush(self._line, job)
        try:
            self._pool.submit(self._do_next)
        except RuntimeError:
            future.cancel()  # whoever takes it from the line passes over it
            raise
        return future

    def close(self) -> None:
        """Cancel what has not begun and wait for the threads."""
        with self._lock:
            line, self._line = self._line, []
        for job in line:
            job.future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _do_next(self) -> None:
        # Comes as often as there were jobs, but which one it meets is decided now.
        with self._lock:
            if not self._line:
                return
            job = heapq.heappop(self._line)
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(job.work())
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            del job  # the error's traceback refers to this frame, and the job to the error
