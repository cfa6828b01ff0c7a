"""An engine in other processes, as a front end sees it. Needs no torch.

The front end checks requests, reads the headers of images and hashes them; a core gets the digest. If the core has
the image in no cache, it asks for the pixels once it has memory for them; the front end then decodes the image.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import msgspec

from kestrel_grpc.multiprocess.engine_channel import messages
from kestrel_grpc.multiprocess.engine_channel.connection import Connection, shared_file
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.messages import (
    AdapterNames,
    Answer,
    Cancel,
    ClearCache,
    Cleared,
    CoreState,
    Events,
    Expect,
    ForgetImage,
    FromCore,
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
)
from kestrel_grpc.multiprocess.engine_channel.routing import choose
from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad
from kestrel_runtime.api.engine import (
    CacheLoad,
    ClearedCache,
    CoreReading,
    EngineInfo,
    EngineStatus,
    ImageInfo,
    Load,
)
from kestrel_runtime.api.errors import (
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    KestrelError,
    RequestRefused,
    Violation,
    drop_tracebacks,
)
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.images import Image, RemoteImage, image_digest, is_hashed_at_once
from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.flight_record import FlightRecord
from kestrel_runtime.engine.offending_requests import fingerprint_of
from kestrel_runtime.engine.recent import LruCache
from kestrel_runtime.engine.workers import Interrupted, Job, Workers
from kestrel_runtime.fairness.image_budget import MAX_DECODING_BYTES, MemoryBudget
from kestrel_runtime.imaging.decoding import decode_image, decoded_pixels, inspect_image
from kestrel_runtime.imaging.header import ImageHeader

_CONNECT_INTERVAL_S = 0.05
_LATE_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_OPERATION_TIMEOUT_S = 60.0
_PIXEL_BYTES = 4
_AHEAD_LOAD, _MAX_AHEAD_BYTES = 4, 32 * 2**20
"""Requests of a core, and memory for decoding, up to which an image is decoded before the core asks for it."""
_MAX_SEEN_IMAGES = 4096
_SUSPECTED_S = 600.0
_FAULT, _KILL = 2, 1
"""The weight of a core's death for the requests that were in flight. SIGKILL comes from outside, as
for want of memory, and may have nothing to do with them."""
_RUNS_ALONE, _IS_REFUSED = 2, 4
"""The weight from which on a request runs alone, and is refused if it did so when its core ended."""
_MAX_REMEMBERED = 256
"""Fingerprints of suspects, and of refused requests."""

_LOOK_INTERVAL_S = 0.5
"""Between two looks at which cores have said something; they do three times a second."""
_IS_SILENT, _IS_BACK = 3, 4
"""After so many looks in a row without a word a core has stopped or is too slow; and it answers again after so many
with one."""

_ForClient = Events | NeedPixels | Cleared
_SharedPixels = tuple[int, int, BinaryIO]
"""Width, height and pixels of a decoded image, as `Pixels` carries them."""
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class BuildMismatch(Exception):
    """The core runs other code: the packages on the disk have changed while the server runs."""


class EngineClient:
    """Implements `api.engine.Engine` over engine cores. Belongs to the event loop that it was made on.

    `core_gone` and `core_ready` report what happens to the processes of the cores.
    """

    def __init__(self, cores: Sequence[_Core]) -> None:
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
        self._calls: dict[int, _Call] = {}  # by the ids of its requests
        self._ids = itertools.count(1)
        self._status = EngineStatus.RECOVERING
        self._is_draining = self._is_closed = False
        self._callbacks: list[Callable[[EngineStatus], None]] = []
        self._death_weights: dict[str, tuple[int, float]] = {}  # by fingerprint: how much, and since when
        self._refused: dict[str, None] = {}
        self._seen_images: LruCache[tuple[str, bytes], bool] = LruCache(_MAX_SEEN_IMAGES)
        """The images seen lately, by namespace and digest; a hit in another namespace would show in the time."""
        self._late: dict[int, asyncio.Task[None]] = {}
        """Connections to cores that have not answered at first, by index."""
        for core in cores:
            core.serve(self._take, self._update_status, self._undelivered)
        self._update_status()
        self._watching = None if len(cores) == 1 else self._loop.create_task(self._watch_cores())

    @classmethod
    async def connect(
        cls, endpoints: Sequence[CoreEndpoint], identity: str, *, absent: Collection[int] = ()
    ) -> Self:
        """Returns once every core has answered but those that are `absent`, for which `core_ready` is called later.
        One that has not answered a moment after the first is connected once it does, or when `core_ready` is
        called.
        No other process of this server, now or before, has `identity`.

        Raises `BuildMismatch`.
        """
        build = messages.build_id()
        cores = [_Core(endpoint, identity, build) for endpoint in endpoints]
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

    def _await_late(self, core: _Core, connecting: asyncio.Task[None]) -> None:
        """Use a core that is slow to answer once it has."""
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
            self._warn(core)
            self._update_status()

        connecting.add_done_callback(use)

    def _forget_late(self, index: int) -> None:
        if (connecting := self._late.pop(index, None)) is not None:
            connecting.cancel()

    def core_gone(self, index: int, *, is_fault: bool = True) -> None:
        """The process of a core has ended. Requests that it has not begun to answer go to another core.

        Without `is_fault` it was ended from outside.
        """
        core = self._cores[index]
        self._forget_late(index)
        core.end()
        self._count_death(FlightRecord.read(core.flight_record), _FAULT if is_fault else _KILL)
        self._update_status()
        for call in {call.ids: call for call in self._calls.values() if call.core is core}.values():
            fingerprint = call.fingerprint()
            if any(refused.startswith(fingerprint) for refused in self._refused):
                call.fail(RequestRefused(f"{fingerprint} has ended an engine process"))
            elif call.has_events:
                call.fail(_ended())
            else:
                self._send(call)

    async def core_ready(self, index: int) -> None:
        """A new process of a core listens. Raises `BuildMismatch`."""
        self._forget_late(index)
        await self._cores[index].connect()
        self._warn(self._cores[index])
        self._update_status()

    def _count_death(self, in_flight: frozenset[str], weight: int) -> None:
        """Counts the death of a core against the requests that were in flight in it.

        They run alone until they have ended well: at once after a fault, after the second time where it was killed.
        One that was in flight alone is refused: after the second fault, or the fourth time.
        """
        now = time.monotonic()
        for fingerprint in [name for name, (_, since) in self._death_weights.items() if since < now - _SUSPECTED_S]:
            del self._death_weights[fingerprint]
        for fingerprint in in_flight:
            before, _ = self._death_weights.pop(fingerprint, (0, now))
            self._death_weights[fingerprint] = before + weight, now
            if len(in_flight) == 1 and before + weight >= _IS_REFUSED:
                self._refused[fingerprint] = None
                _log.error("%s has ended engine processes: it is refused from now on", fingerprint)
        for known in (self._death_weights, self._refused):
            while len(known) > _MAX_REMEMBERED:
                del known[next(iter(known))]
        for core in self._cores:
            self._warn(core)

    def _warn(self, core: _Core) -> None:
        """Sends a core the suspects and the refused, before it gets their requests again."""
        if suspects := [name for name, (weight, _) in self._death_weights.items() if weight >= _RUNS_ALONE]:
            core.send(Suspect(tuple(suspects)))
        if self._refused:
            core.send(Refuse(tuple(self._refused)))

    def _clear_suspect(self, call: _Call) -> None:
        """Clears a request that has ended well."""
        if self._death_weights:
            for fingerprint in [name for name in self._death_weights if name.startswith(call.fingerprint())]:
                del self._death_weights[fingerprint]

    @property
    def status(self) -> EngineStatus:
        """SERVING while a core serves and this front end does not drain."""
        return self._status

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Call `callback` at every change, on the event loop."""
        self._callbacks.append(callback)

    def submit_samples(
        self, request: Request, *, deadline_s: float | None = None, tenant: str = "", namespace: str = ""
    ) -> list[Stream]:
        """Send a request to a core; see `api.engine.Engine.submit_samples`."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        streams = [_RemoteStream(next(self._ids)) for _ in request.sampling.samples()]
        call = _Call(request, tuple(streams), deadline, tenant, namespace)
        try:
            self._check(request)
            if request.image is not None:
                call.header = self._inspect(request.image)
            for stream in streams:
                self._calls[stream.id] = call
                stream.over.add_done_callback(lambda _, id=stream.id: self._end(call, id))
                stream.follow(self._cancel, self._want_only_end, call)
            if request.image is None or is_hashed_at_once(request.image):
                call.digest = None if request.image is None else image_digest(request.image)
                self._send(call)
                if call.header is not None:  # after the request is sent, so that a worker does not delay that
                    self._loop.call_soon(self._decode_ahead, call)
            else:
                self._hash(call, request.image)
        except KestrelError as error:
            call.fail(error)
            drop_tracebacks(error)
        return list(streams)

    @asynccontextmanager
    async def expecting(
        self, request: Request, *, deadline_s: float | None = None, tenant: str = ""
    ) -> AsyncIterator[None]:
        """A place in the queue of the core with the least load; see `api.engine.Engine.expecting`."""
        self._check(request)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        data = messages.encode_request(request, None)
        core, number = await self._place(data, deadline, tenant)
        try:
            yield
        finally:
            core.send(Release(number))

    async def _place(self, data: bytes, deadline: float | None, tenant: str) -> tuple[_Core, int]:
        """A core that has a place, and the number of the place."""
        while True:
            core = self._choose(None)
            number = core.next_number()
            try:
                await core.ask(Expect(number, data, deadline, tenant))
            except BaseException as error:
                core.send(Release(number))
                if not isinstance(error, _Silent):
                    raise
            else:
                return core, number

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        """The sum over all cores."""
        return await self._clear(lambda number: ClearCache(number, namespace))

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        """Applies to all cores."""
        return await self._clear(lambda number: ForgetImage(number, digest, namespace))

    def inspect_image(self, data: bytes) -> ImageInfo:
        """Reads the header of an image file. Raises `ImageError` for a file that requests could not use."""
        self.info.check_image(data)
        header = self._inspect(data)
        return ImageInfo(f"image/{header.format.lower()}", header.width, header.height)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that are loaded in any core, with the requests of all cores."""
        found: dict[tuple[str, str], AdapterInfo] = {}
        for info in (info for core in self._cores for info in core.state.adapters):
            before = found.get((info.name, info.digest))
            num_requests = info.num_requests + (0 if before is None else before.num_requests)
            found[info.name, info.digest] = replace(before or info, num_requests=num_requests)
        return list(found.values())

    async def adapter_names(self) -> list[str]:
        """The names of adapters that requests may use, at most 1,000, in order."""
        core = self._choose(None)
        return list((await core.ask(AdapterNames(core.next_number()))).names)

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Into all cores; see `api.engine.Engine.load_adapter`."""
        return await self._operate_adapter(lambda number: LoadAdapter(number, name))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Unloads it from all cores; see `api.engine.Engine.unload_adapter`."""
        return await self._operate_adapter(lambda number: UnloadAdapter(number, name))

    def load(self) -> Load:
        """The sum over all cores, as they have last reported it."""
        return _sum_of([core.state.load for core in self._cores if core.is_connected])

    def cores(self) -> list[CoreReading]:
        """Each core, as it was last heard of."""
        return [core.reading() for core in self._cores]

    async def drain(self) -> None:
        """Take no more requests, and return when those that run have ended."""
        self._is_draining = True
        self._update_status()
        if waiting := [stream.over for call in self._calls.values() for stream in call.streams]:
            await asyncio.wait(waiting)

    def close(self) -> None:
        """End everything. Blocks, unless it is called on the event loop itself."""
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
        for call in list(self._calls.values()):
            call.fail(EngineUnavailable("the engine has stopped"))
        for index in tuple(self._late):
            self._forget_late(index)
        for core in self._cores:
            core.end()
        if self._watching is not None:
            self._watching.cancel()
        self._update_status()

    async def _watch_cores(self) -> None:
        """Find cores that have stopped or are too slow, and have others do what these have not begun."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for core in self._cores:
                core.look()
            for core in self._cores:
                if core.is_silent and core.is_connected:
                    self._move_from(core)

    def _move_from(self, core: _Core) -> None:
        """Have other cores answer the requests that a silent one has not begun to answer."""
        if all(other.is_silent for other in self._cores if other.status is EngineStatus.SERVING):
            return
        for call in {call.ids: call for call in self._calls.values() if call.core is core}.values():
            if not call.has_events:
                core.send(Cancel(call.ids))
                self._send(call)
        core.give_up_places()

    def _end(self, call: _Call, id: int) -> None:
        """One of the streams of a request is over."""
        self._calls.pop(id, None)
        if call.is_over:
            call.drop_pixels()

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

    def _inspect(self, image: Image) -> ImageHeader:
        header = inspect_image(image, max_image_pixels=self.info.config.max_image_pixels)
        self._budget.check_image(_decoding_bytes(header))
        return header

    def _hash(self, call: _Call, image: Image) -> None:
        """Have a worker hash a large image, and send the request then."""

        self._then(self._submit_job(call, lambda: image_digest(image)), lambda done: self._send_hashed(call, done))

    def _send_hashed(self, call: _Call, done: Future[bytes]) -> None:
        if not call.is_over:
            if done.cancelled():
                call.fail(EngineUnavailable("the engine has stopped"))
            else:
                call.digest = done.result()
                self._send(call)

    def _choose(self, digest: bytes | None) -> _Core:
        serving = [core for core in self._cores if core.status is EngineStatus.SERVING]
        if not serving:
            raise _ended()
        return choose([core for core in serving if not core.is_silent] or serving, digest)

    def _send(self, call: _Call) -> None:
        """To the core that the request belongs to now."""
        try:
            core = self._choose(call.digest)
            call.core = core
            summary = None
            if call.header is not None and call.digest is not None:
                num_bytes = len(call.request.image or b"")
                summary = ImageSummary(call.digest, num_bytes, call.header.width, call.header.height)
            data = messages.encode_request(call.request, summary)
            core.send(Submit(call.ids, data, call.deadline, call.tenant, call.namespace))
            core.num_sent += len(call.ids)
        except KestrelError as error:
            call.fail(error)
        except UnicodeEncodeError:  # half of a surrogate pair, which MessagePack does not have
            call.fail(InvalidRequest((Violation("request", "must be valid Unicode"),)))

    def _cancel(self, call: _Call, stream: _RemoteStream) -> None:
        if call.core is not None and stream.is_cancelled:
            call.core.send(Cancel((stream.id,)))

    def _want_only_end(self, call: _Call, stream: _RemoteStream) -> None:
        if call.core is not None:
            call.core.send(OnlyEnd((stream.id,)))

    def _take(self, core: _Core, message: _ForClient) -> None:
        if isinstance(message, NeedPixels):
            self._give_pixels(core, message)
            return
        if isinstance(message, Cleared):
            self._death_weights.pop(message.fingerprint, None)
            return
        for item in message.of_requests:
            call = self._calls.get(item.id)
            if call is None or call.core is not core:
                continue
            call.has_events = True
            call.drop_pixels()
            events, error = messages.events_in(item)
            if events and isinstance(events[-1], Finished):
                self._clear_suspect(call)
            call.stream(item.id).deliver(events, error)

    def _call_of(self, id: int) -> _Call | None:
        """The request that has this id, also where its stream has ended before those of other samples."""
        return self._calls.get(id) or next((call for call in self._calls.values() if id in call.ids), None)

    def _undelivered(self, undelivered: Sequence[ToCore]) -> None:
        """A core does not read: end the requests that were sent to it."""
        for message in undelivered:
            if isinstance(message, Submit) and (call := self._call_of(message.ids[0])) is not None:
                call.fail(EngineUnavailable("the engine process does not read"))
            elif isinstance(message, Pixels):
                _log.warning("the pixels of an image cannot be sent: the engine process does not read")

    def _give_pixels(self, core: _Core, message: NeedPixels) -> None:
        call = self._call_of(message.id)
        if call is None or call.request.image is None:
            error = messages.encode_error(EngineUnavailable("the caller has gone"))
            core.send(Pixels(message.number, 0, 0, error))
            return
        try:
            pixels = call.take_pixels() or self._decode(call)
        except EngineUnavailable as error:
            core.send(Pixels(message.number, 0, 0, messages.encode_error(error)))
        else:
            self._then(pixels, lambda done: _send_pixels(core, message.number, done))

    def _decode_ahead(self, call: _Call) -> None:
        """Decode an image that is most likely new while its core, which is not busy, looks for it in its caches."""
        if call.header is None or call.digest is None or call.core is None or call.is_over:
            return
        key = call.namespace, call.digest
        is_new = self._seen_images.get(key) is None
        self._seen_images.put(key, True)
        if is_new and call.core.load <= _AHEAD_LOAD and _decoding_bytes(call.header) <= _MAX_AHEAD_BYTES:
            with contextlib.suppress(EngineUnavailable):  # which the core gets as an answer if it asks
                call.pixels = self._decode(call)

    def _decode(self, call: _Call) -> Future[_SharedPixels]:
        """Have a worker decode the image of a request. Raises `EngineUnavailable`."""
        image = call.request.image
        assert image is not None
        assert not isinstance(image, RemoteImage)

        def decode() -> _SharedPixels:
            decoded = decode_image(
                image, max_image_pixels=self.info.config.max_image_pixels, check_wanted=check_wanted
            )
            try:
                return *decoded.size, shared_file(decoded_pixels(decoded).pixels)
            except OSError as error:
                raise EngineUnavailable(f"an image cannot be shared: {error.strerror}") from error

        def check_wanted() -> None:
            if call.is_over or self._workers.is_closing:
                raise Interrupted

        return self._submit_job(call, decode)

    def _then(self, job: Future[Result], then: Callable[[Future[Result]], None]) -> None:
        """Have the event loop call `then` with a worker's job when it is done."""

        def finish(done: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(then, done)

        job.add_done_callback(finish)

    def _submit_job(self, call: _Call, work: Callable[[], Result]) -> Future[Result]:
        """Have a worker do something for a request. Raises `EngineUnavailable`."""
        options = call.request.options
        job = Job(
            work,
            submitted=time.monotonic(),
            priority=options.priority,
            standing=options.standing,
            tenant=call.tenant,
            num_bytes=0 if call.header is None else _decoding_bytes(call.header),
        )
        try:
            return self._workers.submit(job)
        except RuntimeError as error:
            raise EngineUnavailable("no worker can take the request") from error

    async def _clear(self, operation: Callable[[int], Operation]) -> ClearedCache:
        answers = await self._ask_all(operation)
        cleared = [answer.cleared for answer in answers if answer.cleared is not None]
        return ClearedCache(sum(one.num_pages for one in cleared), sum(one.num_images for one in cleared))

    async def _operate_adapter(self, operation: Callable[[int], Operation]) -> AdapterInfo:
        (first, *_) = [answer.adapter for answer in await self._ask_all(operation)]
        assert first is not None, "the answer to operations of adapters"
        return first

    async def _ask_all(self, operation: Callable[[int], Operation]) -> list[Answer]:
        """The answers of all cores. Raises the first error. A core that restarts is left out: it starts afresh."""
        cores = [core for core in self._cores if core.is_connected]
        if not cores:
            raise _ended()
        return await asyncio.gather(*(core.ask(operation(core.next_number())) for core in cores))


class _Silent(EngineUnavailable):
    """A core that was asked for a place does not answer."""


class _RemoteStream(Stream):
    """The events of one request, which come from a core."""

    def __init__(self, id: int) -> None:
        super().__init__()
        self.id = id
        self._on_only_end: Callable[[], None] | None = None

    def follow(
        self,
        cancel: Callable[[_Call, _RemoteStream], None],
        want_only_end: Callable[[_Call, _RemoteStream], None],
        call: _Call,
    ) -> None:
        """Call these when the caller cancels, and when it begins to wait for the end alone."""
        self.on_cancel(lambda: cancel(call, self))
        self._on_only_end = lambda: want_only_end(call, self)

    async def result(self) -> Finished:
        if self._on_only_end is not None and not self.over.done():
            self._on_only_end()
            self._on_only_end = None
        return await super().result()


@dataclass(slots=True, eq=False)
class _Call:
    """A request, with a stream for each sample."""

    request: Request
    streams: tuple[_RemoteStream, ...]
    deadline: float | None
    tenant: str
    namespace: str
    header: ImageHeader | None = None
    """The digest of its image; None without one."""
    digest: bytes | None = None
    core: _Core | None = None
    """The core that it was sent to last."""
    has_events: bool = False
    pixels: Future[_SharedPixels] | None = None
    """Its image, which is being decoded before a core has asked for it."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(stream.id for stream in self.streams)

    @property
    def is_over(self) -> bool:
        return all(stream.over.done() for stream in self.streams)

    def fingerprint(self) -> str:
        """The fingerprint of the request, to which a core may have added that of its adapter."""
        return fingerprint_of(self.request, self.digest)

    def take_pixels(self) -> Future[_SharedPixels] | None:
        """Returns what was decoded ahead, if anything, for one answer to a core."""
        pixels, self.pixels = self.pixels, None
        return pixels

    def drop_pixels(self) -> None:
        """Free what was decoded ahead: no core needs it."""
        if (pixels := self.take_pixels()) is not None:
            pixels.cancel()
            pixels.add_done_callback(_free_pixels)

    def stream(self, id: int) -> _RemoteStream:
        """The stream of this id."""
        return next(stream for stream in self.streams if stream.id == id)

    def fail(self, error: KestrelError) -> None:
        """End all streams with an error."""
        for stream in self.streams:
            stream.deliver([], error)


class _Core:
    """The connection to one core, whose process may change."""

    def __init__(self, endpoint: CoreEndpoint, identity: str, build: str) -> None:
        self.num_sent = 0
        """Requests that were sent since the core has reported its load."""
        self.is_silent = False
        """Returns whether it has stopped or is too slow, so that it says nothing for seconds."""
        self._num_looks = 0
        """The number of observations in a row that contradict `is_silent`."""
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
        """Numbers of what is asked for a place in the queue."""
        self._welcome: asyncio.Future[Welcome | None] | None = None
        self._unsent: list[ToCore] = []
        """Messages of this turn of the event loop, which travel together: each that is sent costs the core a turn
        of the interpreter's lock."""
        self._on_message: Callable[[_Core, _ForClient], None] | None = None
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
        """The status that the core has last reported."""
        return self._state or CoreState(EngineStatus.RECOVERING, _NO_LOAD, ())

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
        on_message: Callable[[_Core, _ForClient], None],
        on_state: Callable[[], None],
        on_undelivered: Callable[[Sequence[ToCore]], None],
    ) -> None:
        """Sets what is called with messages from now on, when the state changes, and with messages that the core
        did not read."""
        self._on_message, self._on_state, self._on_undelivered = on_message, on_state, on_undelivered

    async def connect(self) -> None:
        """Greet the process that listens now, or will. Raises `BuildMismatch`."""
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
        """The answer of the process that listens now; None after a moment where there is none."""
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
        """The process has closed the connection. `end` reports what becomes of its requests."""
        self._connection = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def end(self) -> None:
        """The process has ended: forget it. Operations that wait fail with `EngineUnavailable`."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._state = self._process_id = None
        self._unsent.clear()
        self.num_sent = 0
        self.is_silent, self._num_looks, self._has_spoken = False, 0, True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(_ended())
        self._asked.clear()
        self._places.clear()

    def look(self) -> None:
        """Note whether it has said something since the last look. Looks are counted and not the time, in which this
        process may have been the one that was stopped."""
        has_spoken, self._has_spoken = self._has_spoken, False
        self._num_looks = self._num_looks + 1 if has_spoken is self.is_silent else 0
        if self.is_connected and self._num_looks == (_IS_BACK if self.is_silent else _IS_SILENT):
            self.is_silent, self._num_looks = not self.is_silent, 0
            _log.warning("core %d %s", self.index, "does not answer" if self.is_silent else "answers again")

    def give_up_places(self) -> None:
        """Have `ask` raise `_Silent` for places in the queue, which another core may give."""
        for number in self._places:
            if not self._asked[number].done():
                self._asked[number].set_exception(_Silent("the engine process does not answer"))

    def next_number(self) -> int:
        """The number of the next operation."""
        return next(self._numbers)

    def send(self, message: ToCore, file: BinaryIO | None = None) -> None:
        """Send, without waiting, with the other messages of this turn of the event loop. The file is closed."""
        if self._connection is None:  # whoever waits for an answer hears of the end
            if file is not None:
                file.close()
            return
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(message)
        if file is not None:
            self._send_all(file)

    def _send_all(self, file: BinaryIO | None = None) -> None:
        """Send what waits for it. The file belongs to the last message."""
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
        """The answer. Raises the error that it has, and `EngineUnavailable` where none comes."""
        if self._connection is None:
            raise _ended()
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


_NO_LOAD = Load(0, 0, 0, 0, 0, 0.0)


def _ended() -> EngineUnavailable:
    return EngineUnavailable("the engine process has ended")


def _decoding_bytes(header: ImageHeader) -> int:
    """The most memory that decoding takes, with the copy that is sent."""
    return header.decoding_bytes + _PIXEL_BYTES * header.width * header.height


def _free_pixels(done: Future[_SharedPixels]) -> None:
    if not done.cancelled() and done.exception() is None:
        *_, file = done.result()
        file.close()


def _send_pixels(core: _Core, number: int, done: Future[_SharedPixels]) -> None:
    error = EngineUnavailable("the caller has gone") if done.cancelled() else done.exception()
    if error is None:
        width_px, height_px, file = done.result()
        core.send(Pixels(number, width_px, height_px), file)
        return
    if isinstance(error, Interrupted):
        error = EngineUnavailable("the caller has gone")
    elif not isinstance(error, KestrelError):
        _log.error("an image cannot be decoded", exc_info=error)
        error = InternalError(error)
    core.send(Pixels(number, 0, 0, messages.encode_error(error)))


def _sum_of(loads: Sequence[Load]) -> Load:
    """The load of all cores together."""
    if not loads:
        return _NO_LOAD
    total: dict[str, Any] = {}
    for item in fields(Load):
        values = [getattr(load, item.name) for load in loads]
        total[item.name] = _sum_of_parts(values) if isinstance(values[0], CacheLoad | AdapterLoad) else sum(values)
    return Load(**total)


def _sum_of_parts(parts: Sequence[Any]) -> Any:
    sums = {item.name: [getattr(part, item.name) for part in parts] for item in fields(parts[0])}
    ages = [age for age in sums.pop("oldest_age_s", ()) if age is not None]
    values: dict[str, Any] = {name: sum(numbers) for name, numbers in sums.items()}
    if isinstance(parts[0], CacheLoad):
        values["oldest_age_s"] = max(ages, default=None)
    return type(parts[0])(**values)
