"""The server of an engine core: takes requests of front ends from a socket, and sends them the engine's events.

     front end                      event loop                          engine thread
     requests ──── ROUTER `.in` ──▶ decode, submit ───────────────────▶ …
     events ◀───── ROUTER `.out` ◀─ answers, state ◀─ (one lock) ─────◀ events of a turn, once to each front end

The event loop alone reads; any thread sends, so that events take no detour through the event loop. Each socket has
one direction. A front end that does not read is dropped: sending never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from kestrel_runtime.api.errors import EngineUnavailable, InternalError, KestrelError
from kestrel_runtime.api.events import Event, Finished
from kestrel_runtime.api.images import PixelFormat, RawImage, RemoteImage
from kestrel_runtime.api.stream import Delivery, Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.processes import messages
from kestrel_runtime.processes.endpoint import MAX_WAITING_MESSAGES, CoreEndpoint
from kestrel_runtime.processes.messages import (
    Acquitted,
    AdapterNames,
    Answer,
    Cancel,
    ClearCache,
    CoreState,
    Events,
    Expect,
    ForgetImage,
    Hello,
    ImageSummary,
    LoadAdapter,
    NeedPixels,
    OnlyEnd,
    Operation,
    Pixels,
    Refuse,
    Release,
    Submit,
    Suspect,
    ToCore,
    UnloadAdapter,
    Welcome,
    events_of,
)

_STATE_INTERVAL_S = 0.1
_WANTED_INTERVAL_S = 0.1
_LINGER_MS = 1_000
_MAX_READ_AT_ONCE = 32
"""Messages; then timers and other callbacks of the event loop have their turn."""

_log = logging.getLogger(__name__)


class CoreServer:
    """Serves an engine to front ends. Belongs to the event loop that `start` was called on.

    `on_lost` is called, in any thread, with the identity of a front end that does not read: it must be ended.
    """

    def __init__(
        self, engine: LocalEngine, endpoint: CoreEndpoint, on_lost: Callable[[str], None] = lambda identity: None
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._on_lost = on_lost
        self._build = messages.build_id()
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.ROUTER)
        self._lock = threading.Lock()
        """Of `_events`."""
        self._frontends: dict[bytes, _Frontend] = {}
        self._state: CoreState | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        for socket in (self._requests, self._events):
            socket.sndhwm = socket.rcvhwm = MAX_WAITING_MESSAGES
            socket.linger = _LINGER_MS
        self._events.router_mandatory = True
        self._requests.bind(self._endpoint.requests)
        self._events.bind(self._endpoint.events)
        self._loop.add_reader(self._requests.FD, self._receive)
        self._engine.on_status_change(lambda _: self.call(self._publish_state))
        self._engine.on_acquitted(lambda fingerprint: self.call(lambda: self._send_all(Acquitted(fingerprint))))
        self.run(self._publish_states())

    def drop_frontend(self, identity: str) -> None:
        """A front end has died: cancel its requests."""
        frontend = self._frontends.pop(identity.encode(), None)
        if frontend is not None:
            frontend.end()

    async def close(self) -> None:
        """Send what waits to be sent, at most for a second, and stop listening."""
        if self._is_closed:
            return
        for identity in list(self._frontends):
            self.drop_frontend(identity.decode())
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._requests.FD)
        with self._lock:
            self._is_closed = True
            self._requests.close()
            self._events.close()
        await asyncio.to_thread(self._context.term)

    def send(self, frontend: _Frontend, message: messages.FromCore) -> bool:
        """From any thread: send, without waiting. False if the front end cannot be reached."""
        data = messages.encode(message)
        try:
            with self._lock:
                if not self._is_closed:
                    self._events.send_multipart((frontend.identity, data), zmq.NOBLOCK)
            return True
        except zmq.Again:
            if not frontend.is_gone:
                frontend.is_gone = True
                _log.error("%s does not read, and is dropped", frontend.identity.decode())
                self._on_lost(frontend.identity.decode())
                self.call(lambda: self.drop_frontend(frontend.identity.decode()))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return False

    def call(self, callback: Callable[[], object]) -> None:
        """From any thread: have the event loop call this. Without effect once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until it ends or this closes."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _receive(self) -> None:
        for _ in range(_MAX_READ_AT_ONCE):
            if self._is_closed:
                return
            try:
                identity, data, *frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:  # the descriptor tells of changes alone, so that all had to be read
                return
            try:
                self._take(identity, messages.decode_to_core(data), frames)
            except msgspec.MsgspecError:
                _log.exception("a message of %s cannot be read: it runs another build", identity.decode())
            except Exception:
                _log.exception("a message of %s failed", identity.decode())
        self._loop.call_soon(self._receive)

    def _take(self, identity: bytes, message: ToCore, frames: list[bytes]) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        frontend = self._frontends.get(identity)
        if frontend is None:  # it was dropped, or speaks to the process that was here before
            return
        if isinstance(message, Submit):
            self._submit(frontend, message)
        elif isinstance(message, Cancel):
            for id in message.ids:
                if (stream := frontend.streams.get(id)) is not None:
                    stream.cancel()
        elif isinstance(message, OnlyEnd):
            for id in message.ids:
                if (stream := frontend.streams.get(id)) is not None:
                    stream.wants_only_end = True
        elif isinstance(message, Pixels):
            frontend.take_pixels(message, frames)
        elif isinstance(message, Suspect):
            self._engine.suspect(message.fingerprints)
        elif isinstance(message, Refuse):
            self._engine.refuse(message.fingerprints)
        elif isinstance(message, Release):
            frontend.release(message.number)
        else:
            frontend.tasks[message.number] = task = self.run(self._operate(frontend, message))
            task.add_done_callback(lambda _: frontend.tasks.pop(message.number, None))

    def _greet(self, identity: bytes, message: Hello) -> None:
        frontend = self._frontends.get(identity) or _Frontend(identity, self)
        welcome = Welcome(self._build, self._engine.info, os.getpid())
        if self.send(frontend, welcome) and message.build == self._build:
            self._frontends[identity] = frontend
            self.send(frontend, self._current_state())

    def _submit(self, frontend: _Frontend, message: Submit) -> None:
        streams: list[Stream] = [_ForwardedStream(frontend, id) for id in message.ids]
        request = messages.decode_request(
            message.request, lambda summary: _FetchedImage(frontend, message.ids[0], summary)
        )
        self._engine.submit_to(
            streams,
            request,
            deadline_s=_remaining_s(message.deadline),
            tenant=message.tenant,
            namespace=message.namespace,
        )

    async def _operate(self, frontend: _Frontend, message: Operation) -> None:
        engine, number = self._engine, message.number
        try:
            if isinstance(message, Expect):
                await self._expect(frontend, message)
                return
            if isinstance(message, ClearCache):
                answer = Answer(number, cleared=await engine.clear_cache(message.namespace))
            elif isinstance(message, ForgetImage):
                answer = Answer(number, cleared=await engine.forget_image(message.digest, message.namespace))
            elif isinstance(message, AdapterNames):
                answer = Answer(number, names=tuple(await engine.adapter_names()))
            elif isinstance(message, LoadAdapter):
                answer = Answer(number, adapter=await engine.load_adapter(message.name))
            else:
                assert isinstance(message, UnloadAdapter)
                answer = Answer(number, adapter=await engine.unload_adapter(message.name))
        except KestrelError as error:
            answer = Answer(number, error=messages.encode_error(error))
        except Exception as error:
            _log.exception("an operation failed")
            answer = Answer(number, error=messages.encode_error(InternalError(error)))
        self.send(frontend, answer)

    async def _expect(self, frontend: _Frontend, message: Expect) -> None:
        request = messages.decode_request(message.request, lambda summary: _FetchedImage(frontend, 0, summary))
        deadline_s = _remaining_s(message.deadline)
        released = frontend.released[message.number] = asyncio.Event()
        try:
            async with self._engine.expecting(request, deadline_s=deadline_s, tenant=message.tenant):
                self.send(frontend, Answer(message.number))
                await released.wait()
        finally:
            frontend.released.pop(message.number, None)

    def _current_state(self) -> CoreState:
        engine = self._engine
        return CoreState(engine.status, engine.load(), tuple(engine.adapters()))

    def _publish_state(self) -> None:
        state = self._current_state()
        if self._state is None or _without_ages(state) != _without_ages(self._state):
            self._state = state
            self._send_all(state)

    def _send_all(self, message: messages.FromCore) -> None:
        for frontend in list(self._frontends.values()):
            self.send(frontend, message)

    async def _publish_states(self) -> None:
        while True:
            self._publish_state()
            await asyncio.sleep(_STATE_INTERVAL_S)


