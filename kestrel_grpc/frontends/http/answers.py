"""Answers a request of the engine: submits it, and renders its result or, for a stream, its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
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
    numbered,
    with_alternatives,
)
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Event, Finished
from kestrel_runtime.api.requests import Request
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
        """Returns the server-sent events for an event of a sample or an object; empty if there are none."""
        ...

    def end(self, finished: Finished) -> bytes:
        """Returns the server-sent events after the last event of all samples; empty if there are none."""
        ...

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last server-sent events of a stream that fails after its start."""
        ...


AnyRenderer = TypeVar("AnyRenderer", bound=Renderer)
Rendering = TypeVar("Rendering", bound=Renderer, contravariant=True)


class RenderGroups(Protocol[Rendering]):
    """Formats the whole answer about several objects."""

    def __call__(
        self, renderer: Rendering, answers: Sequence[ObjectAnswer], finished: Finished, /, *, is_streamed: bool
    ) -> bytes:
        """Returns JSON or, of a stream, the last server-sent event; `finished` has the sums of all objects."""
        ...


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
    render_groups: RenderGroups[AnyRenderer] | None = None,
) -> Callable[[ParsedRequest, CallContext], Awaitable[Answer]]:
    """Makes the `serve` of an operation. `new_renderer` takes the id of a request, its summary and its style.

    With `render_groups` None no request has several objects.
    """

    async def serve(parsed: ParsedRequest, call: CallContext) -> Answer:
        is_streamed, style, names = parsed.is_streamed, parsed.style, naming(parsed.field_name)
        objects = parsed.request.objects
        with names:
            streams = await submission.submit_samples(parsed.request, parsed.references, call)
            assert call.request is not None
            renderer = new_renderer(call.request_id, call.request, style)
            del parsed  # it holds the image
            if objects:
                assert render_groups is not None, "requests about several objects have groups"
                if is_streamed:
                    pieces = _events_by_object(submission, objects, streams, renderer, render_groups, call, names)
                    return Events(pieces, renderer.failure)
                answers = await submission.answers_by_object(objects, streams, call)
                assert call.finished is not None
                return render_groups(renderer, answers, call.finished, is_streamed=False)
            if is_streamed:
                return Events(_rendered_events(submission, streams, renderer, call, names), renderer.failure)
            finished = await last_event(streams, call)
            return await submission.rendered(finished, partial(renderer.answer, finished))

    return serve


async def _rendered_events(
    submission: Submission, streams: Sequence[Stream], renderer: Renderer, call: CallContext, names: naming
) -> AsyncGenerator[bytes, None]:
    """Yields the server-sent events of the samples of a request. Closing the generator cancels the request."""
    finished: dict[int, Finished] = {}
    with names, ending_with(*streams):
        async with aclosing(numbered(streams)) as events:
            async for sample, event in events:
                if isinstance(event, KestrelError):
                    raise event
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


async def _events_by_object(
    submission: Submission,
    objects: Sequence[str],
    streams: Sequence[Stream],
    renderer: AnyRenderer,
    render_groups: RenderGroups[AnyRenderer],
    call: CallContext,
    names: naming,
) -> AsyncGenerator[bytes, None]:
    """Yields the same of a request about several objects. An error of one of them ends no other."""
    with names:
        async with aclosing(submission.events_by_object(objects, streams, call)) as events:
            async for item in events:
                if isinstance(item, list):
                    assert call.finished is not None
                    yield render_groups(renderer, item, call.finished, is_streamed=True)
                elif written := renderer.events(item[1], item[0]):
                    yield written
