"""Connects the supervisor with one of its children, over a socket that the child inherits.

Both ends send each other notes and ask each other questions. A message is a msgspec struct; the other end finds the
handler by the name of its class.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from kestrel_grpc.multiprocess.protocol.framing import FrameTooLong, ReceivedFrames, framed, receive_frame
from kestrel_runtime.api.errors import EngineUnavailable

MAX_MESSAGE_BYTES = 64 * 2**20
"""A longer message ends the link."""
MAX_UNREAD_BYTES = 64 * 2**20
"""If more than this waits to be sent, the other end does not read, and the link ends."""
ANSWER_TIMEOUT_S = 2.0
"""The longest time that a call waits for the answer of one process; then it fails with UNAVAILABLE."""

_log = logging.getLogger(__name__)

Message = TypeVar("Message", bound=msgspec.Struct)
Answer = TypeVar("Answer")
Handler = Callable[[Message], Any]
"""A function of a message. Its result, or the result of its coroutine, is the answer to a question."""


class SupervisorUnavailable(EngineUnavailable):
    """The other end of a link is gone, did not answer in time, or could not answer."""


class _Kind(IntEnum):
    NOTE = 0
    QUESTION = 1
    ANSWER = 2
    FAILURE = 3
    """Reports that the handler of a question has failed, or that there is none."""


class _Envelope(msgspec.Struct, array_like=True):
    kind: _Kind
    number: int
    """The number of the question; 0 for a note."""
    name: str
    """The name of the message's class; empty for an answer."""
    content: msgspec.Raw


class Link(asyncio.BufferedProtocol):
    """One end of the connection. Belongs to the event loop that `start` runs on.

    Handlers begin in the order in which messages arrive; a coroutine then runs concurrently with the handlers of
    later messages. `ask` may give up a question that the other end answers later: after a question that changes
    state, send a note that takes the change back; it arrives after the question.
    """

    def __init__(self, name: str) -> None:
        """`name` names the other end, for the log and for errors."""
        self.name = name
        self._handlers: dict[str, tuple[type[msgspec.Struct], Handler[Any]]] = {}
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        """Questions without an answer, by number."""
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._received = ReceivedFrames(MAX_MESSAGE_BYTES)
        self._early: list[_Envelope] = []
        """Notes that were sent before `start`."""
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] | None = None

    def on(self, kind: type[Message], handler: Handler[Message]) -> None:
        """Have `handler` take the messages of this class. It may be a coroutine function."""
        self._handlers[kind.__name__] = (kind, handler)

    async def start(self, connection: socket.socket) -> None:
        """Begin to receive, and own the socket from now on."""
        loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        connection.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=connection)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done once the other end is gone, or this end was closed. Wait for it behind `asyncio.shield`."""
        assert self._closed is not None, "the link has not been started"
        return self._closed

    def notify(self, note: msgspec.Struct) -> None:
        """Send a note, or queue it until `start`. If the other end is gone, nothing happens."""
        self._send(_Kind.NOTE, 0, type(note).__name__, note)

    async def ask(self, question: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Send a question and return its answer, which has the type `answer`.

        Raises `SupervisorUnavailable` if there is no answer within `timeout_s`.
        """
        if self.closed.done():
            raise SupervisorUnavailable(f"{self.name} is gone")
        number = next(self._numbers)
        waiting = self._open[number] = asyncio.get_running_loop().create_future()
        name = type(question).__name__
        try:
            self._send(_Kind.QUESTION, number, name, question)
            async with asyncio.timeout(timeout_s):
                content = await waiting
        except TimeoutError:
            raise SupervisorUnavailable(f"{self.name} has not answered {name} within {timeout_s:g} s") from None
        finally:
            del self._open[number]
        return msgspec.msgpack.decode(content, type=answer)

    def close(self) -> None:
        """End the connection. Notes from before are still sent."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        for envelope in self._early:
            transport.write(_framed(envelope))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._received.add(nbytes)
        try:
            while (frame := self._received.next()) is not None:
                self._take(frame.data)
        except FrameTooLong:
            self._abort("sends a message that is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(SupervisorUnavailable(f"{self.name} is gone"))
        for task in self._running:
            task.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def _send(self, kind: _Kind, number: int, name: str, content: Any) -> None:
        transport = self._transport
        envelope = _Envelope(kind, number, name, msgspec.Raw(msgspec.msgpack.encode(content)))
        if transport is None:
            self._early.append(envelope)
            return
        if transport.is_closing():
            return
        transport.write(_framed(envelope))
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._abort("does not read")

    def _abort(self, why: str) -> None:
        _log.error("%s %s: its link is closed", self.name, why)
        assert self._transport is not None
        self._transport.abort()

    def _take(self, data: bytes) -> None:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        if envelope.kind in (_Kind.ANSWER, _Kind.FAILURE):
            waiting = self._open.get(envelope.number)
            if waiting is None or waiting.done():  # given up
                return
            if envelope.kind is _Kind.ANSWER:
                waiting.set_result(envelope.content)
            else:
                waiting.set_exception(SupervisorUnavailable(f"{self.name} cannot answer"))
            return
        try:
            kind, handler = self._handlers[envelope.name]
            result = handler(msgspec.msgpack.decode(envelope.content, type=kind))
        except Exception:
            self._fail(envelope)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._finish(envelope, result))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self._answer(envelope, result)

    async def _finish(self, envelope: _Envelope, result: Awaitable[Any]) -> None:
        try:
            answer = await result
        except Exception:
            self._fail(envelope)
        else:
            self._answer(envelope, answer)

    def _answer(self, envelope: _Envelope, answer: Any) -> None:
        if envelope.kind is _Kind.QUESTION:
            self._send(_Kind.ANSWER, envelope.number, "", answer)

    def _fail(self, envelope: _Envelope) -> None:
        _log.exception("a %s from %s could not be handled", envelope.name, self.name)
        if envelope.kind is _Kind.QUESTION:
            self._send(_Kind.FAILURE, envelope.number, "", None)


def send_first(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message for `receive_first` to a process that has no event loop yet. Blocks."""
    connection.sendall(_framed(message))


def receive_first(connection: socket.socket, kind: type[Message]) -> Message:
    """Returns the message that was sent with `send_first`. Blocks. Raises `EOFError` if the other end is gone."""
    return msgspec.msgpack.decode(receive_frame(connection), type=kind)


def _framed(message: msgspec.Struct) -> bytes:
    return framed(msgspec.msgpack.encode(message))
