"""Limits how many request messages are received at a time, and how long each may take.

The length of a message is not known before it is read, and while it is read all of it is held in memory. So a call
reads only when it has a place, and there are as many places as messages of the largest size fit into the memory
that is reserved for them. Until then the transport holds no more of a message than the call's window.

Slow senders cannot keep all places. Some places have a short timeout: they are given to calls that have waited for
the wait limit, whose messages have mostly arrived by then; such a message must be complete almost at once, or its
call ends. A sender that did not complete a message in time is a slow sender for the next minute, and gets a place
only when no other call waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kestrel_grpc.calls.call_context import Interruptible
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.fairness.fair_limit import FairLimit

_RETRY_S = 1.0
_SLOW_SENDER_S = 60.0
_MAX_SLOW_SENDERS = 4096
# The tenant of slow senders without a token: together they get at most half of the places.
_SLOW_SENDERS = "slow senders"
# The short timeout is divided into this many waits, so that an event loop that is blocked for a moment ends no
# call.
_SHORT_TIMEOUT_TURNS = 5


class MessageTimeout(Exception):
    """The message of a call was not complete `limit_s` seconds after the server began to read it."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class MessageTooLarge(Exception):
    """The message of a call has more than `limit_bytes` bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes


class TooManyCalls(Exception):
    """A limit on open calls or on messages in memory is reached. `description` says which."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.description = description
        self.retry_after_s = _RETRY_S


class StreamEvicted(Exception):
    """The stream waited for a request, and other streams needed its place."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """`places` and `short_places` count messages; the other fields are seconds."""

    places: int
    short_places: int
    timeout_s: float
    """For a message that has one of the `places`; and the longest wait for a place."""
    wait_limit_s: float = 0.3
    """A call that has waited for this long may have one of the `short_places`."""
    short_timeout_s: float = 0.1
    """For a message that has one of the `short_places`."""


class Place:
    """Memory for one message. `release` gives it back once nothing of the message is held; again does nothing."""

    __slots__ = ("_gate", "is_short", "tenant")

    def __init__(self, gate: MessageGate, tenant: str, *, is_short: bool) -> None:
        self.tenant = tenant
        self.is_short = is_short
        self._gate: MessageGate | None = gate

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.give_back(self)


class Gate(Protocol):
    """Limits how many messages are received at a time."""

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Releasable]:
        """What `read` returns, and what gives the memory of the message back."""
        ...


class Releasable(Protocol):
    """Something that is taken until it is released."""

    def release(self) -> None:
        """Give it back; again does nothing."""
        ...


class Reading(Interruptible):
    """A task that reads a message, which began at `started` on the clock of the event loop."""

    __slots__ = ("started",)

    def __init__(self, started: float) -> None:
        super().__init__()
        self.started = started


class _Waiter:
    """A call without a place."""

    __slots__ = ("has_waited", "place", "tenant")

    def __init__(self, tenant: str, place: asyncio.Future[Place]) -> None:
        self.tenant = tenant
        self.place = place
        self.has_waited = False
        """Whether it has waited for the wait limit."""


class MessageGate:
    """Assigns places to calls. Belongs to one event loop.

    A place goes to the call that has waited longest and whose tenant may have one. A place with the short timeout
    goes to the latest of the calls that have waited for `wait_limit_s`: where many senders stall, a new call does
    not wait for all of them. Slow senders come after all others.
    """

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._places = FairLimit(limits.places)
        self._num_short = 0
        # In the order of their arrival; slow senders are in the second queue.
        self._queues: tuple[dict[_Waiter, None], dict[_Waiter, None]] = ({}, {})
        self._slow_senders: dict[str, float] = {}  # caller → time when it no longer counts as one, in that order
        self._readings: dict[Reading, None] = {}  # in the order of their start
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        # One timer for all readings: a timer for each would take longer than the rest of `receive`.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Calls without a place."""
        return sum(map(len, self._queues))

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Place]:
        """What `read` returns, and the place of the message. `peer` names the connection of calls without tenant.

        Raises `MessageTimeout`, `TooManyCalls` where there is no place in time, and `EngineUnavailable` once the
        gate is closed.
        """
        if self._is_closed:
            raise _closed()
        is_slow_sender = bool(self._slow_senders) and self._is_slow_sender(tenant or peer())
        group = tenant or (_SLOW_SENDERS if is_slow_sender else "")
        place = self._take(group) or await self._wait(group, self._queues[is_slow_sender])
        try:
            return await (self._read_with_short_timeout(read) if place.is_short else self._read(read)), place
        except (MessageTimeout, TooManyCalls):
            place.release()
            self._note_slow_sender(tenant or peer())
            raise
        except BaseException:
            place.release()
            raise

    def _is_slow_sender(self, caller: str) -> bool:
        until = self._slow_senders.get(caller)
        if until is not None and until < self._loop.time():
            del self._slow_senders[caller]
            return False
        return until is not None

    def _note_slow_sender(self, caller: str) -> None:
        self._slow_senders.pop(caller, None)
        self._slow_senders[caller] = self._loop.time() + _SLOW_SENDER_S
        if len(self._slow_senders) > _MAX_SLOW_SENDERS:
            del self._slow_senders[next(iter(self._slow_senders))]

    def close(self) -> None:
        """Receive no further message; calls that wait for their message end with `EngineUnavailable`."""
        self._is_closed = True
        for queue in self._queues:
            for waiter in tuple(queue):
                if not waiter.place.done():
                    waiter.place.set_exception(_closed())
        for reading in self._readings:
            reading.interrupt(_closed())

    def give_back(self, place: Place) -> None:
        """Called by a place that is released."""
        if place.is_short:
            self._num_short -= 1
        else:
            self._places.give_back(place.tenant)
        if any(self._queues):
            self._grant()

    def _take(self, tenant: str) -> Place | None:
        """A place for a tenant, if there is one."""
        return Place(self, tenant, is_short=False) if self._places.take(tenant) else None

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        reading = Reading(self._loop.time())
        self._readings[reading] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.timeout_s, self._end_late_readings)
        try:
            with reading:
                return await read()
        finally:
            del self._readings[reading]

    def _end_late_readings(self) -> None:
        self._timer = None
        now, limit_s = self._loop.time(), self._limits.timeout_s
        for reading in self._readings:
            if now < reading.started + limit_s:
                self._timer = self._loop.call_at(reading.started + limit_s, self._end_late_readings)
                return
            reading.interrupt(MessageTimeout(limit_s))

    async def _wait(self, tenant: str, queue: dict[_Waiter, None]) -> Place:
        waiter = _Waiter(tenant, self._loop.create_future())
        queue[waiter] = None
        timer = self._loop.call_later(self._limits.wait_limit_s, self._end_wait_limit, waiter)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await waiter.place
        except BaseException as error:
            if _is_granted(waiter.place):  # in the same turn of the event loop
                waiter.place.result().release()
            if isinstance(error, TimeoutError):
                raise TooManyCalls("other messages are being received") from None
            raise
        finally:
            timer.cancel()
            queue.pop(waiter, None)

    def _end_wait_limit(self, waiter: _Waiter) -> None:
        waiter.has_waited = True
        self._grant()

    def _grant(self) -> None:
        """Assign the free places to waiting calls."""
        for queue in self._queues:
            self._assign(queue, self._with_places(queue))
        for queue in self._queues:
            self._assign(queue, self._with_short_places(queue))

    def _with_places(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, Place]]:
        granted: list[tuple[_Waiter, Place]] = []
        for waiter in queue:
            if self._places.is_full:
                break
            place = self._take(waiter.tenant)
            if place is not None:
                granted.append((waiter, place))
        return granted

    def _with_short_places(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, Place]]:
        granted: list[tuple[_Waiter, Place]] = []
        for waiter in reversed(queue):
            if self._num_short >= self._limits.short_places:
                break
            if waiter.has_waited:
                self._num_short += 1
                granted.append((waiter, Place(self, waiter.tenant, is_short=True)))
        return granted

    def _assign(self, queue: dict[_Waiter, None], granted: list[tuple[_Waiter, Place]]) -> None:
        for waiter, place in granted:
            queue.pop(waiter, None)
            if waiter.place.done():  # cancelled in this turn of the event loop
                place.release()
            else:
                waiter.place.set_result(place)

    async def _read_with_short_timeout(self, read: Callable[[], Awaitable[Any]]) -> Any:
        reading = asyncio.ensure_future(read())
        try:
            for _ in range(_SHORT_TIMEOUT_TURNS):
                await asyncio.wait((reading,), timeout=self._limits.short_timeout_s / _SHORT_TIMEOUT_TURNS)
                if reading.done():
                    return reading.result()
            raise TooManyCalls("other messages are being received, and this one was not complete")
        finally:
            reading.cancel()


