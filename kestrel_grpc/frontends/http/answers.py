"""Renders the events of the engine as the events of a stream, whatever the frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import Protocol

from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.submission import ending_with, with_alternatives
from kestrel_runtime.api.events import Event, Finished
from kestrel_runtime.api.stream import Stream


class Renderer(Protocol):
    """The format of the answers to one request."""

    def answer(self, finished: Finished) -> bytes:
        """A whole answer, as JSON."""
        ...

    def events(self, event: Event, sample: int) -> bytes:
        """The server-sent events of an event of a sample; empty where there is none to tell."""
        ...

    def end(self, finished: Finished) -> bytes:
        """The server-sent events behind the last event of all samples; empty where there is none to tell."""
        ...


async def rendered_events(
    streams: Sequence[Stream], renderer: Renderer, call: CallContext
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of the samples of a request, as they come. The request ends with them."""
    finished: dict[int, Finished] = {}
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(ending_with(stream))
        async for sample, event in _numbered(streams):
            told = renderer.events(event, sample)
            if isinstance(event, Finished):
                finished[sample] = event
                if len(finished) == len(streams):
                    first, *others = (finished[number] for number in range(len(streams)))
                    call.finished = with_alternatives(first, others)
                    told += renderer.end(call.finished)
            if told:
                yield told


async def _numbered(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:  # without a task for each event
        async for event in streams[0]:
            yield 0, event
        return
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(iterator)): number for number, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[number]))] = number
                yield number, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
