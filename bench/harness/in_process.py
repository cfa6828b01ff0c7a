"""Requests to an engine in the same process: so many run at all times until all are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Request
from kestrel_runtime.engine.engine import LocalEngine

Answered = Callable[[int, "Finished | KestrelError"], None]


async def closed_loop(
    engine: LocalEngine, requests: Iterable[Request], num_at_once: int, answered: Answered
) -> None:
    """Ask all of `requests`, `num_at_once` at a time; `answered` is called with each request's index and result."""
    queue = enumerate(requests)

    async def caller() -> None:
        for number, request in queue:
            try:
                answered(number, await engine.submit(request).result())
            except KestrelError as error:
                answered(number, error)

    await asyncio.gather(*(caller() for _ in range(num_at_once)))
