"""Connects the supervisor with one of its children, over a socket that the child inherits.

Both ends send each other notes and ask each other questions (`questions.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, ClassVar, TypeVar

import msgspec

from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.framing import FrameTooLong, ReceivedFrames, framed, receive_frame
from kestrel_grpc.multiprocess.protocol.messages import CODEC
from kestrel_grpc.multiprocess.protocol.questions import AnswerType, Codec, Exchange, Message, Question
from kestrel_runtime.api.errors import KestrelError

MAX_MESSAGE_BYTES = 64 * 2**20
"""A longer message ends the link."""
MAX_UNREAD_BYTES = 64 * 2**20
"""If more than this waits to be sent, the other end does not read, and the link ends."""
ANSWER_TIMEOUT_S = 2.0
"""The longest time that a call waits for the answer of one process; then it fails with UNAVAILABLE."""

_log = logging.getLogger(__name__)

First = TypeVar("First", bound=Message)


class Link(Exchange, asyncio.BufferedProtocol):
    """One end of the connection. Belongs to the event loop that `start` runs on."""

    unavailable: ClassVar[type[KestrelError]] = SupervisorUnavailable

    def __init__(self, name: str, codec: Codec = CODEC) -> None:
        """`name` names the other end, for the log and for errors."""
        super().__init__(name)
        self._codec = codec
        self._received = ReceivedFrames(MAX_MESSAGE_BYTES)
        self._early: list[Message] = []
        """Notes that were sent before `start`."""
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] | None = None

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

    def notify(self, note: Message) -> None:
        """Send a message, or queue it until `start`. If the other end is gone, nothing happens."""
        transport = self._transport
        if transport is None:
            self._early.append(note)
        elif not transport.is_closing():
            transport.write(framed(self._codec.encode((note,))))
            if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._abort("does not read")

    async def ask(self, question: Question[AnswerType], *, timeout_s: float = ANSWER_TIMEOUT_S) -> AnswerType:
        """Send a question and return its answer. Raises `SupervisorUnavailable`, and the error of the handler."""
        if self.closed.done():
            raise SupervisorUnavailable(f"{self.name} is gone")
        return await super().ask(question, timeout_s=timeout_s)

    def close(self) -> None:
        """End the connection. Notes from before are still sent."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        for note in self._early:
            self.notify(note)
        self._early.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._received.add(nbytes)
        try:
            while (frame := self._received.next()) is not None:
                for message in self._codec.decode(frame[0]):
                    self.handle(message)
        except FrameTooLong:
            self._abort("sends a message that is too long")
        except msgspec.MsgspecError:
            self._abort("sends what is no message")

    def connection_lost(self, exc: Exception | None) -> None:
        self.give_up(SupervisorUnavailable(f"{self.name} is gone"))
        self.cancel_handlers()
        if not self.closed.done():
            self.closed.set_result(None)

    def _abort(self, why: str) -> None:
        _log.error("%s %s: its link is closed", self.name, why)
        assert self._transport is not None
        self._transport.abort()


def send_first(connection: socket.socket, message: Message, codec: Codec = CODEC) -> None:
    """Send a message for `receive_first` to a process that has no event loop yet. Blocks."""
    connection.sendall(framed(codec.encode((message,))))


def receive_first(connection: socket.socket, kind: type[First], codec: Codec = CODEC) -> First:
    """Returns the message that was sent with `send_first`. Blocks. Raises `EOFError` if the other end is gone."""
    (message,) = codec.decode(receive_frame(connection))
    assert isinstance(message, kind)
    return message
