"""The calls that have not ended yet, for whoever has to wait for them."""

from __future__ import annotations

import asyncio


class OpenCalls:
    """Each call adds the task that serves it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def add(self) -> None:
        """Add the task that runs, until it is done: then its caller has been told how the call ended."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Wait for the calls that are open now. Those that come meanwhile are not waited for."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
