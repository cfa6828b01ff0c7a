"""Carries events from the engine's thread to one asyncio caller: the only hop outward.

The engine thread collects a step's events in an `Outbox` and posts them once to each destination, usually an event
loop, on which each `Stream` hands them to its caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Event, Finished, TextDelta

_MAX_JOINED_LOGPROBS = 64
"""The most tokens in one delta: rendering more would delay other callers for too long."""


class Stream:
    """One request's events, in order: `Started`, `TextDelta`s, `Finished`. The iteration raises the request's
    error.

    Pending deltas are merged for a slow reader: passing on a delta costs the same at any length. A stream belongs
    to the event loop that it was made on; only `fail` and `post` may be called from another thread.
    """

    is_cancelled = False
    wants_only_end = False
    """True if the caller waits for `result`, so that earlier events need not be delivered."""
    open_streams: set[Stream] | None = None
    """A set that the stream leaves at its end."""
    _error: KestrelError | None = None
    _waiter: asyncio.Future[None] | None = None
    _on_cancel: Callable[[], None] | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: the running event loop, if the caller has it at hand."""
        self.loop = loop or asyncio.get_running_loop()
        self.destination: Hashable = self.loop
        """The key of this stream's destination: streams with equal keys are posted to together."""
        self.over: asyncio.Future[None] = self.loop.create_future()
        """Done once no further event follows: the request has finished, failed or been cancelled."""
        self._events: deque[Event] = deque()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                raise self._take_error()
            if self.over.done():
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        event = self._events.popleft()
        return self._joined(event) if isinstance(event, TextDelta) else event

    async def result(self) -> Finished:
        """Waits for the end and returns the last event, without waking for earlier ones, which are dropped.

        Raises the error of the request, once, and `asyncio.CancelledError` if the stream was cancelled.
        """
        self.wants_only_end = True
        if not self.over.done():
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._take_error()
        if self._events and isinstance(last := self._events[-1], Finished):
            return last
        raise asyncio.CancelledError("the stream was cancelled before its end, or has raised its error before")

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers a function that is called on the event loop if the caller cancels."""
        self._on_cancel = callback

    def cancel(self) -> None:
        """Ends the request; its pages are freed within one step. Has no effect on a stream that has ended."""
        if self.over.done():
            return
        self.is_cancelled = True
        on_cancel = self._on_cancel
        self._end()
        if on_cancel is not None:
            on_cancel()

    def deliver(self, events: list[Event], error: KestrelError | None = None) -> None:
        """Accepts events of the engine. Called on the event loop."""
        if self.over.done():
            return
        self._events.extend(events)
        self._error = error
        if error is not None or (events and isinstance(events[-1], Finished)):
            self._end()
        elif self._waiter is not None and not self._waiter.done() and not self.wants_only_end:
            self._waiter.set_result(None)

    def refuse(self, error: KestrelError) -> None:
        """Ends the stream with an error before any event, and cancels the request's preparation. Called on the
        event loop."""
        if self.over.done():
            return
        on_cancel = self._on_cancel
        self._error = error
        self._end()
        if on_cancel is not None:
            on_cancel()

    def fail(self, error: KestrelError) -> None:
        """Ends the stream with an error. May be called from any thread."""
        self.post(self.destination, [(self, [], error)])

    @staticmethod
    def post(destination: Any, deliveries: list[Delivery]) -> None:
        """Delivers to streams of one destination, from any thread. Has no effect if the destination has ended."""
        _post(destination, _deliver_all, deliveries)

    def _take_error(self) -> KestrelError:
        """Returns the error, once: its traceback refers to frames of the caller, which refer to this stream."""
        error, self._error = self._error, None
        assert error is not None, "asked for where there is one"
        return error

    def _joined(self, piece: TextDelta) -> TextDelta:
        """Returns a piece of text, joined with the pieces of the same channel that directly follow it."""
        pieces, num_logprobs = [piece], len(piece.logprobs)
        while self._events and isinstance(later := self._events[0], TextDelta) and later.channel is piece.channel:
            num_logprobs += len(later.logprobs)
            if num_logprobs > _MAX_JOINED_LOGPROBS:
                break
            pieces.append(later)
            self._events.popleft()
        if len(pieces) == 1:
            return piece
        text = "".join(each.text for each in pieces)
        num_tokens = sum(each.num_tokens for each in pieces)
        logprobs = tuple(one for each in pieces for one in each.logprobs)
        return TextDelta(text, piece.channel, piece.token_index, num_tokens, logprobs)

    def _end(self) -> None:
        self.over.set_result(None)
        # The callback refers to the stream and the image: otherwise only the garbage collector would free them.
        self._on_cancel = None
        if self.open_streams is not None:
            self.open_streams.discard(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Delivery = tuple[Stream, list[Event], KestrelError | None]
"""A stream with its next events. No event follows an error."""


class Outbox:
    """Collects the events of one turn by destination, and posts them together. One thread fills and posts it."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, list[Delivery]] = {}

    def put(self, stream: Stream, events: list[Event]) -> None:
        """Adds a stream's events of this turn."""
        self._pending.setdefault(stream.destination, []).append((stream, events, None))

    def post(self) -> None:
        """Posts all collected events, once to each destination."""
        while self._pending:  # each entry is removed first: if posting raises, nothing is sent twice
            destination, deliveries = self._pending.popitem()
            deliveries[0][0].post(destination, deliveries)


def _deliver_all(deliveries: list[Delivery]) -> None:
    for stream, events, error in deliveries:
        stream.deliver(events, error)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """Schedules a call of `callback` on an event loop. Has no effect if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
