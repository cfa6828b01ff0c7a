"""Runs work in threads, of which each tenant keeps at most half of a processor busy.

All threads of Python share one processor, and the event loop and the engine are two of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kestrel_runtime.fairness.fair_turns import FairTurns

Result = TypeVar("Result")

_RESTS_AFTER_ERROR = 4
"""The rest after work that fails, in durations of that work. Few bodies of an honest caller are refused."""


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    turn: asyncio.Event
    """Set once the job may run. A future could be cancelled at the moment at which it gets its turn."""
    rest_s: float = 0.0
    """The rest of its tenant after it."""


class FairThreads:
    """Runs at most `num_threads` pieces of work at a time, and one of each tenant. Belongs to one event loop.

    After each piece its tenant rests for as long as the piece has taken, by `clock`, which is read in the thread.
    After a piece that has raised an error it rests `_RESTS_AFTER_ERROR` times as long.
    """

    def __init__(self, num_threads: int, clock: Callable[[], float] = time.thread_time) -> None:
        self._num_free = num_threads
        self._turns: FairTurns[_Job] = FairTurns(1)
        self._clock = clock

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Returns the result of the work, or raises its error."""
        loop = asyncio.get_running_loop()
        job = _Job(tenant, asyncio.Event())
        self._turns.push(job)
        self._start()
        try:
            await job.turn.wait()
        except asyncio.CancelledError:
            if job.turn.is_set():
                self._end(job)
            else:
                self._turns.remove(job)
            raise

        def timed() -> Result:
            began, factor = self._clock(), _RESTS_AFTER_ERROR
            try:
                result = work()
                factor = 1
                return result
            finally:
                job.rest_s = factor * (self._clock() - began)

        running = loop.run_in_executor(None, timed)
        running.add_done_callback(lambda done: self._note_end(job, done))
        # No thread can be stopped: its tenant has the next turn after it ends, even if its caller is gone.
        return await asyncio.shield(running)

    def _start(self) -> None:
        while self._num_free and (job := self._turns.start()) is not None:
            self._num_free -= 1
            job.turn.set()

    def _note_end(self, job: _Job, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # it counts as seen
        self._end(job)

    def _end(self, job: _Job) -> None:
        self._num_free += 1
        if job.rest_s > 0.0:
            asyncio.get_running_loop().call_later(job.rest_s, self._end_rest, job.tenant)
            self._start()
        else:
            self._end_rest(job.tenant)

    def _end_rest(self, tenant: str) -> None:
        self._turns.end(tenant)
        self._start()
