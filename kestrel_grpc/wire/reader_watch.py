"""Ends a stream whose reader takes none of its messages. Knows how long a write takes, not what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self


class StreamIdle(Exception):
    """The reader of a stream has taken no message for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class ReaderWatch:
    """For the length of an `async with` in the task that writes. Raises `StreamIdle` in it.

    A write takes long only where the buffers between server and reader are full. A timer for each write would cost
    as much as the write, so one timer for the stream checks how long the current write has taken.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer = self._loop.call_later(limit_s, self._look)
        self._writing_since: float | None = None

    async def wait_for(self, write: Awaitable[object]) -> None:
        """Await a write."""
        self._writing_since = self._loop.time()
        await write
        self._writing_since = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise StreamIdle(self._limit_s) from None

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._writing_since is None else self._writing_since
        if now >= since + self._limit_s:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(since + self._limit_s, self._look)
