"""Answers a request of the engine: submits it, and renders its result or, for a stream, its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from kestrel_grpc.calls.call_context import CallContext, RequestSummary
from kestrel_grpc.calls.errors import CallFailure
from kestrel_grpc.calls.submission import (
    ObjectAnswer,
    Submission,
    ending_with,
    last_event,
    naming,
    with_alternatives,
)
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.events import Event, Finished
from kestrel_runtime.api.requests import Request, objects_of
from kestrel_runtime.api.stream import Stream


class Events(NamedTuple):
    """Holds an answer that is sent piece by piece, as server-sent events."""

    pieces: AsyncGenerator[bytes, None]
    """Whole events. Closing the generator cancels the request."""
    failure: Callable[[CallFailure], bytes]
    """Returns the last events of a stream that fails after its start."""


Answer = bytes | Events
"""The body of an answer: JSON, or server-sent events."""


class Renderer(Protocol):
    """Formats the answers to one request."""

    def answer(self, finished: Finished) -> bytes:
        """Returns the whole answer, as JSON."""
        ...

    def events(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event of a sample; empty if there are none."""
        ...

    def end(self, finished: Finished) -> bytes:
        """Returns the server-sent events after the last event of all samples; empty if there are none."""
        ...

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last server-sent events of a stream that fails after its start."""
        ...


AnyRenderer = TypeVar("AnyRenderer", bound=Renderer)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Holds a request that a frontend has read from a body."""

    request: Request
    references: tuple[ImageReference | None, ...]
    """The name of each image of the request that is a placeholder; None for the others."""
    is_streamed: bool
    style: Any
    """The form of the answer that the body asks for; the frontend's renderer reads it."""
    field_name: Callable[[str], str]
    """Converts the name of a field of the engine's requests to its name in the body."""


def serving(
    submission: Submission,
    new_renderer: Callable[[str, RequestSummary, Any], AnyRenderer],
    render_groups: Callable[[AnyRenderer, Sequence[ObjectAnswer], Finished], bytes] | None = None,
) -> Callable[[ParsedRequest, CallContext], Awaitable[Answer]]:
    """Makes the `serve` of an operation. `new_renderer` takes the id of a request, its summary and its style.

    `render_groups` returns the whole answer about several objects; None if no request has any.
    """

    async def serve(parsed: ParsedRequest, call: CallContext) -> Answer:
        is_streamed, style, names = parsed.is_streamed, parsed.style, naming(parsed.field_name)
        objects = objects_of(parsed.request)
        with names:
            streams = await submission.submit_samples(parsed.request, parsed.references, call)
            assert call.request is not None
            renderer = new_renderer(call.request_id, call.request, style)
            del parsed  # it holds the image
            if is_streamed:
                return Events(_rendered_events(submission, streams, renderer, call, names), renderer.failure)
            if objects:
                answers = await submission.answers_by_object(objects, streams, call)
                assert render_groups is not None, "requests about several objects have groups"
                assert call.finished is not None
                return render_groups(renderer, answers, call.finished)
            finished = await last_event(streams, call)
            return await submission.rendered(finished, partial(renderer.answer, finished))

    return serve


async def _rendered_events(
    submission: Submission, streams: Sequence[Stream], renderer: Renderer, call: CallContext, names: naming
) -> AsyncGenerator[bytes, None]:
    """Yields the server-sent events of the samples of a request. Closing the generator cancels the request."""
    finished: dict[int, Finished] = {}
    with names, ending_with(*streams):
        async for sample, event in _numbered(streams):
            if not isinstance(event, Finished):
                written = renderer.events(event, sample)
            else:
                written = await submission.rendered(event, partial(renderer.events, event, sample))
                finished[sample] = event
                if len(finished) == len(streams):
                    first, *others = (finished[number] for number in range(len(streams)))
                    call.finished = with_alternatives(first, others)
                    written += renderer.end(call.finished)
            if written:
                yield written


async def _numbered(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the events of all streams in the order of their arrival, each with the number of its stream."""
    if len(streams) == 1:  # saves a task for each event
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
