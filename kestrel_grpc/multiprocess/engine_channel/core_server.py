"""Serves an engine core: takes requests of front ends from a socket, and sends them the engine's events.

     front end                 event loop                       engine thread
     requests ───────────────▶ decode, submit ────────────────▶ …
     events ◀───────────────── answers, state ◀── (a lock) ───◀ events of a turn, once to each front end

The event loop alone reads; any thread sends, so that events take no detour through the event loop. A front end that
does not read is dropped: sending never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec

from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.connection import MAX_UNSENT_BYTES, Connection
from kestrel_grpc.multiprocess.protocol.errors import decode_error, encode_error
from kestrel_grpc.multiprocess.protocol.questions import Exchange, Message
from kestrel_grpc.multiprocess.protocol.requests import ImageSummary, decode_request
from kestrel_runtime.api.errors import EngineUnavailable, InternalError, KestrelError
from kestrel_runtime.api.events import EmbedOutput, Event, Finished, PatchEmbeddings
from kestrel_runtime.api.images import DecodedPixels, RemoteImage
from kestrel_runtime.api.stream import Delivery, Stream
from kestrel_runtime.engine.engine import LocalEngine

_STATE_INTERVAL_S = 0.1
_SAID_AGAIN = 3
"""The looks at the state after which it is sent even if unchanged. A front end that gets no message treats the core
as stopped."""
_LISTENS = 50
"""Looks at the state between two checks that the socket is still in its folder."""
_WANTED_INTERVAL_S = 0.1
_LINGER_S = 1.0
_ACCEPT_AGAIN_S = 0.1
_MAX_UNACCEPTED = 128

_log = logging.getLogger(__name__)


class CoreServer:
    """The server of one engine. Belongs to the event loop that `start` was called on.

    `on_lost` is called, in any thread, with the identity of a front end that does not read: it must be ended.
    """

    def __init__(
        self, engine: LocalEngine, endpoint: CoreEndpoint, on_lost: Callable[[str], None] = lambda identity: None
    ) -> None:
        self.engine = engine
        self._endpoint = endpoint
        self._on_lost = on_lost
        self._build = messages.build_id()
        self._listener: socket.socket
        self._frontends: dict[str, _Frontend] = {}
        """Front ends that have greeted, by identity."""
        self._strangers: set[_Frontend] = set()
        """Front ends that have connected and not greeted."""
        self._state: messages.CoreState | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start to listen and to publish the state."""
        self._loop = asyncio.get_running_loop()
        self._endpoint.path.unlink(missing_ok=True)
        self._listener = self._new_listener()
        self._listen()
        self.engine.on_status_change(lambda _: self.call(self._publish_state))
        self.engine.on_completed_alone(
            lambda fingerprint: self.call(lambda: self._send_all(messages.CompletedAlone(fingerprint)))
        )
        self.run(self._publish_states())

    def _new_listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._endpoint.path))
            listener.listen(_MAX_UNACCEPTED)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    def drop_frontend(self, identity: str) -> None:
        """Cancel the requests of a front end that has died."""
        frontend = self._frontends.pop(identity, None)
        if frontend is not None:
            frontend.end()

    async def close(self) -> None:
        """Send unsent data, for at most a second, and stop listening."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        frontends = [*self._frontends.values(), *self._strangers]
        for frontend in frontends:
            frontend.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await asyncio.gather(*(frontend.connection.sent() for frontend in frontends))
        for frontend in frontends:
            frontend.end()

    def send(self, frontend: _Frontend, message: Message) -> bool:
        """Send a message without waiting, from any thread. Returns False if the front end cannot be reached."""
        if frontend.is_gone:
            return False
        if frontend.connection.send(messages.CODEC.encode((message,))):
            return True
        frontend.is_gone = True
        _log.error("%s does not read, and is dropped", frontend.name)
        self._on_lost(frontend.name)
        self.call(lambda: self.drop(frontend))
        return False

    def call(self, callback: Callable[[], object]) -> None:
        """Have the event loop call this, from any thread. Has no effect once the event loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until it ends or this closes."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # this process has no descriptor left
            _log.warning("a front end cannot be accepted: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        self._strangers.add(_Frontend(stream, self))

    def receive(self, frontend: _Frontend, data: bytes, file: BinaryIO | None) -> None:
        """Handle messages of a front end. The file belongs to the last one."""
        with file or contextlib.nullcontext():
            if self._is_closed:
                return
            try:
                received = messages.CODEC.decode(data)
            except msgspec.MsgspecError:
                _log.exception("a message of %s cannot be read: it runs another build", frontend.name)
                return
            for message in received:
                if not frontend.is_gone:
                    frontend.take(message, file)

    def drop(self, frontend: _Frontend) -> None:
        """Cancel the requests of a front end that has closed its connection, or does not read."""
        if self._frontends.get(frontend.name) is frontend:
            del self._frontends[frontend.name]
        self._strangers.discard(frontend)
        frontend.end()

    def greet(self, frontend: _Frontend, hello: messages.Hello) -> None:
        """Answer the first message of a front end, and serve it if it runs this build."""
        frontend.name = hello.identity
        own = messages.Hello(self._build, f"core-{self._endpoint.index}")
        if not self.send(frontend, own) or hello.build != self._build:
            return
        self._strangers.discard(frontend)
        self._frontends[frontend.name] = frontend
        frontend.serve()
        self.send(frontend, messages.Welcome(self.engine.info, os.getpid()))
        self.send(frontend, self._current_state())

    def _current_state(self) -> messages.CoreState:
        engine = self.engine
        return messages.CoreState(engine.status, engine.load(), tuple(engine.adapters()))

    def _publish_state(self, *, is_due: bool = False) -> None:
        state = self._current_state()
        if is_due or self._state is None or _without_ages(state) != _without_ages(self._state):
            self._state = state
            self._send_all(state)

    def _send_all(self, message: Message) -> None:
        for frontend in list(self._frontends.values()):
            self.send(frontend, message)

    async def _publish_states(self) -> None:
        for number in itertools.count():
            self._publish_state(is_due=number % _SAID_AGAIN == 0)
            if number % _LISTENS == 0:
                self._listen_again()
            await asyncio.sleep(_STATE_INTERVAL_S)

    def _listen_again(self) -> None:
        """Listen on a new socket if a cleaner of folders has removed the file of this one."""
        if self._endpoint.path.exists() or not self._endpoint.folder.is_dir():
            return
        _log.warning("the socket %s was removed; there is a new one", self._endpoint.path)
        before = self._listener
        try:
            self._listener = self._new_listener()
        except OSError as error:
            _log.error("cannot listen on %s: %s", self._endpoint.path, error)
            return
        self._loop.remove_reader(before.fileno())
        before.close()
        self._listen()


class _Frontend(Exchange):
    """One front end: its requests and questions, and the pixels it is asked for. Belongs to the event loop."""

    def __init__(self, stream: socket.socket, server: CoreServer) -> None:
        super().__init__("a new front end")
        self.is_gone = False
        self.loop = asyncio.get_running_loop()
        self.connection = Connection(
            stream,
            lambda data, file: server.receive(self, data, file),
            lambda: server.drop(self),
        )
        self.streams: dict[int, _ForwardedStream] = {}
        """The front end's requests, by id."""
        self._places: dict[int, asyncio.Task[None]] = {}
        """The tasks that hold, or wait for, places in the queue."""
        self._server = server
        self._numbers = itertools.count()
        self._awaited: dict[int, Future[DecodedPixels]] = {}
        self._file: BinaryIO | None = None
        """The file that was sent with the message that is handled now."""
        self.on(messages.Hello, lambda hello: server.greet(self, hello))

    def serve(self) -> None:
        """Handle all messages from now on."""
        engine = self._server.engine
        self.on(messages.Submit, self._submit)
        self.on(messages.Cancel, self._cancel_streams)
        self.on(messages.OnlyEnd, self._want_only_end)
        self.on(messages.Pixels, self._take_pixels)
        self.on(messages.Isolate, lambda message: engine.isolate(message.fingerprints))
        self.on(messages.Quarantine, lambda message: engine.quarantine(message.fingerprints))
        self.on(messages.Expect, self._expect)
        self.on(messages.Release, self._release)
        self.on(messages.ClearCache, lambda asked: engine.clear_cache(asked.namespace))
        self.on(messages.ForgetImage, lambda asked: engine.forget_image(asked.digest, asked.namespace))
        self.on(messages.AdapterNames, lambda _: engine.adapter_names())
        self.on(messages.LoadAdapter, lambda asked: engine.load_adapter(asked.name))
        self.on(messages.UnloadAdapter, lambda asked: engine.unload_adapter(asked.name))
        self.on(messages.CheckAdapter, lambda asked: engine.check_adapter(asked.folder, asked.name))
        self.on(messages.AdapterChanged, lambda asked: engine.adapter_changed(asked.name))

    def notify(self, note: Message) -> None:
        self._server.send(self, note)

    def take(self, message: Message, file: BinaryIO | None) -> None:
        """Handle a message, with the file of its frame."""
        self._file = file
        self.handle(message)

    def _submit(self, message: messages.Submit) -> None:
        ids, numbers = message.ids, itertools.count()
        streams: list[Stream] = [_ForwardedStream(self, id) for id in ids]
        try:
            request = decode_request(
                message.request, lambda summary: _FetchedImage(self, ids[0], next(numbers), summary)
            )
        except Exception as error:  # a fault of ours must not keep the caller waiting
            for stream in streams:
                stream.refuse(InternalError(error))
            return
        self._server.engine.submit_to(
            streams,
            request,
            deadline=message.deadline,
            tenant=message.tenant,
            namespace=message.namespace,
            fingerprints=message.fingerprints,
        )

    def _cancel_streams(self, message: messages.Cancel) -> None:
        for id in message.ids:
            if (stream := self.streams.get(id)) is not None:
                stream.cancel()

    def _want_only_end(self, message: messages.OnlyEnd) -> None:
        for id in message.ids:
            if (stream := self.streams.get(id)) is not None:
                stream.wants_only_end = True

    def _expect(self, asked: messages.Expect) -> Awaitable[None]:
        """Returns a future that is done once the front end has a place in the queue, which a task then holds."""
        granted: asyncio.Future[None] = self.loop.create_future()
        # Known before the next message is handled, which may release it.
        self._places[asked.place] = holding = self._server.run(self._hold_place(asked, granted))

        def end(_: object) -> None:
            self._places.pop(asked.place, None)
            granted.cancel()

        holding.add_done_callback(end)
        return granted

    async def _hold_place(self, asked: messages.Expect, granted: asyncio.Future[None]) -> None:
        try:
            request = decode_request(asked.request, lambda summary: _FetchedImage(self, 0, 0, summary))
            async with self._server.engine.expecting(request, deadline=asked.deadline, tenant=asked.tenant):
                granted.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if granted.done():
                raise
            granted.set_exception(error)

    def _release(self, message: messages.Release) -> None:
        if (holding := self._places.get(message.place)) is not None:
            holding.cancel()

    def post(self, deliveries: Iterable[Delivery]) -> None:
        """Send events of streams, from any thread. Ends the streams that are over."""
        items: list[messages.EventsOf] = []
        # Each large item has its own message: the front end serves other callers between two messages.
        large: list[messages.EventsOf] = []
        ended: list[_ForwardedStream] = []
        for stream, events, error in deliveries:
            assert isinstance(stream, _ForwardedStream)
            last = events[-1] if events else None
            if error is not None:
                if isinstance(error, InternalError):
                    _log.error("a request failed", exc_info=error.__cause__)
                items.append(messages.EventsOf(stream.id, events, encode_error(error)))
            elif not isinstance(last, Finished):
                items.append(messages.EventsOf(stream.id, events))
                continue
            elif isinstance(last.output, EmbedOutput):
                large += self._embeddings_of(stream.id, events, large)
            else:
                (large if last.is_large else items).append(messages.EventsOf(stream.id, events))
            ended.append(stream)
        for together in (items, *([item] for item in large)):
            if together and not self.is_gone:
                self._server.send(self, messages.Events(together))
        if ended:
            self._server.call(lambda: _end_all(ended))

    def _embeddings_of(
        self, id: int, events: list[Event], others: Iterable[messages.EventsOf]
    ) -> list[messages.EventsOf]:
        """Returns the events of a request for embeddings, which come all at once, or an error in their place.

        They and `others` leave half of what may be unsent to the events of other requests.
        """
        num_bytes = sum(
            len(event.data)
            for event in itertools.chain(events, *(item.events for item in others))
            if isinstance(event, PatchEmbeddings)
        )
        if num_bytes > MAX_UNSENT_BYTES // 2 - self.connection.num_unsent_bytes:
            error = EngineUnavailable("the front end does not read fast enough")
            return [messages.EventsOf(id, [], encode_error(error))]
        return [messages.EventsOf(id, [event]) for event in events]

    def call(self, callback: Callable[[], object]) -> None:
        """Have the event loop call this, from any thread."""
        self._server.call(callback)

    def ask_for_pixels(self, id: int, image: int) -> tuple[int, Future[DecodedPixels]]:
        """Ask for the pixels of an image of a request, by its number, from any thread; returns the number of the
        question and a future."""
        arrival: Future[DecodedPixels] = Future()
        number = next(self._numbers)
        self._awaited[number] = arrival
        if self.is_gone or not self._server.send(self, messages.NeedPixels(number, id, image)):
            arrival.set_exception(EngineUnavailable("the front end has gone"))
        return number, arrival

    def forget_pixels(self, number: int) -> None:
        """Forget a question for pixels whose request no longer waits, from any thread."""
        self._awaited.pop(number, None)

    def _take_pixels(self, message: messages.Pixels) -> None:
        """Resolve the question that these pixels, or this error, answer."""
        arrival = self._awaited.pop(message.number, None)
        if arrival is None or arrival.done():
            return
        if message.error is not None:
            arrival.set_exception(decode_error(message.error))
            return
        try:
            if (file := self._file) is None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            # Nothing is written; tensors of memory that must not be are warned about.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            _log.warning("the pixels of an image cannot be mapped: %s", error)
            arrival.set_exception(EngineUnavailable(f"an image cannot be shared: {error.strerror}"))
        else:
            arrival.set_result(DecodedPixels(memoryview(mapped), message.width_px, message.height_px))

    def end(self) -> None:
        """End the connection, and all requests and questions of the front end."""
        self.is_gone = True
        self.connection.close()
        self.cancel()

    def cancel(self) -> None:
        """End all requests and questions of the front end."""
        for stream in list(self.streams.values()):
            stream.cancel()
        for holding in list(self._places.values()):
            holding.cancel()
        self.cancel_handlers()
        for arrival in list(self._awaited.values()):
            if not arrival.done():
                arrival.set_exception(EngineUnavailable("the front end has gone"))


class _ForwardedStream(Stream):
    """A stream whose events go to a front end."""

    def __init__(self, frontend: _Frontend, id: int) -> None:
        super().__init__(frontend.loop)
        self.id = id
        self.destination = self._frontend = frontend
        frontend.streams[id] = self

    @staticmethod
    def post(destination: _Frontend, deliveries: list[Delivery]) -> None:
        destination.post(deliveries)

    def fail(self, error: KestrelError) -> None:
        # Runs after the current callback of the event loop: if the caller waited too long, that error is delivered
        # rather than that of the cancelled preparation.
        self._frontend.call(lambda: self.deliver([], error))

    def deliver(self, events: list[Event], error: KestrelError | None = None) -> None:
        if not self.over.done():
            self._frontend.post([(self, events, error)])
            if error is not None:
                self._end()

    def refuse(self, error: KestrelError) -> None:
        if not self.over.done():
            self._frontend.post([(self, [], error)])
            super().refuse(error)

    def end(self) -> None:
        """End the stream, whose last event has been sent."""
        if not self.over.done():
            self._end()

    def _end(self) -> None:
        self._frontend.streams.pop(self.id, None)
        super()._end()


class _FetchedImage(RemoteImage):
    """An image of a front end's request, whose pixels the front end sends if they are needed."""

    def __init__(self, frontend: _Frontend, id: int, number: int, summary: ImageSummary) -> None:
        self.digest = summary.digest
        self.num_bytes = summary.num_bytes
        self.width_px = summary.width_px
        self.height_px = summary.height_px
        self._frontend = frontend
        self._id, self._number = id, number

    def fetch(self, check_wanted: Callable[[], None]) -> DecodedPixels:
        number, arrival = self._frontend.ask_for_pixels(self._id, self._number)
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


def _without_ages(state: messages.CoreState) -> tuple[Any, ...]:
    load = state.load
    caches = (load.prefix_cache, load.image_cache, load.crop_cache)
    prefix_cache, image_cache, crop_cache = (replace(cache, oldest_age_s=None) for cache in caches)
    load = replace(load, prefix_cache=prefix_cache, image_cache=image_cache, crop_cache=crop_cache)
    return state.status, load, state.adapters
