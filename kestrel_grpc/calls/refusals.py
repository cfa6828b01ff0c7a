"""Delays refusals to connections that are refused often, so that the server has time for other callers.

Refusing a call costs a fraction of a millisecond, and a refused client may call again at once. Each connection has
a bucket of refusals that are sent without delay, and all connections share another bucket. When a bucket is empty,
the refusal is sent later; until then the call counts towards the open calls of its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

_BURST, _PER_S = 50.0, 5.0
"""Of one connection."""
_SHARED_BURST, _SHARED_PER_S = 500.0, 200.0
_MAX_DELAY_S = 10.0
_MAX_CONNECTIONS = 4096
# Each takes some kilobytes in gRPC. Beyond it refusals are told at once, as if there were no delay.
_MAX_HELD = 4096


class Refusals:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections: OrderedDict[str, _Bucket] = OrderedDict()
        """By peer, the connections that were refused lately."""
        self._clock = clock
        self._shared = _Bucket(_SHARED_BURST, _SHARED_PER_S, clock())
        self._held: set[asyncio.Future[None]] = set()
        self._is_closed = False

    def forgive(self, peer: str) -> None:
        """A call of this connection was answered: its bucket is full again."""
        self.connections.pop(peer, None)

    def delay_s(self, peer: str) -> float:
        """Count one refusal of a connection; returns the seconds after which to tell it."""
        now = self._clock()
        bucket = self.connections.get(peer)
        if bucket is None:
            bucket = self.connections[peer] = _Bucket(_BURST, _PER_S, now)
            if len(self.connections) > _MAX_CONNECTIONS:
                self.connections.popitem(last=False)
        self.connections.move_to_end(peer)
        return max(bucket.take(now), self._shared.take(now))

    async def hold(self, peer: str) -> None:
        """Count one refusal, and return when it may be told, or when the server closes."""
        delay_s = self.delay_s(peer)
        if delay_s <= 0.0 or self._is_closed or len(self._held) >= _MAX_HELD:
            return
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._held.add(over)
        timer = loop.call_later(delay_s, _finish, over)
        try:
            await over
        finally:
            timer.cancel()
            self._held.discard(over)

    def close(self) -> None:
        """Delay nothing from now on, and end the delays that there are."""
        self._is_closed = True
        for over in self._held:
            _finish(over)


class _Bucket:
    """Fills with time. It may owe as much as is paid back within the longest delay."""

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._level, self._at = burst, now

    def take(self, now: float) -> float:
        """Take one; returns the seconds until it is there."""
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s) - 1.0
        self._level = max(self._level, -_MAX_DELAY_S * self._per_s)
        self._at = now
        return max(0.0, -self._level / self._per_s)


def _finish(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