class _Frontend:
    """One front end: what it has asked for and what it has been asked for. Belongs to the event loop."""

    def __init__(self, identity: bytes, server: CoreServer) -> None:
        self.identity = identity
        self.is_gone = False
        self.streams: dict[int, _ForwardedStream] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Of operations, by number."""
        self.released: dict[int, asyncio.Event] = {}
        """Of places in the queue, by the numbers of their operations."""
        self._server = server
        self._numbers = itertools.count()
        self._awaited: dict[int, Future[RawImage]] = {}

    def post(self, deliveries: Iterable[Delivery]) -> None:
        """From any thread: send events of streams. Those that are over end here, too."""
        items: list[messages.EventsOf] = []
        ended: list[_ForwardedStream] = []
        for stream, events, error in deliveries:
            assert isinstance(stream, _ForwardedStream)
            if isinstance(error, InternalError):
                _log.error("a request failed", exc_info=error.__cause__)
            items.append(events_of(stream.id, events, error))
            if error is not None or (events and isinstance(events[-1], Finished)):
                ended.append(stream)
        if not self.is_gone:
            self._server.send(self, Events(tuple(items)))
        if ended:
            self._server.call(lambda: _end_all(ended))

    def call(self, callback: Callable[[], object]) -> None:
        """From any thread: have the event loop call this."""
        self._server.call(callback)

    def ask_for_pixels(self, id: int) -> tuple[int, Future[RawImage]]:
        """From any thread: the number of the question, and what will be the decoded image of a request."""
        arrival: Future[RawImage] = Future()
        number = next(self._numbers)
        self._awaited[number] = arrival
        if self.is_gone or not self._server.send(self, NeedPixels(number, id)):
            arrival.set_exception(EngineUnavailable("the front end has gone"))
        return number, arrival

    def forget_pixels(self, number: int) -> None:
        """From any thread: nobody waits for them any more."""
        self._awaited.pop(number, None)

    def take_pixels(self, message: Pixels, frames: list[bytes]) -> None:
        """Pixels have come, or an error."""
        arrival = self._awaited.pop(message.number, None)
        if arrival is None or arrival.done():
            return
        if message.error is not None:
            arrival.set_exception(messages.decode_error(message.error))
        else:
            arrival.set_result(RawImage.packed(frames[0], message.width_px, message.height_px, PixelFormat.RGB8))

    def release(self, number: int) -> None:
        """Give a place in the queue back, or stop waiting for it."""
        if (released := self.released.get(number)) is not None:
            released.set()
        elif (task := self.tasks.get(number)) is not None:
            task.cancel()

    def end(self) -> None:
        """It has gone: end all that it has asked for."""
        self.is_gone = True
        for stream in list(self.streams.values()):
            stream.cancel()
        for task in list(self.tasks.values()):
            task.cancel()
        for arrival in list(self._awaited.values()):
            if not arrival.done():
                arrival.set_exception(EngineUnavailable("the front end has gone"))


class _ForwardedStream(Stream):
    """A stream whose events go to a front end."""

    def __init__(self, frontend: _Frontend, id: int) -> None:
        super().__init__()
        self.id = id
        self._frontend = frontend
        frontend.streams[id] = self

    @property
    def destination(self) -> Hashable:
        return self._frontend

    @staticmethod
    def post(destination: _Frontend, deliveries: list[Delivery]) -> None:
        destination.post(deliveries)

    def fail(self, error: KestrelError) -> None:
        # After what the event loop does now: who waited too long is told that, not that preparation was cancelled.
        self._frontend.call(lambda: self.deliver([], error))

    def deliver(self, events: list[Event], error: KestrelError | None = None) -> None:
        if not self.over.done():
            self._frontend.post([Delivery(self, events, error)])
            if error is not None:
                self._end()

    def refuse(self, error: KestrelError) -> None:
        if not self.over.done():
            self._frontend.post([Delivery(self, [], error)])
            super().refuse(error)

    def end(self) -> None:
        """Its last event has been sent."""
        if not self.over.done():
            self._end()

    def _end(self) -> None:
        self._frontend.streams.pop(self.id, None)
        super()._end()


class _FetchedImage(RemoteImage):
    """The image of a request of a front end."""

    def __init__(self, frontend: _Frontend, id: int, summary: ImageSummary) -> None:
        self.digest = summary.digest
        self.num_bytes = summary.num_bytes
        self.width_px = summary.width_px
        self.height_px = summary.height_px
        self._frontend = frontend
        self._id = id

    def fetch(self, check_wanted: Callable[[], None]) -> RawImage:
        number, arrival = self._frontend.ask_for_pixels(self._id)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return arrival.result(_WANTED_INTERVAL_S)
                check_wanted()
        finally:
            self._frontend.forget_pixels(number)


def _end_all(streams: list[_ForwardedStream]) -> None:
    for stream in streams:
        stream.end()


def _remaining_s(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()


def _without_ages(state: CoreState) -> tuple[Any, ...]:
    load = state.load
    caches = (replace(cache, oldest_age_s=None) for cache in (load.prefix_cache, load.image_cache))
    prefix_cache, image_cache = caches
    return state.status, replace(load, prefix_cache=prefix_cache, image_cache=image_cache), state.adapters
