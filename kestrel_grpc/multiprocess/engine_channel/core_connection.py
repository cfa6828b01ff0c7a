"""Connects a front end to one engine core: greets its process, sends messages, asks operations, keeps its state."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kestrel_grpc.multiprocess.engine_channel.core_deaths import ended_error
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.connection import Connection
from kestrel_grpc.multiprocess.protocol.errors import ProcessFault
from kestrel_grpc.multiprocess.protocol.questions import AnswerType, Exchange, Message, Question
from kestrel_runtime.api.engine import CoreReading, EngineInfo, EngineStatus, Load
from kestrel_runtime.api.errors import EngineUnavailable, InternalError, KestrelError

_CONNECT_INTERVAL_S = 0.05
_ANSWER_TIMEOUT_S = 60.0
_IS_SILENT, _IS_BACK = 3, 4
"""Consecutive looks without a message after which a core counts as silent, and with one after which it answers."""

NO_LOAD = Load(0, 0, 0, 0, 0, 0.0)
"""The load of a core that has not reported any."""

_log = logging.getLogger(__name__)


class BuildMismatch(Exception):
    """The core runs other code: the packages on the disk have changed while the server runs."""


class CoreConnection(Exchange):
    """The connection to one core, whose process may change."""

    def __init__(self, endpoint: CoreEndpoint, identity: str, build: str) -> None:
        super().__init__("the engine process")
        self.num_sent = 0
        """Requests that were sent since the core has reported its load."""
        self.is_silent = False
        """True while the core has stopped or is too slow: it has sent no message for seconds."""
        self._num_looks = 0
        """Consecutive looks whose result contradicts `is_silent`."""
        self._has_spoken = True
        self._endpoint = endpoint
        self._identity = identity
        self._build = build
        self._loop = asyncio.get_running_loop()
        self._info: EngineInfo | None = None
        self._process_id: int | None = None
        self._state: messages.CoreState | None = None
        self._connection: Connection | None = None
        self._places = itertools.count(1)
        self._welcome: asyncio.Future[messages.Welcome | None] | None = None
        """The answer to `Hello`; None if the process has ended instead."""
        self.on(messages.Hello, self._check_build)
        self.on(messages.Welcome, self._take_welcome)
        self.on(messages.CoreState, self._take_state)
        self._unsent: list[Message] = []
        """Messages of this turn of the event loop. They are sent together: each send costs the core a turn of the
        interpreter's lock."""
        self._on_undelivered: Callable[[Sequence[Message]], None] = lambda undelivered: None
        self._on_state: Callable[[], None] = lambda: None

    @property
    def index(self) -> int:
        return self._endpoint.index

    @property
    def flight_record(self) -> Path:
        return self._endpoint.flight_record

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "known once it is connected"
        return self._info

    @property
    def state(self) -> messages.CoreState:
        """The state that the core reported last."""
        return self._state or messages.CoreState(EngineStatus.RECOVERING, NO_LOAD, ())

    @property
    def status(self) -> EngineStatus:
        return self.state.status if self.is_connected else EngineStatus.RECOVERING

    @property
    def is_connected(self) -> bool:
        return self._state is not None

    def reading(self) -> CoreReading:
        load = None if self._state is None else self._state.load
        return CoreReading(self.index, self.status, self._info, load, self._process_id)

    @property
    def load(self) -> int:
        load = self.state.load
        return load.num_running + load.num_waiting + load.num_preprocessing + self.num_sent

    @property
    def num_waiting(self) -> int:
        return self.state.load.num_waiting

    @property
    def max_batch_size(self) -> int:
        return self.info.max_batch_size

    def serve(self, on_state: Callable[[], None], on_undelivered: Callable[[Sequence[Message]], None]) -> None:
        """Set the callbacks: for changes of the core's status, and for messages that the core does not read."""
        self._on_state, self._on_undelivered = on_state, on_undelivered

    async def connect(self) -> None:
        """Greet the process that listens, once there is one. Raises `BuildMismatch`."""
        self.end()
        self._first_state: asyncio.Future[None] = self._loop.create_future()
        greeting = None
        while greeting is None:
            greeting = await self._greet()
        self._info, self._process_id = greeting.info, greeting.process_id
        await self._first_state

    async def _greet(self) -> messages.Welcome | None:
        """Returns the answer of the process that listens now; None, after a moment, if there is none.

        Raises `BuildMismatch`.
        """
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            stream.connect(str(self._endpoint.path))
        except OSError:  # no process listens yet, or too many connect at once
            stream.close()
            await asyncio.sleep(_CONNECT_INTERVAL_S)
            return None
        self._welcome = welcome = self._loop.create_future()
        self._connection = Connection(stream, lambda data, _: self._receive(data), self._ended)
        self.notify(messages.Hello(self._build, self._identity))
        return await welcome

    def _check_build(self, hello: messages.Hello) -> None:
        if hello.build != self._build and self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(BuildMismatch(f"core {self.index} runs another build"))
            self.end()

    def _take_welcome(self, welcome: messages.Welcome) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(welcome)

    def _take_state(self, state: messages.CoreState) -> None:
        is_news = state.status is not self.state.status
        self._state = state
        self.num_sent = 0
        if not self._first_state.done():
            self._first_state.set_result(None)
        if is_news:
            self._on_state()

    def _ended(self) -> None:
        """Note that the process has closed the connection. `end` decides about its requests."""
        self._connection = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def end(self) -> None:
        """Forget the process, which has ended. Questions that wait fail with `EngineUnavailable`."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._state = self._process_id = None
        self._unsent.clear()
        self.num_sent = 0
        self.is_silent, self._num_looks, self._has_spoken = False, 0, True
        self.give_up(ended_error())
        self.cancel_handlers()

    def look(self) -> None:
        """Note whether the core has sent a message since the last look.

        Looks are counted instead of time, since this process may have been stopped meanwhile.
        """
        has_spoken, self._has_spoken = self._has_spoken, False
        self._num_looks = self._num_looks + 1 if has_spoken is self.is_silent else 0
        if self.is_connected and self._num_looks == (_IS_BACK if self.is_silent else _IS_SILENT):
            self.is_silent, self._num_looks = not self.is_silent, 0
            _log.warning("core %d %s", self.index, "does not answer" if self.is_silent else "answers again")

    def next_place(self) -> int:
        """Returns the number of the next place in the core's queue."""
        return next(self._places)

    def notify(self, note: Message, file: BinaryIO | None = None) -> None:
        """Send a message with the others of this turn of the event loop, without waiting. Closes the file."""
        if self._connection is None:  # `end` fails the questions that wait for an answer
            if file is not None:
                file.close()
            return
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(note)
        if file is not None:
            self._send_all(file)

    def _send_all(self, file: BinaryIO | None = None) -> None:
        """Send the waiting messages. The file belongs to the last one."""
        if self._connection is None or not self._unsent:
            return
        sent = self._unsent.copy()
        self._unsent.clear()
        if not self._connection.send(messages.CODEC.encode(sent), file):
            self.give_up(EngineUnavailable("the engine process does not read"))
            self._on_undelivered(sent)

    async def ask(self, question: Question[AnswerType], *, timeout_s: float = _ANSWER_TIMEOUT_S) -> AnswerType:
        """Send a question and return its answer. Raises `EngineUnavailable`, and the error of the handler."""
        if self._connection is None:
            raise ended_error()
        return await super().ask(question, timeout_s=timeout_s)

    def failure(self) -> KestrelError:
        return InternalError(ProcessFault())

    def _receive(self, data: bytes) -> None:
        self._has_spoken = True
        try:
            received = messages.CODEC.decode(data)
        except msgspec.MsgspecError:
            _log.exception("a message of core %d cannot be read: it runs another build", self.index)
            return
        for message in received:
            self.handle(message)
