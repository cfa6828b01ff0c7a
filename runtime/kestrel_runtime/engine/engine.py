"""Implements the engine in this process: it takes requests and returns streams of events.

`build` creates the parts and `LocalEngine` keeps the state; `QueueAdmission`, `Preprocessor` and `EngineLoop`
process requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kestrel_ops import num_compilations
from kestrel_runtime.adapters.store import AdapterPreparation, AdapterStore
from kestrel_runtime.api.adapters import AdapterInfo, AdapterLoad
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.deadlines import deadline_error, remaining_s
from kestrel_runtime.api.engine import CacheLoad, ClearedCache, CoreReading, EngineStatus, ImageInfo, Load
from kestrel_runtime.api.errors import (
    AdapterNotFound,
    EngineUnavailable,
    InternalError,
    KestrelError,
    clear_locals,
    drop_tracebacks,
)
from kestrel_runtime.api.requests import Request, parts_of
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.build import build
from kestrel_runtime.engine.open_streams import OpenStreams
from kestrel_runtime.engine.preprocessing import SharedImages
from kestrel_runtime.engine.watchdog import Watchdog, all_stacks
from kestrel_runtime.engine.workers import Interrupted
from kestrel_runtime.fairness.queue_admission import Cost
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.crop_cache import CropCache
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache
from kestrel_runtime.scheduling.sequence import SequenceClock, TokenSequence

_TRANSITIONS = {
    EngineStatus.SERVING: {EngineStatus.DRAINING, EngineStatus.RECOVERING, EngineStatus.DEAD},
    EngineStatus.RECOVERING: {EngineStatus.SERVING, EngineStatus.DRAINING, EngineStatus.DEAD},
    EngineStatus.DRAINING: {EngineStatus.DEAD},
    EngineStatus.DEAD: set[EngineStatus](),
}
_MAX_TOKENS_PER_REF = 3
_CLOSE_TIMEOUT_S = 5.0
"""The longest wait of `close` for the engine thread, in seconds; a step of a slow device may take longer."""
_ADAPTER_NAMES_S = 5.0
"""The longest wait, in seconds, for the folder of adapters to be read, which may be on a mount that does not
answer."""

_log = logging.getLogger(__name__)


class LocalEngine:
    """An engine of one model, one thread and one page pool, in this process.

    Call `submit` on an event loop, and the other methods anywhere.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        owns_model: bool = False,
        flight_record: Path | None = None,
    ) -> None:
        """Build the engine and start its threads.

        With `owns_model` the engine frees the weights of which a fused backend has a copy. With `flight_record` it
        writes to this file which requests are in flight (`engine.flight_record`).

        Raises `CheckpointError` if the model cannot be served as `config` says.
        """
        parts = build(loaded, config, self._become, owns_model=owns_model, flight_record=flight_record)
        self.info = parts.info
        self._num_image_tokens = parts.num_image_tokens
        self._pages, self._page_bytes = parts.pages, parts.page_bytes
        self._embeddings, self._bytes_per_image = parts.embeddings, parts.bytes_per_image
        self._crops, self._bytes_per_crop = parts.crops, parts.bytes_per_crop
        self._scheduler = parts.scheduler
        self._adapters = parts.adapters
        self._poison_requests = parts.poison_requests
        self._admission = parts.admission
        self._preprocessor = parts.preprocessor
        self._loop = parts.loop
        self._num_compilations = num_compilations()
        self._status = EngineStatus.SERVING
        self._lock = threading.RLock()
        self._num_preprocessing = 0
        self._streams = OpenStreams()
        self._is_left_behind = False
        self._callbacks: list[Callable[[EngineStatus], None]] = []
        step_timeout_s = config.resolved(self.info.device).step_timeout_s
        assert step_timeout_s is not None
        self._step_timeout_s = step_timeout_s
        self._watchdog = Watchdog(
            self._step_timeout_s,
            join=self._loop.join,
            activities=self._loop.activities,
            on_stall=self._stalled,
            on_end=self._ended,
        )
        self._loop.start()
        self._watchdog.start()

    @classmethod
    def start(cls, config: EngineConfig, *, flight_record: Path | None = None) -> LocalEngine:
        """Load the model and start. Blocks. Raises `CheckpointError`."""
        return cls(LoadedModel.load(config), config, owns_model=True, flight_record=flight_record)

    @property
    def status(self) -> EngineStatus:
        return self._status

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        """Call `callback` at every change of the status, in the thread that changes it."""
        self._callbacks.append(callback)

    def submit(
        self, request: Request, *, deadline: float | None = None, tenant: str = "", namespace: str = ""
    ) -> Stream:
        """Queue a request of one sample; see `submit_samples`."""
        (stream,) = self.submit_samples(request, deadline=deadline, tenant=tenant, namespace=namespace)
        return stream

    def submit_samples(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        route: str = "",
    ) -> list[Stream]:
        """Queue a request, and return a stream for each of its parts: samples, or objects. If the queue refuses
        one, none runs.

        After `deadline` (`api/deadlines.py`) its caller no longer waits.

        Requests of different `tenant`s share the engine evenly; "" is a tenant like any other. Cached content of
        a `namespace` is used for requests of that namespace only.

        Refusals are raised by the streams, before any event: `EngineUnavailable`, `ModelNotFound`,
        `SkillUnsupported`, `AdapterNotFound`, `ImageError`, `Overloaded` and `RequestRefused`.
        """
        streams = [Stream() for _ in parts_of(request)]
        self.submit_to(streams, request, deadline=deadline, tenant=tenant, namespace=namespace)
        return streams

    def submit_to(
        self,
        streams: list[Stream],
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        fingerprints: Sequence[str] = (),
    ) -> None:
        """Queue a request as `submit_samples` does, with the caller's streams, one for each part.

        `fingerprints` are those of the parts of a request that was checked with `info` in another process.
        """
        parts, now, shared = parts_of(request), time.monotonic(), None
        known = fingerprints or [""] * len(parts)
        max_queue_s, wait_limit_s = request.options.max_queue_s, _wait_limit_s(request, deadline, now)
        queue_deadline = None if max_queue_s is None else now + max_queue_s
        if len(streams) > 1 and request.images:
            shared = SharedImages()
        try:
            self._check(request, deadline, now, is_checked=bool(fingerprints))
            for stream, part in zip(streams, parts, strict=True):
                cost = self._cost_of(part, tenant)
                if part is not parts[0]:  # the parts have one image
                    cost = cost._replace(image_bytes=0)
                self._streams.add(stream)
                self._admission.enter(stream, cost, now, wait_limit_s=wait_limit_s)
            for stream, part, fingerprint in zip(streams, parts, known, strict=True):
                clock = SequenceClock(now, deadline, queue_deadline)  # parts start and end one by one
                self._prepare(part, stream, clock, tenant, namespace, wait_limit_s, shared, fingerprint)
        except BaseException as error:
            for stream in streams:
                self._admission.leave(stream)
                stream.refuse(error if isinstance(error, KestrelError) else InternalError(error))
            if not isinstance(error, KestrelError):
                raise
            drop_tracebacks(error)

    def _prepare(
        self,
        request: Request,
        stream: Stream,
        clock: SequenceClock,
        tenant: str,
        namespace: str,
        wait_limit_s: float | None,
        shared: SharedImages | None,
        fingerprint: str,
    ) -> None:
        """Have an admitted request prepared, with its adapter if it names one."""
        submit = partial(
            self._preprocessor.submit,
            request,
            clock,
            tenant,
            namespace,
            is_over=stream.over.done,
            shared=shared,
            fingerprint=fingerprint,
            call_soon=stream.loop.call_soon_threadsafe,
        )
        adapter = request.options.adapter
        try:
            preparation = (
                AdapterPreparation(self._adapters_for(adapter).acquire(adapter, tenant), submit)
                if adapter
                else submit()
            )
        except RuntimeError as error:  # closed at this very moment, or the system has no thread left for us
            raise EngineUnavailable("no worker can take the request") from error
        if isinstance(preparation, TokenSequence):
            stream.on_cancel(partial(self._loop.cancel, stream))
            self._loop.add(preparation, stream)
            return
        with self._lock:
            self._num_preprocessing += 1
        stream.on_cancel(lambda: self._cancel(preparation, stream))
        if wait_limit_s is not None:
            timer = stream.loop.call_later(wait_limit_s, self._expire, preparation, stream, clock)
            stream.over.add_done_callback(lambda _: timer.cancel())
        preparation.add_done_callback(lambda done: self._prepared(done, stream))

    def isolate(self, fingerprints: Iterable[str]) -> None:
        """Have each of these requests run alone once: an engine process ended during their step."""
        self._poison_requests.isolate(fingerprints)

    def on_completed_alone(self, callback: Callable[[str], None]) -> None:
        """Call `callback`, in the engine thread, with the fingerprint of each isolated request that completed."""
        self._poison_requests.on_completed_alone(callback)

    def quarantine(self, fingerprints: Iterable[str]) -> None:
        """Refuse these requests from now on: they ended an engine process."""
        for fingerprint in fingerprints:
            self._poison_requests.quarantine(fingerprint, survives_restart=True)

    @asynccontextmanager
    async def expecting(
        self, request: Request, *, deadline: float | None = None, tenant: str = ""
    ) -> AsyncIterator[None]:
        """Hold a place in the queue for this request while its image is fetched.

        Raises `EngineUnavailable`, `ModelNotFound`, `SkillUnsupported`, `ImageError` and `Overloaded`. The image
        that the request has now stands for the one to come.
        """
        now = time.monotonic()
        self._check(request, deadline, now)
        place = object()
        cost = self._cost_of(request, tenant)
        self._admission.enter(place, cost, now, wait_limit_s=_wait_limit_s(request, deadline, now))
        try:
            yield
        finally:
            self._admission.leave(place)

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        """Remove the cached content of a namespace, or of all. Running requests go on and cache nothing more.

        Raises `EngineUnavailable`.
        """
        return await asyncio.wrap_future(self._loop.forget_cached(namespace))

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        """Remove the cached content of one image of a namespace. `digest`: the SHA-256 of its encoded bytes."""
        return await asyncio.wrap_future(self._loop.forget_cached(namespace, digest))

    def adapters(self) -> list[AdapterInfo]:
        """Returns the loaded adapters."""
        return [] if self._adapters is None else self._adapters.infos()

    async def adapter_names(self) -> list[str]:
        """Returns the names of adapters that requests may use; if their folder does not answer, the loaded ones."""
        if self._adapters is None:
            return []
        try:
            async with asyncio.timeout(_ADAPTER_NAMES_S):
                return await asyncio.shield(asyncio.wrap_future(self._adapters.names()))
        except TimeoutError:
            return sorted({info.name for info in self.adapters() if info.is_current})

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Read an adapter's files again, and load them if their content is new.

        Raises `AdapterNotFound`, `AdapterInvalid` and `EngineUnavailable`.
        """
        return await asyncio.wrap_future(self._adapters_for(name).load(name))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Free an adapter's slot once no request uses it. Raises `AdapterNotFound` if it is not loaded."""
        return self._adapters_for(name).unload(name)

    async def check_adapter(self, folder: str, name: str) -> str:
        """Read and check the files of a folder, in that of all adapters, that is to be the adapter `name`.

        Returns their digest in hexadecimal digits. A thread does the work. Raises `AdapterInvalid`.
        """
        digest = await asyncio.to_thread(self._adapters_for(name).checked_digest, folder, name)
        return digest.hex()

    async def adapter_changed(self, name: str) -> None:
        """Have later requests use the files that the adapter of this name has now."""
        if self._adapters is not None:
            self._adapters.files_changed(name)

    def inspect_image(self, data: bytes) -> ImageInfo:
        """Reads the header of an image file. Raises `ImageError` for a file that requests could not use."""
        self.info.check_image(data)
        header = self._preprocessor.inspect(data)
        return ImageInfo(f"image/{header.format.lower()}", header.width, header.height)

    def load(self) -> Load:
        """Returns the load of the engine now."""
        return Load(
            num_running=self._loop.num_active,
            num_waiting=self._loop.num_waiting,
            num_preprocessing=self._num_preprocessing,
            num_used_pages=self._pages.num_held,
            num_pages=self._pages.num_pages,
            tokens_per_second=self._loop.tokens_per_second(),
            requests_per_second=self._loop.requests_per_second(),
            decoded_image_bytes=self._preprocessor.decoded_bytes,
            prefix_cache=self._prefix_cache_load(),
            image_cache=self._image_cache_load(),
            crop_cache=_cache_load(self._crops, self._crops.num_places, self._bytes_per_crop),
            adapters=AdapterLoad() if self._adapters is None else self._adapters.reading(),
            num_compilations_awaited=num_compilations() - self._num_compilations,
            num_captures_awaited=self._loop.num_captures_awaited,
        )

    def cores(self) -> list[CoreReading]:
        """Returns the reading of this engine alone."""
        return [CoreReading(0, self.status, self.info, self.load(), os.getpid())]

    async def drain(self) -> None:
        """Accept no new requests, and return when all requests of this event loop have ended."""
        self._become(EngineStatus.DRAINING)
        own = [stream.over for stream in self._streams.of(asyncio.get_running_loop())]
        if own:
            await asyncio.wait(own)

    def guard_steps(self) -> None:
        """Ends the engine from now on if it makes no progress for the step timeout, and counts compiled kernels.

        Call it after the first steps: these compile kernels and allocate buffers, without a time limit.
        """
        self._num_compilations = num_compilations()
        self._watchdog.guard()

    @property
    def has_ended(self) -> bool:
        """True once the engine thread has exited; `close` may time out first."""
        return self._loop.join(0.0)

    def close(self) -> None:
        """Stop now; running requests fail with `EngineUnavailable`.

        Blocks until the engine thread has exited, at most a few seconds if a step does not end.
        """
        self._become(EngineStatus.DEAD)
        self._loop.stop()
        if not self._is_left_behind and not self._watchdog.join(_CLOSE_TIMEOUT_S):
            _log.warning("the engine thread is still at work; it is left behind")
            self._is_left_behind = True
            self._streams.close()
        if self._adapters is not None:
            self._adapters.close()
        self._preprocessor.close()

    def _stalled(self, activities: list[str]) -> None:
        """Stops the engine, since a stalled step does not recover. Runs in the watchdog's thread."""
        in_flight = "; ".join(self._loop.in_flight()) or "none"
        _log.critical(
            "no progress for %g s (%s): the engine ends. Steps in flight: %s\n%s",
            self._step_timeout_s,
            ", ".join(activities),
            in_flight,
            all_stacks(),
        )
        self._loop.stop()

    def _ended(self) -> None:
        """Handles an engine thread that has ended, or never will. Runs in the watchdog's thread."""
        self._become(EngineStatus.DEAD)
        self._loop.finish()
        self._streams.close()

    def _prefix_cache_load(self) -> CacheLoad:
        """Readings of numbers that the engine thread changes."""
        if not self.info.config.prefix_cache:
            return CacheLoad()
        pages, page_bytes = self._pages, self._page_bytes
        return CacheLoad(
            num_lookups=self._scheduler.num_lookups,
            num_hits=self._scheduler.num_hits,
            num_evictions=pages.num_evictions,
            used_bytes=pages.num_findable * page_bytes,
            total_bytes=pages.num_pages * page_bytes,
            oldest_age_s=_age_s(pages.oldest_published_at()),
        )

    def _image_cache_load(self) -> CacheLoad:
        embeddings, is_on = self._embeddings, self.info.memory and self.info.memory.image_cache_bytes
        return _cache_load(embeddings, embeddings.num_entries if is_on else 0, self._bytes_per_image)

    def _adapters_for(self, name: str) -> AdapterStore:
        """Returns the store of adapters. Raises `AdapterNotFound` if the server was started without one."""
        if self._adapters is None:
            raise AdapterNotFound(name, "; the server was started without --adapters and --adapter-repositories")
        return self._adapters

    def _check(self, request: Request, deadline: float | None, now: float, *, is_checked: bool = False) -> None:
        # A caller whose deadline has passed got that outcome from its own clock: the log must not say "queue full".
        if deadline is not None and (passed := deadline_error(deadline, now)) is not None:
            raise passed
        if self._status is not EngineStatus.SERVING:
            raise EngineUnavailable(f"the engine is {self._status.name.lower()}")
        if not is_checked:
            self.info.check(request)

    def _cost_of(self, request: Request, tenant: str) -> Cost:
        images, options = request.images, request.options
        num_tokens = len(images) * self._num_image_tokens
        num_tokens += len(request.text.encode()) + _MAX_TOKENS_PER_REF * len(request.spatial_refs)
        return Cost(tenant, options.priority, options.standing, sum(map(len, images)), num_tokens)

    def _prepared(self, preparation: Future[TokenSequence], stream: Stream) -> None:
        """Takes a worker's result, in its thread or the one that cancelled. An error ends only this request."""
        with self._lock:
            self._num_preprocessing -= 1
        # Of a future that was cancelled the stream may be over already, and then ignores the error.
        stopped = EngineUnavailable("the engine has stopped")
        error = stopped if preparation.cancelled() else preparation.exception()
        if isinstance(error, Interrupted):
            error = stopped
        if error is None:
            self._loop.add(preparation.result(), stream)
            return
        self._admission.leave(stream)
        if isinstance(error, KestrelError):  # its message is complete
            drop_tracebacks(error)
            stream.fail(error)
        else:
            clear_locals(error)
            stream.fail(InternalError(error))

    def _cancel(self, preparation: Future[TokenSequence], stream: Stream) -> None:
        if not preparation.cancel():
            self._loop.cancel(stream)

    def _expire(self, preparation: Future[TokenSequence], stream: Stream, clock: SequenceClock) -> None:
        """End a request whose wait limit has passed. Once a worker has it, worker and loop check the limit."""
        if preparation.cancel():
            deadlines = (clock.deadline, clock.queue_deadline)
            stream.deliver([], clock.expiry(min(moment for moment in deadlines if moment is not None)))

    def _become(self, status: EngineStatus) -> None:
        with self._lock:  # callbacks too, so that they run in the order of the changes
            if status not in _TRANSITIONS[self._status]:
                return
            self._status = status
            for callback in self._callbacks:
                try:
                    callback(status)
                except Exception:  # the other callbacks must run too, and the engine must complete its end
                    _log.exception("a callback failed to take the status %s", status.name)


def _wait_limit_s(request: Request, deadline: float | None, now: float) -> float | None:
    """Returns the longest time that a caller is willing to wait in the queue; None without a limit."""
    max_queue_s, left_s = request.options.max_queue_s, remaining_s(deadline, now)
    if left_s is None or max_queue_s is None:
        return max_queue_s if left_s is None else left_s
    return min(left_s, max_queue_s)


def _cache_load(cache: EmbeddingCache | CropCache, num_places: int, place_bytes: int) -> CacheLoad:
    """Returns readings of numbers that the engine thread changes, of a cache of so many places; 0 if it is off."""
    if not num_places:
        return CacheLoad()
    return CacheLoad(
        num_lookups=cache.num_lookups,
        num_hits=cache.num_hits,
        num_evictions=cache.num_evictions,
        used_bytes=cache.num_published * place_bytes,
        total_bytes=num_places * place_bytes,
        oldest_age_s=_age_s(cache.oldest_published_at()),
    )


def _age_s(moment: float | None) -> float:
    """Returns the time since a moment of the monotonic clock; 0 without one."""
    return 0.0 if moment is None else time.monotonic() - moment
