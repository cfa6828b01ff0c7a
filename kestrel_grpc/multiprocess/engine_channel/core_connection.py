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

from kestrel_grpc.multiprocess.engine_channel import messages
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.messages import (
    Answer,
    CompletedAlone,
    CoreState,
    Events,
    Expect,
    FromCore,
    Hello,
    NeedPixels,
    Operation,
    ToCore,
    Welcome,
)
from kestrel_grpc.multiprocess.protocol.connection import Connection
from kestrel_runtime.api.engine import CoreReading, EngineInfo, EngineStatus, Load
from kestrel_runtime.api.errors import EngineUnavailable

_CONNECT_INTERVAL_S = 0.05
_OPERATION_TIMEOUT_S = 60.0
_IS_SILENT, _IS_BACK = 3, 4
"""Consecutive looks without a message after which a core counts as silent, and with one after which it answers."""

NO_LOAD = Load(0, 0, 0, 0, 0, 0.0)
"""The load of a core that has not reported any."""

ForClient = Events | NeedPixels | CompletedAlone
"""The messages that `EngineClient` handles; the connection handles the others."""

_log = logging.getLogger(__name__)


class BuildMismatch(Exception):
    """The core runs other code: the packages on the disk have changed while the server runs."""


class CoreSilent(EngineUnavailable):
    """A core that was asked for a place in its queue does not answer."""


class CoreConnection:
    """The connection to one core, whose process may change."""

    def __init__(self, endpoint: CoreEndpoint, identity: str, build: str) -> None:
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
        self._state: CoreState | None = None
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._places: set[int] = set()
        """The numbers of operations that ask for a place in the queue."""
        self._welcome: asyncio.Future[Welcome | None] | None = None
        self._unsent: list[ToCore] = []
        """Messages of this turn of the event loop. They are sent together: each send costs the core a turn of the
        interpreter's lock."""
        self._on_message: Callable[[CoreConnection, ForClient], None] | None = None
        self._on_undelivered: Callable[[Sequence[ToCore]], None] = lambda undelivered: None
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
    def state(self) -> CoreState:
        """The state that the core reported last."""
        return self._state or CoreState(EngineStatus.RECOVERING, NO_LOAD, ())

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

    def serve(
        self,
        on_message: Callable[[CoreConnection, ForClient], None],
        on_state: Callable[[], None],
        on_undelivered: Callable[[Sequence[ToCore]], None],
    ) -> None:
        """Set the callbacks: for messages of the core, for changes of its status, and for unread messages.

        `on_undelivered` gets the messages that could not be sent because the core does not read.
        """
        self._on_message, self._on_state, self._on_undelivered = on_message, on_state, on_undelivered

    async def connect(self) -> None:
        """Greet the process that listens, once there is one. Raises `BuildMismatch`."""
        self.end()
        self._first_state: asyncio.Future[None] = self._loop.create_future()
        greeting = None
        while greeting is None:
            greeting = await self._greet()
        if greeting.build != self._build:
            self.end()
            raise BuildMismatch(f"core {self.index} runs another build")
        self._info, self._process_id = greeting.info, greeting.process_id
        await self._first_state

    async def _greet(self) -> Welcome | None:
        """Returns the answer of the process that listens now; None, after a moment, if there is none."""
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
        self.send(Hello(self._identity, self._build))
        return await welcome

    def _ended(self) -> None:
        """Note that the process has closed the connection. `end` decides about its requests."""
        self._connection = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def end(self) -> None:
        """Forget the process, which has ended. Waiting operations fail with `EngineUnavailable`."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._state = self._process_id = None
        self._unsent.clear()
        self.num_sent = 0
        self.is_silent, self._num_looks, self._has_spoken = False, 0, True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ended_error())
        self._asked.clear()
        self._places.clear()

    def look(self) -> None:
        """Note whether the core has sent a message since the last look.

        Looks are counted instead of time, since this process may have been stopped meanwhile.
        """
        has_spoken, self._has_spoken = self._has_spoken, False
        self._num_looks = self._num_looks + 1 if has_spoken is self.is_silent else 0
        if self.is_connected and self._num_looks == (_IS_BACK if self.is_silent else _IS_SILENT):
            self.is_silent, self._num_looks = not self.is_silent, 0
            _log.warning("core %d %s", self.index, "does not answer" if self.is_silent else "answers again")

    def give_up_places(self) -> None:
        """Make `ask` raise `CoreSilent` for places in the queue, since another core may have some."""
        for number in self._places:
            if not self._asked[number].done():
                self._asked[number].set_exception(CoreSilent("the engine process does not answer"))

    def next_number(self) -> int:
        """Returns the number of the next operation."""
        return next(self._numbers)

    def send(self, message: ToCore, file: BinaryIO | None = None) -> None:
        """Send a message with the others of this turn of the event loop, without waiting. Closes the file."""
        if self._connection is None:  # `end` fails the operations that wait for an answer
            if file is not None:
                file.close()
            return
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(message)
        if file is not None:
            self._send_all(file)

    def _send_all(self, file: BinaryIO | None = None) -> None:
        """Send the waiting messages. The file belongs to the last one."""
        if self._connection is None or not self._unsent:
            return
        sent = self._unsent.copy()
        self._unsent.clear()
        if not self._connection.send(messages.encode_to_core(sent), file):
            for message in sent:
                asked = self._asked.get(message.number) if isinstance(message, Operation) else None
                if asked is not None and not asked.done():
                    asked.set_exception(EngineUnavailable("the engine process does not read"))
            self._on_undelivered(sent)

    async def ask(self, operation: Operation) -> Answer:
        """Returns the answer to an operation. Raises the error in it, or `EngineUnavailable` if there is none."""
        if self._connection is None:
            raise ended_error()
        answer = self._asked[operation.number] = self._loop.create_future()
        if isinstance(operation, Expect):
            self._places.add(operation.number)
        try:
            self.send(operation)
            async with asyncio.timeout(_OPERATION_TIMEOUT_S):
                found = await answer
        except TimeoutError as error:
            raise EngineUnavailable("the engine process does not answer") from error
        finally:
            self._asked.pop(operation.number, None)
            self._places.discard(operation.number)
        if found.error is not None:
            raise messages.decode_error(found.error)
        return found

    def _receive(self, data: bytes) -> None:
        self._has_spoken = True
        try:
            self._take(messages.decode_from_core(data))
        except msgspec.MsgspecError:
            _log.exception("a message of core %d cannot be read: it runs another build", self.index)
        except Exception:
            _log.exception("a message of core %d failed", self.index)

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Welcome):
            if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(message)
        elif isinstance(message, CoreState):
            is_news = message.status is not self.state.status
            self._state = message
            self.num_sent = 0
            if not self._first_state.done():
                self._first_state.set_result(None)
            if is_news:
                self._on_state()
        elif isinstance(message, Answer):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message)
        elif self._on_message is not None:
            self._on_message(self, message)


def ended_error() -> EngineUnavailable:
    """Returns the error of requests and operations whose core has ended."""
    return EngineUnavailable("the engine process has ended")
