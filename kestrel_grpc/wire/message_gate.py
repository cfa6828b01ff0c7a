"""How many request messages are received at a time, and how long each may take.

The length of a message is not known before gRPC reads it, and once it does, the whole of it is held. So a call
reads only when it has a place, and there are as many places as messages of the largest size fit into the memory
that is set aside for them. Until then the transport holds no more of a message than the call's window.

Senders that are slow, or never finish, cannot keep the places from all others. Some places are for messages that
have waited for a place, and by then have mostly arrived: those must be complete almost at once, or their calls end.
And whoever did not finish a message comes after everybody else for a while. Knows nothing about tokens, messages or
statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kestrel_grpc.wire.shares import Shares
from kestrel_runtime.api.errors import EngineUnavailable

_RETRY_S = 1.0
_SUSPICION_S = 60.0
_MAX_SUSPECTS = 4096
# In place of the tenant of callers that are not told apart, which then share half of the places among them.
_SUSPECTS = "suspects"
# The limit of a hurried message is this many turns of the event loop, so that a loop that stands still for a moment
# ends no call.
_HURRY_TURNS = 5


class MessageTimeout(Exception):
    """The message of a call was not complete `limit_s` seconds after the server began to read it."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class TooManyCalls(Exception):
    """There is no room for the call or for its message. `description` says what is taken."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.description = description
        self.retry_after_s = _RETRY_S


@dataclass(frozen=True, slots=True)
class GateLimits:
    """`places` and `hurried_places` count messages; the rest are seconds."""

    places: int
    hurried_places: int
    timeout_s: float
    """For a message that has one of the `places`; and the longest wait for a place."""
    patience_s: float = 0.3
    """After this long without a place a message may have one of the `hurried_places`."""
    hurry_s: float = 0.1
    """For a message that has one of the `hurried_places`."""


class Place:
    """Room for one message. `release` gives it back once nothing of the message is held; again does nothing."""

    __slots__ = ("_gate", "is_hurried", "tenant")

    def __init__(self, gate: MessageGate, tenant: str, *, is_hurried: bool) -> None:
        self.tenant = tenant
        self.is_hurried = is_hurried
        self._gate: MessageGate | None = gate

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.give_back(self)


class _Reading:
    """A task that reads a message, and what it was cancelled for, if it was."""

    __slots__ = ("_task", "reason", "started")

    def __init__(self, started: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.started = started
        self.reason: Exception | None = None

    def end(self, reason: Exception) -> None:
        """Make the task raise this in place of what it reads."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()

    def is_ended(self) -> bool:
        """Asked where the task was cancelled: whether that was for the reason alone, and no caller has hung up."""
        return self.reason is not None and self._task.uncancel() == 0


class _Waiter:
    """A call without a place."""

    __slots__ = ("has_waited", "place", "tenant")

    def __init__(self, tenant: str, place: asyncio.Future[Place]) -> None:
        self.tenant = tenant
        self.place = place
        self.has_waited = False
        """Whether it has waited long enough for a hurried place."""


