"""The calls that have not ended yet: a server that stops waits for them, and operators can cancel them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kestrel_grpc.wire.call_context import CallContext


class RequestCancelled(Exception):
    """An operator has cancelled the call."""


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
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    def discard(self) -> None:
        """The current task no longer counts: nothing has to wait for it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.pop(task, None)

    def peer_ports(self) -> set[int]:
        """The remote ports of connections with open calls."""
        ports = (peer().rpartition(":")[2] for peer in self._tasks.values())
        return {int(port) for port in ports if port.isdecimal()}

    async def end(self) -> None:
        """Wait for the calls that are open now, but not for those that arrive meanwhile."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))


class CancellableCalls:
    """The admitted calls of a group, each in a task of its own, to cancel them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: dict[CancellableCall, None] = {}

    def add(self, call: CallContext) -> CancellableCall:
        """Add the call of the current task; it leaves by its `end`."""
        added = CancellableCall(self._calls, call)
        self._calls[added] = None
        return added

    def cancel(self, selects: Callable[[CallContext], bool]) -> int:
        """Cancel the calls that are selected; returns how many."""
        return sum(call.cancel() for call in tuple(self._calls) if selects(call.context))


class CancellableCall:
    """One call. Cancelling it cancels its task, and `end` replaces the cancellation by `RequestCancelled`."""

    __slots__ = ("_calls", "_is_cancelled", "_num_cancels", "_task", "context")

    def __init__(self, calls: dict[CancellableCall, None], context: CallContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.context = context
        self._calls = calls
        self._task = task
        self._num_cancels = task.cancelling()
        self._is_cancelled = False

    def cancel(self) -> bool:
        """Cancel the call; False where that was done already."""
        if self._is_cancelled:
            return False
        self._is_cancelled = True
        self._task.cancel()
        return True

    def end(self, error: BaseException | None) -> None:
        """The call has ended with this error. Raises `RequestCancelled` where `cancel` alone is its reason."""
        self._calls.pop(self, None)
        if not self._is_cancelled:
            return
        # Where the caller has cancelled the call at the same moment, the cancellation is what ended it.
        is_ours = self._task.uncancel() <= self._num_cancels
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise RequestCancelled from error
