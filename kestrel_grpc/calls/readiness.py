"""Tracks whether the server wants calls, as every health check reports it, and the death of its engine."""

from __future__ import annotations

import asyncio
import contextlib

from kestrel_runtime.api.engine import Engine, EngineStatus


class ServiceUnknown(Exception):
    """A health check names a service that this server does not have."""


class Readiness:
    """Follows the status of the engine until `refuse` is called. Belongs to the event loop that it was made on."""

    def __init__(self, engine: Engine) -> None:
        self.is_ready = engine.status is EngineStatus.SERVING
        self.is_closed = False
        """True once streams that report the readiness must end."""
        self.changed = asyncio.Event()
        """Set at the next change; a new event takes its place."""
        self._loop = asyncio.get_running_loop()
        self._is_refusing = False
        engine.on_status_change(self._follow)

    def refuse(self) -> None:
        """Makes the server unready from now on, regardless of the engine's status."""
        self._is_refusing = True
        self._update(is_serving=False)

    def close(self) -> None:
        """Makes the server unready, and ends every stream that reports the readiness."""
        self.is_closed = True
        self.refuse()

    def _follow(self, status: EngineStatus) -> None:
        if not self._loop.is_closed():  # the engine may outlive the server, and calls from any thread
            self._loop.call_soon_threadsafe(lambda: self._update(is_serving=status is EngineStatus.SERVING))

    def _update(self, *, is_serving: bool) -> None:
        self.is_ready = is_serving and not self._is_refusing
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def death_of(engine: Engine) -> asyncio.Future[None]:
    """Returns a future of the running event loop that is done once the engine is dead."""
    loop = asyncio.get_running_loop()
    died: asyncio.Future[None] = loop.create_future()

    def follow(status: EngineStatus) -> None:
        if status is EngineStatus.DEAD:
            with contextlib.suppress(RuntimeError):  # the event loop is closed; the engine may outlive it
                loop.call_soon_threadsafe(lambda: died.done() or died.set_result(None))

    engine.on_status_change(follow)
    follow(engine.status)
    return died
