"""Sends requests in a closed loop, whose callers ask again once they are answered, or at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

_PAUSE_AFTER_ERROR_S = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes one request.

    Times are seconds of the monotonic clock; `error` is empty, or the status of a failure.
    """

    started: float
    """The moment when it was sent, or was due."""
    ended: float
    num_tokens: int = 0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """The moments when the pieces of the answer arrived."""
    error: str = ""
    num_first_tokens: int = 1
    """The number of tokens in the first piece."""
    num_cached_tokens: int = 0
    """The tokens of the prompt whose keys and values the server had cached."""
    num_input_tokens: int = 0
    message: str = ""
    """The server's message about the error."""


@dataclass(frozen=True, slots=True)
class Window:
    """Represents an interval of the monotonic clock."""

    start: float
    end: float

    @property
    def duration_s(self) -> float:
        return self.end - self.start

    def until(self, moment: float | None) -> Window:
        """Returns the part of the window before `moment`, or the whole window if `moment` is None."""
        return self if moment is None else Window(self.start, max(self.start, min(self.end, moment)))

    def parts(self, count: int) -> list[Window]:
        """Returns equal parts of the window."""
        edges = [self.start + self.duration_s * index / count for index in range(count)]
        return [Window(start, end) for start, end in itertools.pairwise((*edges, self.end))]


Ask = Callable[[float], Awaitable[Sample]]
"""Sends a request that starts, or was due, at this moment of the monotonic clock."""


class ClosedLoop:
    """Keeps `num_callers` requests running from its construction on, or until `num_requests` have been sent.

    Without a number the load continues until every request that overlaps a window has ended, so that none ends
    while fewer callers ask.
    """

    def __init__(self, ask: Ask, num_callers: int, num_requests: int | None = None) -> None:
        self._ask = ask
        self._running: dict[int, float] = {}  # when each caller sent the request that is running
        self._samples: list[Sample] = []
        self._answered: set[int] = set()
        self._num_left = num_requests
        self._is_closing = False
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(num_callers)]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All requests that have ended."""
        return tuple(self._samples)

    async def warm_up(self, longest_s: float) -> None:
        """Waits until every caller has received an answer, but at most `longest_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._until(lambda: len(self._answered) == len(self._tasks))

    async def outlast(self, window: Window) -> None:
        """Waits until every request that began before the window's end has ended."""
        await self._until(lambda: all(started >= window.end for started in self._running.values()))

    async def cancel(self) -> None:
        """Ends all callers now, also in the middle of a request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """Ends each caller after its request."""
        self._is_closing = True

    async def end(self) -> None:
        """Waits until all `num_requests` have ended, or all requests that were running at `stop`."""
        await asyncio.gather(*self._tasks)

    def overlapping(self, window: Window) -> tuple[Sample, ...]:
        """Returns the requests that were running in the window."""
        return tuple(item for item in self._samples if item.ended > window.start and item.started < window.end)

    async def _run(self, number: int) -> None:
        while not self._is_closing and self._num_left != 0:
            if self._num_left is not None:
                self._num_left -= 1
            self._running[number] = time.perf_counter()
            self._samples.append(sample := await self._ask(self._running[number]))
            del self._running[number]
            self._answered.add(number)
            self._changed.set()
            if sample.error:
                # A server that refuses at once would otherwise receive requests without a pause.
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def arrivals(start: float, rate_per_s: float, seed: int) -> Iterator[float]:
    """Yields moments of a Poisson process after `start`, without an end; they depend on the seed alone."""
    chance = random.Random(seed)
    due = start
    while True:
        due += chance.expovariate(rate_per_s)
        yield due


class OpenLoop:
    """Sends a request at each of the given moments, in rising order, regardless of the time that answers take."""

    def __init__(self, ask: Ask, moments: Iterable[float]) -> None:
        self._ask = ask
        self._asking: list[asyncio.Future[Sample]] = []
        self._sending = asyncio.create_task(self._send(moments))

    def stop(self) -> None:
        """Stops sending requests."""
        self._sending.cancel()

    async def end(self) -> tuple[Sample, ...]:
        """Returns all requests, once the last has been sent and all have ended."""
        await asyncio.wait((self._sending,))
        return tuple(await asyncio.gather(*self._asking))

    async def _send(self, moments: Iterable[float]) -> None:
        for due in moments:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            self._asking.append(asyncio.ensure_future(self._ask(due)))
