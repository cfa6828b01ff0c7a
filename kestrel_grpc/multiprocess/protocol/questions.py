"""Asks questions of another process and answers its questions, over any transport.

    class Ping(Question[None]):                    the message, in `messages.py`
    exchange.on(Ping, lambda _: None)              the handler
    await exchange.ask(Ping(), timeout_s=30.0)     the caller

The type between brackets is that of the answer. If a handler raises an error that `errors.py` knows, the caller
gets it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args

import msgspec

from kestrel_grpc.multiprocess.protocol.errors import WireError, decode_error, encode_known
from kestrel_runtime.api.errors import EngineUnavailable, InternalError, KestrelError

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()

AnswerType = TypeVar("AnswerType")


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of messages: an array that begins with the name of its class."""


class Question(Message, Generic[AnswerType], kw_only=True):
    """The base of messages that are answered."""

    serial: int = 0
    """The number by which the answer finds its question; `Exchange.ask` sets it."""


class Answered(Message):
    """Answers the question of this number."""

    serial: int
    answer: msgspec.Raw


class Failed(Message):
    """Reports that the question of this number has no answer."""

    serial: int
    error: WireError | None
    """The error to raise; None for one whose details are in the log of the process that was asked."""


MessageType = TypeVar("MessageType", bound=Message)
Handler = Callable[[MessageType], Any]
"""A function of a message. Its result, or the result of its coroutine, is the answer to a question."""


class Codec:
    """Encodes and decodes messages of these kinds in MessagePack. A frame has the messages of one send."""

    def __init__(self, *kinds: type[Message]) -> None:
        known: Any = Union[(Answered, Failed, *kinds)]  # pyrefly: ignore[not-a-type] for msgspec
        self._decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[known])

    def encode(self, sent: Sequence[Message]) -> bytes:
        """Returns the data of a frame."""
        return _encoder.encode(sent)

    def decode(self, data: bytes) -> list[Message]:
        """Returns the messages of a frame. Raises `msgspec.MsgspecError` for those of another build."""
        return self._decoder.decode(data)


class Exchange(ABC):
    """One end of an exchange of messages with another process. Belongs to one event loop.

    Handlers begin in the order in which messages arrive; a coroutine then runs concurrently with the handlers of
    later messages. `ask` may give up a question that the other end answers later: after a question that changes
    state, send a note that takes the change back; it arrives after the question.
    """

    unavailable: ClassVar[type[KestrelError]] = EngineUnavailable
    """The error of a question without an answer."""

    def __init__(self, name: str) -> None:
        """`name` names the other end, for the log and for errors."""
        self.name = name
        self._handlers: dict[type[Message], Handler[Any]] = {}
        self._serials = itertools.count(1)
        self._open: dict[int, tuple[type[Message], asyncio.Future[msgspec.Raw]]] = {}
        """The kind and the answer of each question without an answer, by number."""
        self._running: set[asyncio.Future[None]] = set()

    @abstractmethod
    def notify(self, note: Message) -> None:
        """Send a message without waiting. If the other end is gone, nothing happens."""

    def on(self, kind: type[MessageType], handler: Handler[MessageType]) -> None:
        """Have `handler` take the messages of this class. It may be a coroutine function."""
        self._handlers[kind] = handler

    async def ask(self, question: Question[AnswerType], *, timeout_s: float) -> AnswerType:
        """Send a question and return its answer. Raises the error of its handler, and `unavailable` errors."""
        serial, kind = next(self._serials), type(question)
        waiting: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open[serial] = kind, waiting
        try:
            self.notify(msgspec.structs.replace(question, serial=serial))
            async with asyncio.timeout(timeout_s):
                answer = await waiting
        except TimeoutError:
            text = f"{self.name} has not answered {kind.__name__} within {timeout_s:g} s"
            raise self.unavailable(text) from None
        finally:
            self._open.pop(serial, None)
        return _answer_decoder(kind).decode(answer)

    def give_up(self, error: KestrelError, *kinds: type[Message]) -> None:
        """Raise an error in all callers of `ask`, or in those with a question of these kinds."""
        for kind, waiting in self._open.values():
            if (not kinds or kind in kinds) and not waiting.done():
                waiting.set_exception(error)

    def failure(self) -> KestrelError:
        """Returns the error of a question whose handler has failed for a reason that is in its log alone."""
        return self.unavailable(f"{self.name} cannot answer")

    def cancel_handlers(self) -> None:
        """Cancel the handlers that still run; they answer nothing."""
        for task in tuple(self._running):
            task.cancel()

    def handle(self, message: Message) -> None:
        """Handle a message that has arrived."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self._take_answer(message)
            return
        try:
            result = handler(message)
        except Exception as error:
            self._fail(message, error)
            return
        if result is not None and inspect.isawaitable(result):
            task = asyncio.ensure_future(self._finish(message, result))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self._answer(message, result)

    def _take_answer(self, message: Message) -> None:
        if not isinstance(message, Answered | Failed):
            self._fail(message, LookupError("there is no handler"))
            return
        _, waiting = self._open.get(message.serial, (None, None))
        if waiting is None or waiting.done():  # given up
            return
        if isinstance(message, Answered):
            waiting.set_result(message.answer)
        elif message.error is None:
            waiting.set_exception(self.failure())
        else:
            waiting.set_exception(decode_error(message.error))

    async def _finish(self, message: Message, result: Awaitable[Any]) -> None:
        try:
            answer = await result
        except Exception as error:
            self._fail(message, error)
        else:
            self._answer(message, answer)

    def _answer(self, message: Message, answer: Any) -> None:
        if isinstance(message, Question):
            self.notify(Answered(message.serial, msgspec.Raw(_encoder.encode(answer))))

    def _fail(self, message: Message, error: Exception) -> None:
        known = encode_known(error)
        if known is None or isinstance(error, InternalError) or not isinstance(message, Question):
            _log.error("a %s from %s could not be handled", type(message).__name__, self.name, exc_info=error)
        if isinstance(message, Question):
            self.notify(Failed(message.serial, known))


@cache
def _answer_decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    (base,) = vars(kind)["__orig_bases__"]
    (answer,) = get_args(base)
    return msgspec.msgpack.Decoder(answer)
