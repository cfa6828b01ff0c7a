"""Delays refusals to connections that are refused often, so that the server has time for other callers.

Refusing a call costs about a millisecond, and a refused client may call again at once. Each connection has a bucket
of refusals that are sent without delay, and all connections share another bucket. Calls with a valid token that are
refused for what they ask, or for lack of room, have a larger bucket for each token, and shorter delays: a token may
be that of a gateway with many users. When a bucket is empty, the refusal is sent later; until then the call counts
towards the open calls of its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

_BURST, _PER_S = 50.0, 5.0
"""The bucket of one connection: its size, and the refusals added to it per second."""
_SHARED_BURST, _SHARED_PER_S = 500.0, 200.0
_MAX_DELAY_S = 10.0
_TOKEN_BURST, _TOKEN_PER_S = 200.0, 100.0
"""The bucket of one token."""
_MAX_TOKEN_DELAY_S = 1.0
_MAX_BUCKETS = 4096
# Each takes some kilobytes in gRPC. Above the limit, refusals are sent without delay.
_MAX_HELD = 4096


class Refusals:
    """Delays the refusals of all connections. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections: OrderedDict[str, _Bucket] = OrderedDict()
        """The buckets of connections that were refused recently, by peer."""
        self._tokens: OrderedDict[str, _Bucket] = OrderedDict()
        self._clock = clock
        self._shared = _Bucket(_SHARED_BURST, _SHARED_PER_S, _MAX_DELAY_S, clock())
        self._held: set[asyncio.Future[None]] = set()
        self._is_closed = False

    def reset(self, peer: str) -> None:
        """Fills the bucket of a connection after a call of it was served."""
        self.connections.pop(peer, None)

    def delay_s(self, peer: str) -> float:
        """Counts one refusal of a connection; returns the delay before it is sent, in seconds."""
        now = self._clock()
        if peer not in self.connections:
            _add(self.connections, peer, _Bucket(_BURST, _PER_S, _MAX_DELAY_S, now))
        self.connections.move_to_end(peer)
        return max(self.connections[peer].take(now), self._shared.take(now))

    def token_delay_s(self, name: str) -> float:
        """Counts one refusal of a call with a valid token; returns the delay before it is sent, in seconds."""
        now = self._clock()
        if name not in self._tokens:
            _add(self._tokens, name, _Bucket(_TOKEN_BURST, _TOKEN_PER_S, _MAX_TOKEN_DELAY_S, now))
        self._tokens.move_to_end(name)
        return self._tokens[name].take(now)

    async def hold(self, peer: str) -> None:
        """Counts one refusal of a connection, and returns once it may be sent or the server closes."""
        await self._wait(self.delay_s(peer))

    async def hold_token(self, name: str) -> None:
        """Counts one refusal of a call with a valid token, and returns once it may be sent or the server closes."""
        await self._wait(self.token_delay_s(name))

    async def _wait(self, delay_s: float) -> None:
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
        """Ends all delays, and delays nothing from now on."""
        self._is_closed = True
        for over in self._held:
            _finish(over)


class _Bucket:
    """Holds refusals, whose number grows with time. It may owe what is paid back within the longest delay."""

    __slots__ = ("_at", "_burst", "_level", "_max_delay_s", "_per_s")

    def __init__(self, burst: float, per_s: float, max_delay_s: float, now: float) -> None:
        self._burst, self._per_s, self._max_delay_s = burst, per_s, max_delay_s
        self._level, self._at = burst, now

    def take(self, now: float) -> float:
        """Takes one refusal; returns the seconds until the bucket has it."""
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s) - 1.0
        self._level = max(self._level, -self._max_delay_s * self._per_s)
        self._at = now
        return max(0.0, -self._level / self._per_s)


def _add(buckets: OrderedDict[str, _Bucket], key: str, bucket: _Bucket) -> None:
    """Adds a bucket in place of the one that was used longest ago if there are many."""
    buckets[key] = bucket
    if len(buckets) > _MAX_BUCKETS:
        buckets.popitem(last=False)


def _finish(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
