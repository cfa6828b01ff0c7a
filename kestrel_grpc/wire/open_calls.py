"""The calls that have not ended yet, so that a server that stops can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class OpenCalls:
    """Each call adds the task that serves it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], Callable[[], str]] = {}

    def add(self, peer: Callable[[], str]) -> None:
        """Add the current task until it is done; the caller has been told then how the call ended.

        `peer` gives the address of the connection, ending with `:port`.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = peer
        task.add_done_callback(self._tasks.pop)

    def peer_ports(self) -> set[int]:
        """The remote ports of connections with open calls."""
        ports = (peer().rpartition(":")[2] for peer in self._tasks.values())
        return {int(port) for port in ports if port.isdecimal()}

    async def end(self) -> None:
        """Wait for the calls that are open now, but not for those that arrive meanwhile."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
