"""Removes from the engine's caches the content of images that the server no longer stores, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import EngineUnavailable

_log = logging.getLogger(__name__)


class CachePurges:
    """Removals that no call waits for, in the order in which they were asked for. Belongs to one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Callable[[], Awaitable[object]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def forget_image(self, namespace: str, sha256: str) -> None:
        """Drop what was computed from an image; `sha256` is the digest of its file in hexadecimal."""
        self._add(lambda: self._engine.forget_image(bytes.fromhex(sha256), namespace))

    def clear(self, namespace: str) -> None:
        """Drop everything that was computed for a namespace."""
        self._add(lambda: self._engine.clear_cache(namespace))

    async def done(self) -> None:
        """Wait until all that was asked for is done."""
        if self._task is not None:
            await self._task

    def _add(self, purge: Callable[[], Awaitable[object]]) -> None:
        self._waiting.append(purge)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        while self._waiting:
            try:
                await self._waiting.popleft()()
            except EngineUnavailable:  # then it has no caches any more
                self._waiting.clear()
            except Exception:  # a bug of the engine must not keep the others from being dropped
                _log.exception("cannot drop what is cached of an image")
