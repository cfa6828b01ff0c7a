"""An engine without a model: the real streams, with scripted events. It honours cancel, deadlines and draining."""

import asyncio
import hashlib
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kestrel_runtime.api.adapters import WEIGHTS_FILE, AdapterInfo
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.deadlines import remaining_s
from kestrel_runtime.api.engine import (
    ClearedCache,
    CoreReading,
    EngineInfo,
    EngineStatus,
    ImageInfo,
    Load,
    SkillDefaults,
)
from kestrel_runtime.api.errors import (
    AdapterInvalid,
    AdapterNotFound,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InvalidRequest,
    KestrelError,
    ModelNotFound,
    Overloaded,
    SkillUnsupported,
)
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    EmbedOutput,
    Event,
    Finished,
    FinishReason,
    FoundObject,
    Grounding,
    Location,
    OutlineBox,
    Output,
    PatchEmbeddings,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)
from kestrel_runtime.api.images import Image, RemoteImage, image_digest
from kestrel_runtime.api.requests import Caption, Chat, Detect, Embed, Gaze, Point, Query, Request, parts_of
from kestrel_runtime.api.stream import Stream

HOLD = object()
"""In a script: wait here until `FakeEngine.release` or the end of the request.

An `asyncio.Event` in a script is waited for likewise."""

Script = Callable[[Request], Iterable[object]]

TIMING = Timing(queue_s=0.001, preprocess_s=0.002, prefill_s=0.5, time_to_first_token_s=1.5, decode_s=0.25)
SKILLS = {
    "query": SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=768),
    "caption": SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=768),
    "point": SkillDefaults(temperature=0.0, top_p=1.0, max_objects=150),
    "detect": SkillDefaults(temperature=0.0, top_p=1.0, max_objects=150),
    "segment": SkillDefaults(temperature=0.0, top_p=1.0, max_tokens=768),
    "gaze": SkillDefaults(temperature=0.0, top_p=1.0),
    "chat": SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=768),
    "embed": SkillDefaults(temperature=0.0, top_p=1.0),
}


def answers(request: Request) -> list[Event]:
    """The default script: what a model might say, the same every time."""
    usage = Usage(num_input_tokens=735, num_image_tokens=729, num_output_tokens=3)
    output = _output(request)
    deltas: list[Event] = []
    if isinstance(output, QueryOutput | CaptionOutput):
        text = output.answer if isinstance(output, QueryOutput) else output.caption
        if isinstance(output, QueryOutput) and output.reasoning is not None:
            deltas.append(TextDelta(output.reasoning.text, TextChannel.REASONING, 0, 2))
        deltas += [TextDelta(text[:3], TextChannel.ANSWER, 0, 1), TextDelta(text[3:], TextChannel.ANSWER, 1, 2)]
    if isinstance(output, SegmentOutput):
        for mask in output.segments:
            path = mask.svg_path
            pieces = [TextDelta(path[:5], TextChannel.PATH, 0, 3), TextDelta(path[5:], TextChannel.PATH, 3, 4)]
            deltas += [OutlineBox(mask.box), *pieces]
    if isinstance(output, DetectOutput):
        deltas += map(FoundObject, output.boxes)
    if isinstance(output, PointOutput):
        deltas += map(FoundObject, output.points)
    if isinstance(request, Embed):
        usage = Usage(729, 729)
        if request.patches:
            row = struct.pack("<3f" if request.dtype == "float32" else "<3e", 1, -2, 0.5)
            deltas += [PatchEmbeddings(0, 2, 2 * row), PatchEmbeddings(2, 1, row)]
    has_mask = isinstance(output, SegmentOutput) and output.mask_format != "svg"
    finished = Finished(output, FinishReason.STOP, usage, TIMING, image_size_px=(40, 20) if has_mask else None)
    return [Started(Usage(735, 729)), *deltas, finished]


