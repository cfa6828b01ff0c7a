"""Limits how many request messages are received at a time, and how long each may take.

The length of a message is unknown before it is read, and all that was read of it is held in memory. So a call reads
only with a permit, and there are as many permits as messages of the largest size fit into the reserved memory.
Until then the transport holds no more of a message than the call's window.

Slow senders cannot keep all permits. Some permits have a short timeout: they are granted to calls that have waited
for the wait limit, whose messages have mostly arrived by then; such a message must be complete almost at once, or
its call ends. A sender that did not complete a message in time is a slow sender for the next minute, and gets a
permit only when no other call waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kestrel_grpc.calls.call_context import Interruptible, StreamIdle
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.fairness.fair_limit import FairLimit
from kestrel_runtime.fairness.largest_tenant import oldest_of_largest_tenant

_RETRY_S = 1.0
_SLOW_SENDER_S = 60.0
_MAX_SLOW_SENDERS = 4096
# The tenant of slow senders without a token: together they get at most half of the permits.
_SLOW_SENDERS = "slow senders"
# The short timeout is divided into this many waits, so that an event loop that is blocked for a moment ends
# no call.
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
    """A limit on open calls or on messages in memory is reached. `description` names it."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.description = description
        self.retry_after_s = _RETRY_S


class StreamEvicted(Exception):
    """Too many streams waited for their next request, and of them this one longest."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Bounds a gate. `permits` and `short_permits` count messages; the other fields are seconds."""

    permits: int
    short_permits: int
    timeout_s: float
    """The timeout of a message with one of the `permits`, and the longest wait for a permit."""
    wait_limit_s: float = 0.3
    """The wait after which a call may have one of the `short_permits`."""
    short_timeout_s: float = 0.1
    """The timeout of a message with one of the `short_permits`."""


class MessagePermit:
    """Reserves memory for one message until `release`, which the call does once it holds nothing of the message."""

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
        """Returns the result of `read`, and the object that releases the memory of the message."""
        ...


class Releasable(Protocol):
    """Represents something that is taken until it is released."""

    def release(self) -> None:
        """Gives it back; a second call does nothing."""
        ...


class Reading(Interruptible):
    """Represents a task that has been reading a message since `started` on the clock of the event loop."""

    __slots__ = ("started",)

    def __init__(self, started: float) -> None:
        super().__init__()
        self.started = started


class _Waiter:
    """Represents a call that waits for a permit."""

    __slots__ = ("has_waited", "permit", "tenant")

    def __init__(self, tenant: str, permit: asyncio.Future[MessagePermit]) -> None:
        self.tenant = tenant
        self.permit = permit
        self.has_waited = False
        """True once it has waited for the wait limit."""


