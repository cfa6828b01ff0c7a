"""What frontends ask of an engine, whether it runs a model or is a scripted one in a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import EngineInfo, EngineStatus, Load


class EngineSeam(Protocol):
    """An engine that has been started."""

    @property
    def info(self) -> EngineInfo:
        """What is served. Never changes."""
        ...

    @property
    def status(self) -> EngineStatus:
        """Whether it takes requests now."""
        ...

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Call `callback` at every change, in any thread."""
        ...

    def submit(self, request: Request, *, deadline_s: float | None = None, tenant: str = "") -> Stream:
        """Admit a request that must end within `deadline_s` seconds from now, or raise why not.

        Tenants share the engine evenly.
        """
        ...

    def expecting(
        self, request: Request, *, deadline_s: float | None = None, tenant: str = ""
    ) -> AbstractContextManager[None]:
        """Entering takes a request, whose image is still being fetched, into the queue or raises why not, as
        `submit` does; leaving takes it out."""
        ...

    def load(self) -> Load:
        """How busy it is."""
        ...

    async def drain(self) -> None:
        """Take no more requests, and return when those that run have ended."""
        ...

    def close(self) -> None:
        """End everything. Blocks."""
        ...