def much_text() -> list[Event]:
    """16 MiB, in pieces that no stream joins: each goes on with another channel than the one before."""
    channels = (TextChannel.REASONING, TextChannel.ANSWER)
    return [TextDelta("a" * 2**20, channels[index % 2], index // 2, 1) for index in range(16)]


def fails(error: BaseException) -> Script:
    """A script that fails before it starts."""
    return lambda request: [error]


class FakeEngine:
    """Plays `script` for every request: events are sent, `HOLD` waits, an exception ends the stream with it.

    Lives on one event loop. What it was asked is in `requests`; `deadlines_s`, `tenants` and `namespaces` have
    those of each. `cleared` has the namespace and the digest of each removal from the caches.
    """

    def __init__(
        self,
        script: Script = answers,
        *,
        skills: Iterable[str] = SKILLS,
        max_queued_requests: int = 256,
        max_image_bytes: int = 32 * 2**20,
    ) -> None:
        config = EngineConfig(
            model="fake", max_queued_requests=max_queued_requests, max_image_bytes=max_image_bytes
        )
        self.info = EngineInfo(
            "fake",
            None,
            "moondream3",
            {name: SKILLS[name] for name in skills},
            "cpu",
            "float32",
            4096,
            16,
            1_000_000,
            config,
        )
        self.status = EngineStatus.SERVING
        self.requests: list[Request] = []
        self.deadlines_s: list[float | None] = []
        self.tenants: list[str] = []
        self.namespaces: list[str] = []
        self.cleared: list[tuple[str | None, bytes | None]] = []
        self.changed_adapters: list[str] = []
        """The adapters whose files were reported as new."""
        self.images: dict[bytes, Image] = {}
        """By digest: those of requests that come over sockets, which carry no image."""
        self.num_cancelled = 0
        self.num_expected = 0
        self.num_submitted = asyncio.Semaphore(0)
        """Acquired once per request: waits until one has come."""
        self.is_idle = asyncio.Event()
        """Set while no request runs."""
        self.is_idle.set()
        self._script = script
        self._released = asyncio.Event()
        self._players: dict[Stream, asyncio.Task[None]] = {}
        self._callbacks: list[Callable[[EngineStatus], None]] = []

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
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
        """As an engine core has it: the streams lead to a front end."""
        if any(isinstance(image, RemoteImage) for image in request.images):
            request = request.with_images(tuple(self.images[image_digest(image)] for image in request.images))
        error = self._refusal(request, len(streams))
        for stream, part in zip(streams, parts_of(request), strict=True):
            if error is not None:
                stream.refuse(error)
                continue
            self.requests.append(part)
            self.deadlines_s.append(remaining_s(deadline))
            self.tenants.append(tenant)
            self.namespaces.append(namespace)
            stream.on_cancel(self._count_cancelled)
            self.is_idle.clear()
            self._players[stream] = asyncio.ensure_future(self._play(stream, list(self._script(part)), deadline))
            stream.over.add_done_callback(lambda _, stream=stream: self._end(stream))
            self.num_submitted.release()

    def on_completed_alone(self, callback: Callable[[str], None]) -> None:
        """Accept the callback of an engine core; no request is ever isolated."""

    def _refusal(self, request: Request, num_samples: int) -> KestrelError | None:
        max_queued = self.info.config.max_queued_requests
        if self.status is not EngineStatus.SERVING:
            return EngineUnavailable("not serving")
        if request.options.model not in ("", self.info.model):
            return ModelNotFound(request.options.model)
        if request.skill not in self.info.skills:
            return SkillUnsupported(request.skill, self.info.model)
        try:
            self.info.check_number_of_objects(request)
        except InvalidRequest as error:
            return error
        if any(len(image) > self.info.config.max_image_bytes for image in request.images):
            return ImageError("the image is too large", too_large=True)
        if len(self._players) + num_samples > max_queued:
            return Overloaded(max_queued, retry_after_s=0.25)
        return None

    @asynccontextmanager
    async def expecting(
        self, request: Request, *, deadline: float | None = None, tenant: str = ""
    ) -> AsyncIterator[None]:
        max_queued = self.info.config.max_queued_requests
        if len(self._players) + self.num_expected >= max_queued:
            raise Overloaded(max_queued, retry_after_s=0.25)
        self.num_expected += 1
        try:
            yield
        finally:
            self.num_expected -= 1

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        self.cleared.append((namespace, None))
        return ClearedCache(num_pages=7, num_images=2, num_crops=5)

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        self.cleared.append((namespace, digest))
        return ClearedCache(num_pages=3, num_images=1)

    def inspect_image(self, data: bytes) -> ImageInfo:
        if data.startswith(b"broken"):
            raise ImageError("is broken")
        return ImageInfo("image/png", 4, 3)

    def adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo("colours", "ab" * 32, slot=1, num_requests=2, is_current=True)]

    async def adapter_names(self) -> list[str]:
        return ["colours", "shapes@200"]

    async def load_adapter(self, name: str) -> AdapterInfo:
        return await self.unload_adapter(name)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        if name == "broken":
            raise AdapterInvalid(name, ("unexpected a", "missing b"))
        if name != "colours":
            raise AdapterNotFound(name)
        return self.adapters()[0]

    async def check_adapter(self, folder: str, name: str) -> str:
        """Refuse weights that begin with "broken". The digest is that of the weights."""
        root = self.info.config.adapters
        assert root is not None
        weights = (Path(root) / folder / WEIGHTS_FILE).read_bytes()
        if weights.startswith(b"broken"):
            raise AdapterInvalid(name, ("unexpected a", "missing b"))
        return hashlib.sha256(weights).hexdigest()

    async def adapter_changed(self, name: str) -> None:
        self.changed_adapters.append(name)

    def load(self) -> Load:
        return Load(len(self._players), 2, 3, 40, 500, 123.5, 6789, requests_per_second=7.5)

    def cores(self) -> list[CoreReading]:
        return [CoreReading(0, self.status, self.info, self.load(), os.getpid())]

    async def drain(self) -> None:
        self.become(EngineStatus.DRAINING)
        await self.is_idle.wait()

    def close(self) -> None:
        self.die()

    def release(self) -> None:
        """Let every `HOLD` pass, now and later."""
        self._released.set()

    def die(self) -> None:
        """Fail what runs and refuse what comes. From any thread."""
        self.become(EngineStatus.DEAD)
        for stream in list(self._players):
            stream.fail(EngineUnavailable("died"))

    def become(self, status: EngineStatus) -> None:
        if self.status in (status, EngineStatus.DEAD):
            return
        self.status = status
        for callback in self._callbacks:
            callback(status)

    async def _play(self, stream: Stream, script: list[object], deadline: float | None) -> None:
        try:
            async with asyncio.timeout(remaining_s(deadline)):
                for item in script:
                    if item is HOLD:
                        await self._released.wait()
                    elif isinstance(item, asyncio.Event):
                        await item.wait()
                    elif isinstance(item, KestrelError):
                        stream.deliver([], item)
                        return
                    elif isinstance(item, BaseException):
                        raise item
                    else:
                        assert isinstance(item, Event)
                        stream.deliver([item])
        except TimeoutError:
            stream.deliver([], DeadlineExceeded("the deadline passed"))

    def _count_cancelled(self) -> None:
        self.num_cancelled += 1

    def _end(self, stream: Stream) -> None:
        self._players.pop(stream).cancel()
        if not self._players:
            self.is_idle.set()


def _output(request: Request) -> Output:
    box = Box(0.125, 0.25, 0.5, 0.75)
    if isinstance(request, Query | Chat):
        thought = Reasoning("A bird.", (Grounding(2, 6, (Location(0.5, 0.25),)),))
        return QueryOutput("a kestrel", thought if request.reasoning else None)
    if isinstance(request, Caption):
        return CaptionOutput(f"a {request.length} kestrel")
    if isinstance(request, Point):
        return PointOutput((Location(0.5, 0.25), Location(0.75, 0.5)))
    if isinstance(request, Gaze):
        return PointOutput((Location(0.25, 0.75),))
    if isinstance(request, Detect):
        return DetectOutput((box,))
    if isinstance(request, Embed):
        return EmbedOutput((0.25, -0.5, 1.0), 3)
    return SegmentOutput((SegmentMask("M 0 0 L 1 1 z", box),), getattr(request, "mask_format", "svg"))