class StreamGate:
    """At most `limit` streams of requests wait for their next message at a time. Belongs to one event loop.

    While a stream waits, a message of the largest size may arrive, and the transport does not tell when one begins.
    Clients keep streams open between their requests, so waiting has no timeout. When `limit` streams wait, another
    stream must wait until one of them has its message, or has waited for `rest_s` seconds. In the second case a
    stream is ended to make room: of the tenant with the most such streams, the one that has waited longest.
    """

    def __init__(self, limit: int, rest_s: float = 1.0) -> None:
        self._limit = limit
        self._rest_s = rest_s
        self._waiting: dict[Reading, str] = {}  # with their tenants, in the order of their start
        self._queue: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def is_crowded(self) -> bool:
        """True if a stream with running requests should not wait for another request now."""
        return 2 * len(self._waiting) >= self._limit

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Releasable]:
        """What `read` returns. The stream itself bounds the memory of messages that it has received.

        Raises `StreamEvicted`, and `EngineUnavailable` once the gate is closed.
        """
        while len(self._waiting) >= self._limit and not self._is_closed:
            await self._wait_or_evict()
        if self._is_closed:
            raise _closed()
        reading = Reading(self._loop.time())
        self._waiting[reading] = tenant
        try:
            with reading:
                return await read(), _NOTHING
        finally:
            if self._waiting.pop(reading, None) is not None:
                self._wake_next()

    def close(self) -> None:
        """Receive no further message; streams that wait for one end with `EngineUnavailable`."""
        self._is_closed = True
        for reading in self._waiting:
            reading.interrupt(_closed())
        while self._queue:
            self._wake_next()

    async def _wait_or_evict(self) -> None:
        """End a stream that has waited long enough, or wait until one has, or until there is a place."""
        rested = self._loop.time() - self._rest_s
        evictable = {reading: tenant for reading, tenant in self._waiting.items() if reading.started <= rested}
        if evictable:
            counts = Counter(evictable.values())
            tenant = max(counts, key=counts.__getitem__)
            oldest = next(reading for reading, owner in evictable.items() if owner == tenant)
            del self._waiting[oldest]
            oldest.interrupt(StreamEvicted())
            return
        place = self._loop.create_future()
        self._queue.append(place)
        try:
            await asyncio.wait((place,), timeout=next(iter(self._waiting)).started - rested)
        finally:
            if place in self._queue:
                self._queue.remove(place)

    def _wake_next(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)


class _Nothing:
    """No memory is taken."""

    def release(self) -> None:
        pass


_NOTHING = _Nothing()


def _closed() -> EngineUnavailable:
    return EngineUnavailable("no messages are received any more")


def _is_granted(place: asyncio.Future[Place]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None
