"""Renders the events of the engine as the events of a stream, whatever the frontend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.submission import ending_with
from kestrel_runtime.api.events import Event, Finished
from kestrel_runtime.api.stream import Stream


class Renderer(Protocol):
    """The format of the answers to one request."""

    def answer(self, finished: Finished) -> bytes:
        """A whole answer, as JSON."""
        ...

    def events(self, event: Event) -> bytes:
        """The server-sent events of an event; empty where there is none to tell."""
        ...


async def rendered_events(stream: Stream, renderer: Renderer, call: CallContext) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a request, which ends with them."""
    with ending_with(stream):
        async for event in stream:
            if isinstance(event, Finished):
                call.finished = event
            told = renderer.events(event)
            if told:
                yield told
