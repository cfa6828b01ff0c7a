"""Implements the engine for a front end, over engine cores in other processes. Needs no torch.

The front end checks requests, reads the headers of images and hashes them; a core gets the digest. If the core has
the image in no cache, it asks for the pixels once it has memory for them; the front end then decodes the image.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, BinaryIO, Self, TypeVar

from kestrel_grpc.multiprocess.engine_channel.core_connection import NO_LOAD, CoreConnection
from kestrel_grpc.multiprocess.engine_channel.core_deaths import CoreDeaths, ended_error
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.routing import choose
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.connection import shared_file
from kestrel_grpc.multiprocess.protocol.errors import decode_error, encode_error
from kestrel_grpc.multiprocess.protocol.questions import AnswerType, Message, Question
from kestrel_grpc.multiprocess.protocol.requests import ImageSummary, encode_request
from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad
from kestrel_runtime.api.engine import (
    CacheLoad,
    ClearedCache,
    CoreReading,
    EngineStatus,
    ImageInfo,
    Load,
)
from kestrel_runtime.api.errors import (
    EngineUnavailable,
    ImageError,
    InternalError,
    InvalidRequest,
    KestrelError,
    Violation,
    drop_tracebacks,
)
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.images import Image, RemoteImage, image_digest, is_hashed_at_once
from kestrel_runtime.api.requests import Request, locate, parts_of
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.flight_record import FlightRecord
from kestrel_runtime.engine.poison_requests import fingerprint_of
from kestrel_runtime.engine.recent import LruCache
from kestrel_runtime.engine.workers import Interrupted, Job, Workers
from kestrel_runtime.fairness.image_budget import MAX_DECODING_BYTES, MemoryBudget
from kestrel_runtime.imaging.decoding import decode_image, inspect_image, pixel_parts
from kestrel_runtime.imaging.header import ImageHeader

_LATE_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_CHANGE_TIMEOUT_S = 2.0
_PIXEL_BYTES = 4
_AHEAD_LOAD, _MAX_AHEAD_BYTES = 4, 32 * 2**20
"""The most requests of a core, and bytes for decoding, with which an image is decoded before the core asks."""
_MAX_SEEN_IMAGES = 4096
_LOOK_INTERVAL_S = 0.5
"""The time between two looks at which cores have sent a message; they send three a second."""

_SharedPixels = tuple[int, int, BinaryIO]
"""The width, height and pixels of a decoded image, as in `Pixels`."""
Result = TypeVar("Result")
Summable = TypeVar("Summable", Load, CacheLoad, AdapterLoad, ClearedCache)

_log = logging.getLogger(__name__)


class EngineClient:
    """An `api.engine.Engine` over engine cores. Belongs to the event loop that it was created on.

    Call `core_gone` and `core_ready` when the process of a core has ended or is ready.
    """

    def __init__(self, cores: Sequence[CoreConnection]) -> None:
        """Use `connect`."""
        (info, *_) = [core.info for core in cores if core.is_connected]
        self.info = replace(info, max_batch_size=info.max_batch_size * len(cores))
        config = self.info.config
        self._budget = MemoryBudget(config.max_decoded_image_bytes or 2 * MAX_DECODING_BYTES)
        self._workers = Workers(
            config.num_preprocess_threads, "kestrel-decode", self._budget, ageing_s=config.ageing_s
        )
        self._loop = asyncio.get_running_loop()
        self._cores = cores
        self._streams: dict[int, _RemoteStream] = {}  # that are not over, by id
        self._ids = itertools.count(1)
        self._status = EngineStatus.RECOVERING
        self._is_draining = self._is_closed = False
        self._callbacks: list[Callable[[EngineStatus], None]] = []
        self._deaths = CoreDeaths()
        self._seen_images: LruCache[tuple[str, bytes], ImageHeader] = LruCache(_MAX_SEEN_IMAGES)
        """Headers of seen images by namespace and digest. Namespaces share none, since a request's duration reveals
        a hit."""
        self._late: dict[int, asyncio.Task[None]] = {}
        """Connections to cores that did not answer at first, by index."""
        for core in cores:
            self._listen_to(core)
        self._update_status()
        self._watching = None if len(cores) == 1 else self._loop.create_task(self._watch_cores())

    def _listen_to(self, core: CoreConnection) -> None:
        core.serve(self._update_status, self._undelivered)
        core.on(messages.Events, lambda message: self._deliver(core, message))
        core.on(messages.NeedPixels, lambda message: self._give_pixels(core, message))
        core.on(messages.CompletedAlone, lambda message: self._deaths.completed_alone(message.fingerprint))

    @classmethod
    async def connect(
        cls, endpoints: Sequence[CoreEndpoint], identity: str, *, absent: Collection[int] = ()
    ) -> Self:
        """Connect to the cores, and return once each has answered, except for the `absent` ones.

        `core_ready` is called later for absent cores. A core that has not answered a moment after the first one is
        used once it answers, or when `core_ready` is called. `identity` is unique among all processes of this
        server, earlier ones included. Raises `BuildMismatch`.
        """
        build = messages.build_id()
        cores = [CoreConnection(endpoint, identity, build) for endpoint in endpoints]
        connecting = {
            core.index: asyncio.ensure_future(core.connect()) for core in cores if core.index not in absent
        }
        try:
            await asyncio.wait(connecting.values(), return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(connecting.values(), timeout=_LATE_S)
            for task in done:
                task.result()
        except BaseException:
            for task in connecting.values():
                task.cancel()
            for core in cores:
                core.end()
            raise
        client = cls(cores)
        for core in cores:
            if core.index in connecting and not connecting[core.index].done():
                client._await_late(core, connecting[core.index])
        return client

    def _await_late(self, core: CoreConnection, connecting: asyncio.Task[None]) -> None:
        """Use a core that is slow to answer once it has answered."""
        _log.warning("core %d does not answer", core.index)
        self._late[core.index] = connecting

        def use(done: asyncio.Task[None]) -> None:
            self._late.pop(core.index, None)
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                _log.error("core %d cannot be used: %s", core.index, error)
                return
            _log.warning("core %d answers", core.index)
            self._send_quarantine(core)
            self._update_status()

        connecting.add_done_callback(use)

    def _forget_late(self, index: int) -> None:
        if (connecting := self._late.pop(index, None)) is not None:
            connecting.cancel()

    def core_gone(self, index: int, *, is_fault: bool = True) -> None:
        """Submit the requests of an ended core again, or end them, as `core_deaths.py` draws.

        `is_fault`: False if the process was killed from outside.
        """
        core = self._cores[index]
        self._forget_late(index)
        core.end()
        self._deaths.record(FlightRecord.read(core.flight_record), is_fault=is_fault)
        for other in self._cores:
            self._send_quarantine(other)
        self._update_status()
        for call in self._calls_of(core):
            errors = [self._deaths.error_of(name, has_events=call.has_events) for name in call.fingerprints]
            if (error := next(filter(None, errors), None)) is None:
                self._send(call)
            else:
                call.fail(error)

    async def core_ready(self, index: int) -> None:
        """Connect to a new process of a core, which listens. Raises `BuildMismatch`."""
        self._forget_late(index)
        await self._cores[index].connect()
        self._send_quarantine(self._cores[index])
        self._update_status()

    def _send_quarantine(self, core: CoreConnection) -> None:
        """Send a core the requests to isolate and to quarantine, before it gets them again."""
        for note in self._deaths.notes():
            core.notify(note)

    @property
    def status(self) -> EngineStatus:
        """SERVING while a core serves and this front end does not drain."""
        return self._status

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Call `callback` at every change, on the event loop."""
        self._callbacks.append(callback)

    def submit_samples(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        route: str = "",
    ) -> list[Stream]:
        """Send a request to a core; see `api.engine.Engine.submit_samples`."""
        images = request.images
        call = _Call(request, images, deadline, tenant, namespace, route)
        streams = [_RemoteStream(next(self._ids), call, self._streams) for _ in parts_of(request)]
        call.streams, call.num_open = tuple(streams), len(streams)
        call.ids = tuple([stream.id for stream in streams])
        try:
            self._check(request)
            if all(map(is_hashed_at_once, images)):
                call.digests = tuple(map(image_digest, images))
            for number, image in enumerate(images):
                try:
                    call.headers.append(self._header_of(call, number, image))
                except ImageError as error:
                    locate(error, request, number)
                    raise
            for stream in streams:
                self._streams[stream.id] = stream
            if call.digests is None:
                self._hash(call)
            else:
                self._send(call)
            if call.new_images:  # after the request is sent, so that a worker does not delay that
                self._loop.call_soon(self._decode_ahead, call)
        except KestrelError as error:
            call.fail(error)
            drop_tracebacks(error)
        return list(streams)

    @asynccontextmanager
    async def expecting(
        self, request: Request, *, deadline: float | None = None, tenant: str = ""
    ) -> AsyncIterator[None]:
        """Hold a place in the queue of the core with the least load; see `api.engine.Engine.expecting`."""
        self._check(request)
        data = encode_request(request, ())
        core, place = await self._place(data, deadline, tenant)
        try:
            yield
        finally:
            core.notify(messages.Release(place))

    async def _place(self, data: bytes, deadline: float | None, tenant: str) -> tuple[CoreConnection, int]:
        """Returns a core that has a place in its queue, and the number of the place."""
        while True:
            core = self._choose(None)
            place = core.next_place()
            try:
                await core.ask(messages.Expect(place, data, deadline, tenant))
            except BaseException as error:
                core.notify(messages.Release(place))
                if not isinstance(error, _CoreSilent):
                    raise
            else:
                return core, place

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        """Clear the caches of all cores; see `api.engine.Engine.clear_cache`."""
        return _sum_of(await self._ask_all(messages.ClearCache(namespace)))

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        """Forget an image in all cores; see `api.engine.Engine.forget_image`."""
        return _sum_of(await self._ask_all(messages.ForgetImage(digest, namespace)))

    def inspect_image(self, data: bytes) -> ImageInfo:
        """Reads the header of an image file. Raises `ImageError` for a file that requests could not use."""
        self.info.check_image(data)
        header = self._inspect(data)
        return ImageInfo(f"image/{header.format.lower()}", header.width, header.height)

    def adapters(self) -> list[AdapterInfo]:
        """Returns the adapters that are loaded in any core, with the requests of all cores."""
        found: dict[tuple[str, str], AdapterInfo] = {}
        for info in (info for core in self._cores for info in core.state.adapters):
            before = found.get((info.name, info.digest))
            num_requests = info.num_requests + (0 if before is None else before.num_requests)
            found[info.name, info.digest] = replace(before or info, num_requests=num_requests)
        return list(found.values())

    async def adapter_names(self) -> list[str]:
        """Returns the names of adapters that requests may use, at most 1,000, in order."""
        return await self._choose(None).ask(messages.AdapterNames())

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Load an adapter into all cores; see `api.engine.Engine.load_adapter`."""
        return (await self._ask_all(messages.LoadAdapter(name)))[0]

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload an adapter from all cores; see `api.engine.Engine.unload_adapter`."""
        return (await self._ask_all(messages.UnloadAdapter(name)))[0]

    async def check_adapter(self, folder: str, name: str) -> str:
        """Have a core check the files of an upload; see `api.engine.Engine.check_adapter`."""
        return await self._choose(None).ask(messages.CheckAdapter(folder, name))

    async def adapter_changed(self, name: str) -> None:
        """Report new files of an adapter to all cores; see `api.engine.Engine.adapter_changed`.

        A core that does not answer reads the note when it goes on, and one that has ended starts without adapters.
        """
        cores = [core for core in self._cores if core.is_connected]
        answers = await asyncio.gather(
            *(core.ask(messages.AdapterChanged(name), timeout_s=_CHANGE_TIMEOUT_S) for core in cores),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                raise answer

    def load(self) -> Load:
        """Returns the sum of the loads that the cores reported last."""
        return _sum_of([core.state.load for core in self._cores if core.is_connected] or [NO_LOAD])

    def cores(self) -> list[CoreReading]:
        """Returns a reading of each core, from its last report."""
        return [core.reading() for core in self._cores]

    async def drain(self) -> None:
        """Accept no more requests, and return when the running ones have ended."""
        self._is_draining = True
        self._update_status()
        if waiting := [stream.over for stream in self._streams.values()]:
            await asyncio.wait(waiting)

    def close(self) -> None:
        """End all requests and connections. Blocks, unless it is called on the event loop itself."""
        if self._loop.is_closed():
            return
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._close()
        elif self._loop.is_running():
            done = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (self._close(), done.set()))
            done.wait(_CLOSE_TIMEOUT_S)
        self._workers.close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for call in self._calls():
            call.fail(EngineUnavailable("the engine has stopped"))
        for index in tuple(self._late):
            self._forget_late(index)
        for core in self._cores:
            core.end()
        if self._watching is not None:
            self._watching.cancel()
        self._update_status()

    async def _watch_cores(self) -> None:
        """Find cores that have stopped or are too slow, and move the requests that they have not begun."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for core in self._cores:
                core.look()
            for core in self._cores:
                if core.is_silent and core.is_connected:
                    self._move_from(core)

    def _move_from(self, core: CoreConnection) -> None:
        """Move the requests that a silent core has not begun to answer to other cores."""
        if all(other.is_silent for other in self._cores if other.status is EngineStatus.SERVING):
            return
        for call in self._calls_of(core):
            if not call.has_events:
                core.notify(messages.Cancel(call.ids))
                self._send(call)
        core.give_up(_CoreSilent("the engine process does not answer"), messages.Expect)

    def _calls(self) -> list[_Call]:
        """Returns the calls with a stream that is not over, each once."""
        return list({stream.call: None for stream in self._streams.values()})

    def _calls_of(self, core: CoreConnection) -> list[_Call]:
        """Returns those that were sent to a core last."""
        return [call for call in self._calls() if call.core is core]

    def _update_status(self) -> None:
        statuses = {core.status for core in self._cores}
        if self._is_closed:
            status = EngineStatus.DEAD
        elif self._is_draining:
            status = EngineStatus.DRAINING
        else:
            status = EngineStatus.SERVING if EngineStatus.SERVING in statuses else EngineStatus.RECOVERING
        if status is not self._status:
            self._status = status
            for callback in self._callbacks:
                callback(status)

    def _check(self, request: Request) -> None:
        if self._status is not EngineStatus.SERVING:
            raise EngineUnavailable(f"the engine is {self._status.name.lower()}")
        self.info.check(request)

    def _header_of(self, call: _Call, number: int, image: Image) -> ImageHeader:
        """Returns the header of an image, which is not read again if its digest is known."""
        if call.digests is None:
            return self._inspect(image)
        key = call.namespace, call.digests[number]
        header = self._seen_images.get(key)
        if header is None:
            header = self._inspect(image)
            self._seen_images.put(key, header)
            call.new_images.append(number)
        return header

    def _inspect(self, image: Image) -> ImageHeader:
        header = inspect_image(image, max_image_pixels=self.info.config.max_image_pixels)
        self._budget.check_image(_decoding_bytes(header))
        return header

    def _hash(self, call: _Call) -> None:
        """Have a worker hash large images, and send the request then."""
        hashing = self._submit_job(call, lambda: tuple(map(image_digest, call.images)))
        self._then(hashing, lambda done: self._send_hashed(call, done))

    def _send_hashed(self, call: _Call, done: Future[tuple[bytes, ...]]) -> None:
        if not call.is_over:
            if done.cancelled():
                call.fail(EngineUnavailable("the engine has stopped"))
            else:
                call.digests = done.result()
                self._send(call)

    def _choose(self, key: bytes | None) -> CoreConnection:
        serving = [core for core in self._cores if core.status is EngineStatus.SERVING]
        if not serving:
            raise ended_error()
        return choose([core for core in serving if not core.is_silent] or serving, key)

    def _send(self, call: _Call) -> None:
        """Send a call to the core that its route or its first image selects now."""
        try:
            core = self._choose(call.routing_key)
            call.core = core
            summaries = [
                ImageSummary(digest, len(image), header.width, header.height)
                for image, header, digest in zip(call.images, call.headers, call.digests or (), strict=True)
            ]
            data = encode_request(call.request, summaries)
            # Here, since the front ends have more processors than a core.
            if not call.fingerprints:
                parts = parts_of(call.request)
                call.fingerprints = tuple([fingerprint_of(part, call.digests) for part in parts])
            core.notify(
                messages.Submit(call.ids, call.fingerprints, data, call.deadline, call.tenant, call.namespace)
            )
            core.num_sent += len(call.ids)
        except KestrelError as error:
            call.fail(error)
        except UnicodeEncodeError:  # half of a surrogate pair, which MessagePack does not have
            call.fail(InvalidRequest((Violation("request", "must be valid Unicode"),)))

    def _deliver(self, core: CoreConnection, message: messages.Events) -> None:
        for item in message.of_requests:
            stream = self._streams.get(item.id)
            if stream is None or stream.call.core is not core:
                continue
            call = stream.call
            call.has_events = True
            if call.pixels:
                call.drop_pixels()
            error = None if item.error is None else decode_error(item.error)
            assert error is None or isinstance(error, KestrelError), "an engine raises no others"
            if self._deaths.has_counts and item.events and isinstance(item.events[-1], Finished):
                self._deaths.completed(call.fingerprints[call.ids.index(item.id)])
            stream.deliver(item.events, error)

    def _call_of(self, id: int) -> _Call | None:
        """Returns the call with this id, even if the stream of the id has ended before those of other samples."""
        stream = self._streams.get(id)
        return next((call for call in self._calls() if id in call.ids), None) if stream is None else stream.call

    def _undelivered(self, undelivered: Sequence[Message]) -> None:
        """End the requests in messages that a core does not read."""
        for message in undelivered:
            if isinstance(message, messages.Submit) and (call := self._call_of(message.ids[0])) is not None:
                call.fail(EngineUnavailable("the engine process does not read"))
            elif isinstance(message, messages.Pixels):
                _log.warning("the pixels of an image cannot be sent: the engine process does not read")

    def _give_pixels(self, core: CoreConnection, message: messages.NeedPixels) -> None:
        call = self._call_of(message.id)
        if call is None or message.image >= len(call.images):
            error = encode_error(EngineUnavailable("the caller has gone"))
            core.notify(messages.Pixels(message.number, 0, 0, error))
            return
        try:
            pixels = call.pixels.pop(message.image, None) or self._decode(call, message.image)
        except EngineUnavailable as error:
            core.notify(messages.Pixels(message.number, 0, 0, encode_error(error)))
        else:
            self._then(pixels, lambda done: _send_pixels(core, message.number, done))

    def _decode_ahead(self, call: _Call) -> None:
        """Decode images that are most likely new while their core, which is not busy, looks for them in its
        caches."""
        if call.core is None or call.is_over:
            return
        num_bytes = 0
        for number in call.new_images:
            num_bytes += _decoding_bytes(call.headers[number])
            if call.core.load <= _AHEAD_LOAD and num_bytes <= _MAX_AHEAD_BYTES:
                with contextlib.suppress(EngineUnavailable):  # the core gets this error if it asks
                    call.pixels[number] = self._decode(call, number)

    def _decode(self, call: _Call, number: int) -> Future[_SharedPixels]:
        """Have a worker decode an image of a request. Raises `EngineUnavailable`."""
        image = call.images[number]
        assert not isinstance(image, RemoteImage)

        def decode() -> _SharedPixels:
            decoded = decode_image(
                image,
                max_image_pixels=self.info.config.max_image_pixels,
                check_wanted=check_wanted,
                header=call.headers[number],
            )
            try:
                return *decoded.size, shared_file(pixel_parts(decoded))
            except OSError as error:
                raise EngineUnavailable(f"an image cannot be shared: {error.strerror}") from error

        def check_wanted() -> None:
            if call.is_over or self._workers.is_closing:
                raise Interrupted

        return self._submit_job(call, decode, _decoding_bytes(call.headers[number]))

    def _then(self, job: Future[Result], then: Callable[[Future[Result]], None]) -> None:
        """Have the event loop call `then` with a worker's job when it is done."""

        def finish(done: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(then, done)

        job.add_done_callback(finish)

    def _submit_job(self, call: _Call, work: Callable[[], Result], num_bytes: int = 0) -> Future[Result]:
        """Have a worker do `work`, which takes so much memory, for a request. Raises `EngineUnavailable`."""
        options = call.request.options
        job = Job(
            work,
            submitted=time.monotonic(),
            priority=options.priority,
            standing=options.standing,
            tenant=call.tenant,
            num_bytes=num_bytes,
        )
        try:
            return self._workers.submit(job)
        except RuntimeError as error:
            raise EngineUnavailable("no worker can take the request") from error

    async def _ask_all(self, question: Question[AnswerType]) -> list[AnswerType]:
        """Returns the answers of all cores. Raises the first error. Skips cores that restart: they start empty."""
        cores = [core for core in self._cores if core.is_connected]
        if not cores:
            raise ended_error()
        return await asyncio.gather(*(core.ask(question) for core in cores))


class _CoreSilent(EngineUnavailable):
    """A core that was asked for a place in its queue does not answer; another core may have one."""


class _RemoteStream(Stream):
    """The stream of one request, whose events a core sends. `streams` has it until it is over."""

    def __init__(self, id: int, call: _Call, streams: dict[int, _RemoteStream]) -> None:
        super().__init__()
        self.id = id
        self.call = call
        self._streams = streams

    async def result(self) -> Finished:
        if self.call.core is not None and not self.over.done():
            self.call.core.notify(messages.OnlyEnd((self.id,)))
        return await super().result()

    def cancel(self) -> None:
        if self.call.core is not None and not self.over.done():
            self.call.core.notify(messages.Cancel((self.id,)))
        super().cancel()

    def _end(self) -> None:
        super()._end()
        self._streams.pop(self.id, None)
        self.call.num_open -= 1
        if self.call.is_over:
            self.call.drop_pixels()
            self.call.streams = ()  # otherwise only the garbage collector would free the call and its images


@dataclass(slots=True, eq=False)
class _Call:
    """A request, with a stream for each sample."""

    request: Request
    images: tuple[Image, ...]
    """The images of the request."""
    deadline: float | None
    tenant: str
    namespace: str
    route: str = ""
    """Equal for calls that one core should answer; "" if the caller does not say."""
    streams: tuple[_RemoteStream, ...] = ()
    """The streams of its samples; none once all are over."""
    num_open: int = 0
    """The streams that are not over."""
    ids: tuple[int, ...] = ()
    """The ids of all its streams."""
    fingerprints: tuple[str, ...] = ()
    """The fingerprint of each sample, once it has been sent; a core may add that of its adapter."""
    headers: list[ImageHeader] = field(default_factory=list)
    """The headers of the images."""
    new_images: list[int] = field(default_factory=list)
    """The numbers of the images that no request has shown lately."""
    digests: tuple[bytes, ...] | None = None
    """The digests of the images; None until they are computed."""
    core: CoreConnection | None = None
    """The core that the call was sent to last."""
    has_events: bool = False
    pixels: dict[int, Future[_SharedPixels]] = field(default_factory=dict)
    """The pixels of images that are decoded before a core has asked for them, by the number of the image."""

    @property
    def is_over(self) -> bool:
        return not self.num_open

    @property
    def routing_key(self) -> bytes | None:
        """The key that selects the core: the caller's route, or the digest of the first image; None without
        either."""
        if self.route:
            return self.route.encode()
        return self.digests[0] if self.digests else None

    def drop_pixels(self) -> None:
        """Free the pixels that were decoded ahead: no core needs them."""
        while self.pixels:
            _, pixels = self.pixels.popitem()
            pixels.cancel()
            pixels.add_done_callback(_free_pixels)

    def fail(self, error: KestrelError) -> None:
        """End all streams with an error."""
        for stream in self.streams:
            stream.deliver([], error)


def _decoding_bytes(header: ImageHeader) -> int:
    """Returns the most memory that decoding takes, or the decoded image together with the copy that is sent."""
    return max(header.decoding_bytes, 2 * _PIXEL_BYTES * header.width * header.height)


def _free_pixels(done: Future[_SharedPixels]) -> None:
    if not done.cancelled() and done.exception() is None:
        *_, file = done.result()
        file.close()


def _send_pixels(core: CoreConnection, number: int, done: Future[_SharedPixels]) -> None:
    error = EngineUnavailable("the caller has gone") if done.cancelled() else done.exception()
    if error is None:
        width_px, height_px, file = done.result()
        core.notify(messages.Pixels(number, width_px, height_px), file)
        return
    if isinstance(error, Interrupted):
        error = EngineUnavailable("the caller has gone")
    elif not isinstance(error, KestrelError):
        _log.error("an image cannot be decoded", exc_info=error)
        error = InternalError(error)
    core.notify(messages.Pixels(number, 0, 0, encode_error(error)))


def _sum_of(values: Sequence[Summable]) -> Summable:
    """Returns the sum of dataclasses, field by field; of ages, which may be None, the greatest."""
    total: dict[str, Any] = {}
    for item in fields(values[0]):
        parts = [getattr(value, item.name) for value in values]
        if is_dataclass(parts[0]):
            total[item.name] = _sum_of(parts)
        elif item.name == "oldest_age_s":
            total[item.name] = max((age for age in parts if age is not None), default=None)
        else:
            total[item.name] = sum(parts)
    return type(values[0])(**total)