class MessageGate:
    """Bounds the memory of messages that are being received, by permits. Belongs to one event loop.

    A permit goes to the call that has waited longest and whose tenant may have one. A permit with the short timeout
    goes to the latest of the calls that have waited for `wait_limit_s`: if many senders stall, a new call does not
    wait for all of them. Slow senders are served after all others.
    """

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._permits = FairLimit(limits.permits)
        self._num_short = 0
        # Waiters in the order of their arrival; slow senders are in the second queue.
        self._queues: tuple[dict[_Waiter, None], dict[_Waiter, None]] = ({}, {})
        self._slow_senders: dict[str, float] = {}  # by caller: when it no longer counts as one, in that order
        self._readings: dict[Reading, None] = {}  # in the order of their start
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        # One timer for all readings: a timer for each would take longer than the rest of `receive`.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a permit."""
        return sum(map(len, self._queues))

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, MessagePermit]:
        """Returns the result of `read`, and the permit of the message. `peer` names the connection of calls without
        tenant.

        Raises `MessageTimeout`, `TooManyCalls` if no permit becomes free in time, and `EngineUnavailable` once the
        gate is closed.
        """
        if self._is_closed:
            raise _closed()
        is_slow_sender = bool(self._slow_senders) and self._is_slow_sender(tenant or peer())
        group = tenant or (_SLOW_SENDERS if is_slow_sender else "")
        permit = self._take(group) or await self._wait(group, self._queues[is_slow_sender])
        try:
            return await (self._read_with_short_timeout(read) if permit.is_short else self._read(read)), permit
        except (MessageTimeout, TooManyCalls):
            permit.release()
            self._note_slow_sender(tenant or peer())
            raise
        except BaseException:
            permit.release()
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
        """Stops receiving messages; calls that wait for their message end with `EngineUnavailable`."""
        self._is_closed = True
        for queue in self._queues:
            for waiter in tuple(queue):
                if not waiter.permit.done():
                    waiter.permit.set_exception(_closed())
        for reading in self._readings:
            reading.interrupt(_closed())

    def give_back(self, permit: MessagePermit) -> None:
        """Takes back a permit that is released."""
        if permit.is_short:
            self._num_short -= 1
        else:
            self._permits.give_back(permit.tenant)
        if any(self._queues):
            self._grant()

    def _take(self, tenant: str) -> MessagePermit | None:
        """Returns a permit for a tenant, or None if it may have none now."""
        return MessagePermit(self, tenant, is_short=False) if self._permits.take(tenant) else None

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

    async def _wait(self, tenant: str, queue: dict[_Waiter, None]) -> MessagePermit:
        waiter = _Waiter(tenant, self._loop.create_future())
        queue[waiter] = None
        timer = self._loop.call_later(self._limits.wait_limit_s, self._end_wait_limit, waiter)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await waiter.permit
        except BaseException as error:
            if _is_granted(waiter.permit):  # in the same turn of the event loop
                waiter.permit.result().release()
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
        """Assigns the free permits to waiting calls."""
        for queue in self._queues:
            self._assign(queue, self._with_permits(queue))
        for queue in self._queues:
            self._assign(queue, self._with_short_permits(queue))

    def _with_permits(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, MessagePermit]]:
        granted: list[tuple[_Waiter, MessagePermit]] = []
        for waiter in queue:
            if self._permits.is_full:
                break
            permit = self._take(waiter.tenant)
            if permit is not None:
                granted.append((waiter, permit))
        return granted

    def _with_short_permits(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, MessagePermit]]:
        granted: list[tuple[_Waiter, MessagePermit]] = []
        for waiter in reversed(queue):
            if self._num_short >= self._limits.short_permits:
                break
            if waiter.has_waited:
                self._num_short += 1
                granted.append((waiter, MessagePermit(self, waiter.tenant, is_short=True)))
        return granted

    def _assign(self, queue: dict[_Waiter, None], granted: list[tuple[_Waiter, MessagePermit]]) -> None:
        for waiter, permit in granted:
            queue.pop(waiter, None)
            if waiter.permit.done():  # cancelled in this turn of the event loop
                permit.release()
            else:
                waiter.permit.set_result(permit)

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
    """Bounds the memory of messages that streams wait for: at most `limit` streams wait for their next message.

    While a stream waits, a message of the largest size may arrive, and the transport does not report when one
    begins. Clients keep streams open between their requests, so waiting has no timeout. When `limit` streams wait,
    another stream must wait until one of them has its message, or has waited for `rest_s` seconds. In the second
    case the gate ends a stream: of the tenant with the most such streams, the one that has waited longest. Belongs
    to one event loop.
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
        """Returns the result of `read`. The stream itself bounds the memory of messages that it has received.

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
        """Stops receiving messages; streams that wait for one end with `EngineUnavailable`."""
        self._is_closed = True
        for reading in self._waiting:
            reading.interrupt(_closed())
        while self._queue:
            self._wake_next()

    async def _wait_or_evict(self) -> None:
        """Ends a stream that has waited long enough, or waits until one has, or until another may wait."""
        rested = self._loop.time() - self._rest_s
        evictable = {reading: tenant for reading, tenant in self._waiting.items() if reading.started <= rested}
        if evictable:
            evicted = oldest_of_largest_tenant(evictable)
            del self._waiting[evicted]
            evicted.interrupt(StreamEvicted())
            return
        turn = self._loop.create_future()
        self._queue.append(turn)
        try:
            await asyncio.wait((turn,), timeout=next(iter(self._waiting)).started - rested)
        finally:
            if turn in self._queue:
                self._queue.remove(turn)

    def _wake_next(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)


class FrameGate:
    """Waits for the frames of streams, of which each sends one at least every `idle_s` seconds.

    Every stream reads all the time, so that its frames do not grow old on their way: the limit of open streams
    bounds the memory of messages that are being received. Belongs to one event loop.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._readings: set[Reading] = set()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Releasable]:
        """Returns the result of `read`. The stream itself bounds the memory of messages that it has received.

        Raises `StreamIdle`, and `EngineUnavailable` once the gate is closed.
        """
        if self._is_closed:
            raise _closed()
        reading = Reading(self._loop.time())
        self._readings.add(reading)
        timer = self._loop.call_later(self._idle_s, reading.interrupt, StreamIdle(self._idle_s, is_reader=False))
        try:
            with reading:
                return await read(), _NOTHING
        finally:
            timer.cancel()
            self._readings.discard(reading)

    def close(self) -> None:
        """Stops receiving frames; streams that wait for one end with `EngineUnavailable`."""
        self._is_closed = True
        for reading in tuple(self._readings):
            reading.interrupt(_closed())


class UploadGate:
    """Bounds uploads that go to files: `limit` at a time; further ones are refused at once.

    Belongs to one event loop. An upload has one part at a time in memory. How long it may take depends on its size,
    so the service ends those that are too slow.
    """

    def __init__(self, limit: int) -> None:
        self._uploads = FairLimit(limit)
        self._readings: set[Reading] = set()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Releasable]:
        """Returns the result of `read`, which receives and handles the whole upload.

        Raises `TooManyCalls`, and `EngineUnavailable` once the gate is closed.
        """
        if self._is_closed:
            raise _closed()
        if not self._uploads.take(tenant):
            raise TooManyCalls(f"all of the {self._uploads.limit} uploads that may run, or this caller's share")
        reading = Reading(self._loop.time())
        self._readings.add(reading)
        try:
            with reading:
                return await read(), _NOTHING
        finally:
            self._readings.discard(reading)
            self._uploads.give_back(tenant)

    def close(self) -> None:
        """Receives no more uploads; those that run end with `EngineUnavailable`."""
        self._is_closed = True
        for reading in tuple(self._readings):
            reading.interrupt(_closed())


class _Nothing:
    """Releases nothing: the stream counts the memory of its messages."""

    def release(self) -> None:
        pass


_NOTHING = _Nothing()


def _closed() -> EngineUnavailable:
    return EngineUnavailable("no messages are received any more")


def _is_granted(permit: asyncio.Future[MessagePermit]) -> bool:
    return permit.done() and not permit.cancelled() and permit.exception() is None
