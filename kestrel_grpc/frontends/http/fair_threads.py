"""Runs work in threads: one piece at a time for each tenant, since all threads of Python share one processor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kestrel_runtime.fairness.fair_turns import FairTurns

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    turn: asyncio.Event
    """Set once the job may run. A future could be cancelled at the moment at which it gets its turn."""


class FairThreads:
    """Runs at most `num_threads` pieces of work at a time, and one of each tenant. Belongs to one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._num_free = num_threads
        self._turns: FairTurns[_Job] = FairTurns(1)

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
                self._end(tenant)
            else:
                self._turns.remove(job)
            raise
        running = loop.run_in_executor(None, work)
        running.add_done_callback(lambda done: self._note_end(tenant, done))
        # No thread can be stopped: its tenant has the next turn when it ends, even if its caller is gone.
        return await asyncio.shield(running)

    def _start(self) -> None:
        while self._num_free and (job := self._turns.start()) is not None:
            self._num_free -= 1
            job.turn.set()

    def _note_end(self, tenant: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # it counts as seen
        self._end(tenant)

    def _end(self, tenant: str) -> None:
        self._num_free += 1
        self._turns.end(tenant)
        self._start()