class MessageGate:
    """Hands out places. Belongs to one event loop.

    Places go to the call that has waited longest and whose tenant may have one. Hurried places go to the latest of
    those that have waited for `patience_s`: where many senders stall, a new call does not wait for all of them.
    Suspects, who have not finished a message in the last minute, come after all others.
    """

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._places = Shares(limits.places)
        self._num_hurried = 0
        # In the order of their arrival; suspects are in the second.
        self._queues: tuple[dict[_Waiter, None], dict[_Waiter, None]] = ({}, {})
        self._suspects: dict[str, float] = {}  # and until when they are, in that order
        self._readings: dict[_Reading, None] = {}  # in the order of their start
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        # One for all readings: starting and cancelling one for each takes longer than the rest of `receive`.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Calls without a place."""
        return sum(map(len, self._queues))

    async def receive(
        self, read: Callable[[], Awaitable[Any]], tenant: str, peer: Callable[[], str]
    ) -> tuple[Any, Place]:
        """What `read` gives, and the place that it takes up. `peer` names the connection, where there is no tenant.

        Raises `MessageTimeout`, `TooManyCalls` where there is no place in time, and `EngineUnavailable` once the
        gate is closed.
        """
        if self._is_closed:
            raise EngineUnavailable("no messages are received any more")
        is_suspect = bool(self._suspects) and self._is_suspect(tenant or peer())
        group = tenant or (_SUSPECTS if is_suspect else "")
        place = self._take(group) or await self._wait(group, self._queues[is_suspect])
        try:
            return await (self._read_in_a_hurry(read) if place.is_hurried else self._read(read)), place
        except (MessageTimeout, TooManyCalls):
            place.release()
            self._suspect(tenant or peer())
            raise
        except BaseException:
            place.release()
            raise

    def _is_suspect(self, caller: str) -> bool:
        until = self._suspects.get(caller)
        if until is not None and until < self._loop.time():
            del self._suspects[caller]
            return False
        return until is not None

    def _suspect(self, caller: str) -> None:
        self._suspects.pop(caller, None)
        self._suspects[caller] = self._loop.time() + _SUSPICION_S
        if len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def close(self) -> None:
        """Receive nothing any more; calls that wait for their message end with `EngineUnavailable`."""
        self._is_closed = True
        for queue in self._queues:
            for waiter in tuple(queue):
                if not waiter.place.done():
                    waiter.place.set_exception(EngineUnavailable("no messages are received any more"))
        for reading in self._readings:
            reading.end(EngineUnavailable("no messages are received any more"))

    def give_back(self, place: Place) -> None:
        """Called by a place that is released."""
        if place.is_hurried:
            self._num_hurried -= 1
        else:
            self._places.give_back(place.tenant)
        if any(self._queues):
            self._grant()

    def _take(self, tenant: str) -> Place | None:
        """A place for a tenant, if there is one."""
        return Place(self, tenant, is_hurried=False) if self._places.take(tenant) else None

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        reading = _Reading(self._loop.time())
        self._readings[reading] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.timeout_s, self._end_late_readings)
        try:
            return await read()
        except asyncio.CancelledError:
            if reading.is_ended():
                assert reading.reason is not None
                raise reading.reason from None
            raise
        finally:
            del self._readings[reading]

    def _end_late_readings(self) -> None:
        self._timer = None
        now, limit_s = self._loop.time(), self._limits.timeout_s
        for reading in self._readings:
            if reading.reason is not None:
                continue
            if now < reading.started + limit_s:
                self._timer = self._loop.call_at(reading.started + limit_s, self._end_late_readings)
                return
            reading.end(MessageTimeout(limit_s))

    async def _wait(self, tenant: str, queue: dict[_Waiter, None]) -> Place:
        waiter = _Waiter(tenant, self._loop.create_future())
        queue[waiter] = None
        timer = self._loop.call_later(self._limits.patience_s, self._hurry, waiter)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await waiter.place
        except BaseException as error:
            if _is_granted(waiter.place):  # in the same turn
                waiter.place.result().release()
            if isinstance(error, TimeoutError):
                raise TooManyCalls("other messages are being received") from None
            raise
        finally:
            timer.cancel()
            queue.pop(waiter, None)

    def _hurry(self, waiter: _Waiter) -> None:
        waiter.has_waited = True
        self._grant()

    def _grant(self) -> None:
        """Give the places that are free to those who wait."""
        for queue in self._queues:
            self._hand(queue, self._unhurried(queue))
        for queue in self._queues:
            self._hand(queue, self._hurried(queue))

    def _unhurried(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, Place]]:
        granted: list[tuple[_Waiter, Place]] = []
        for waiter in queue:
            if self._places.is_full:
                break
            place = self._take(waiter.tenant)
            if place is not None:
                granted.append((waiter, place))
        return granted

    def _hurried(self, queue: dict[_Waiter, None]) -> list[tuple[_Waiter, Place]]:
        granted: list[tuple[_Waiter, Place]] = []
        for waiter in reversed(queue):
            if self._num_hurried >= self._limits.hurried_places:
                break
            if waiter.has_waited:
                self._num_hurried += 1
                granted.append((waiter, Place(self, waiter.tenant, is_hurried=True)))
        return granted

    def _hand(self, queue: dict[_Waiter, None], granted: list[tuple[_Waiter, Place]]) -> None:
        for waiter, place in granted:
            queue.pop(waiter, None)
            if waiter.place.done():  # cancelled in this very turn
                place.release()
            else:
                waiter.place.set_result(place)

    async def _read_in_a_hurry(self, read: Callable[[], Awaitable[Any]]) -> Any:
        reading = asyncio.ensure_future(read())
        try:
            for _ in range(_HURRY_TURNS):
                await asyncio.wait((reading,), timeout=self._limits.hurry_s / _HURRY_TURNS)
                if reading.done():
                    return reading.result()
            raise TooManyCalls("other messages are being received, and this one was not complete")
        finally:
            reading.cancel()


def _is_granted(place: asyncio.Future[Place]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None
