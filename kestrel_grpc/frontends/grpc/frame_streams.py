"""Implements `DetectFrames` and `PointFrames`: frames of a camera in, what was found in each out, the newest first.

    reading task                      the stream's task
    messages ── put ──→ _Inbox ──→ take ── a task for each frame: admission, engine ──→ response
                        (one frame)

A stream has at most one frame in the engine and one in its inbox. The message of a frame is parsed when the frame
leaves the inbox, so that a frame that is dropped costs no more than its reception. Each frame is a call of its own,
which the group of requests to the model admits and records.
"""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.access.access import ScopeRequired, TokenInvalid
from kestrel_grpc.calls.call_admission import CallAdmission, CallFailed
from kestrel_grpc.calls.call_context import CallContext, StreamExpired
from kestrel_grpc.calls.errors import CallFailure, Unsupported
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_grpc.calls.message_gate import TooManyCalls
from kestrel_grpc.calls.submission import Submission, last_event, naming
from kestrel_grpc.frontends.grpc import parsing, rendering
from kestrel_grpc.frontends.grpc.method_handlers import UnparsedMessage
from kestrel_grpc.frontends.grpc.tracking import Tracker
from kestrel_grpc.frontends.grpc.vision_service import BINDINGS, Binding
from kestrel_runtime.api.engine import Engine, EngineStatus
from kestrel_runtime.api.errors import (
    AdapterInvalid,
    AdapterNotFound,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    SkillUnsupported,
    Violation,
)
from kestrel_runtime.api.events import Box
from kestrel_runtime.api.requests import Detect, Point

FRAME_METHODS = frozenset(("DetectFrames", "PointFrames"))
"""The methods of `VisionService` that this module implements."""
_MAX_PAUSE_S = 5.0
_MAX_UNREAD = 1
"""The responses that a client may not have read when the next frame is looked at, if it says what it has read."""
_LAST_WORD_S = 1.0
"""The time after its last frame in which a client may say that it has read a response."""
_MAX_BYTES_PER_S = 256 * 2**20
"""The most bytes that all streams of a process receive together; more would delay all other calls."""
_LEAST_REST_S = 0.001
_MAX_PAIRS_AT_ONCE = 10_000
"""The pairs of boxes up to which objects are named on the event loop."""
_PLACEHOLDER_IMAGE = b"?"
# What every further frame would fail with, too.
_ENDS_STREAM = (
    ModelNotFound,
    AdapterNotFound,
    AdapterInvalid,
    SkillUnsupported,
    TokenInvalid,
    ScopeRequired,
    Unsupported,
    DeadlineExceeded,
)

_log = logging.getLogger("kestrel_grpc.frames")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Describes one of the two methods. `binding` is that of the method for one image."""

    binding: Binding
    response: Callable[..., Any]


_BINDINGS = {binding.rpc: binding for binding in BINDINGS}
_DETECT = _Kind(_BINDINGS["Detect"], wire.DetectFramesResponse)
_POINT = _Kind(_BINDINGS["Point"], wire.PointFramesResponse)


class FrameStreams:
    """Serves streams of frames. `requests` admits their frames, and `counts` has their numbers.

    All frames that wait take at most `max_waiting_bytes`. A stream lasts `max_age_s` seconds at most. If
    `max_streams` is 0, there are none. `served` is the engine's name of the model.
    """

    def __init__(
        self,
        engine: Engine,
        submission: Submission,
        requests: CallAdmission,
        counts: FrameCounts,
        served: str,
        *,
        max_streams: int,
        max_age_s: float,
        max_waiting_bytes: int,
    ) -> None:
        self.engine = engine
        self.submission = submission
        self.requests = requests
        self.counts = counts
        self.served = served
        self.max_age_s = max_age_s
        self._max_streams = max_streams
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    def DetectFrames(
        self, messages: AsyncIterator[UnparsedMessage], call: CallContext
    ) -> AsyncGenerator[wire.DetectFramesResponse, None]:
        return self._stream(_DETECT, messages, call)

    def PointFrames(
        self, messages: AsyncIterator[UnparsedMessage], call: CallContext
    ) -> AsyncGenerator[wire.PointFramesResponse, None]:
        return self._stream(_POINT, messages, call)

    def take_memory(self, num_bytes: int) -> bool:
        """Reserves memory for a frame that waits. Returns False if there is too little."""
        if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            return False
        self._waiting_bytes += num_bytes
        return True

    def give_memory_back(self, num_bytes: int) -> None:
        """Gives back the memory of a frame."""
        self._waiting_bytes -= num_bytes

    def _stream(
        self, kind: _Kind, messages: AsyncIterator[UnparsedMessage], call: CallContext
    ) -> AsyncGenerator[Any, None]:
        if not self._max_streams:
            raise Unsupported("this server takes no streams of frames (--max-frame-streams 0)")
        return _FrameStream(self, kind, call).responses(messages)


class _Frame:
    """Holds a frame that has been read, until its message is taken. `index` counts the frames of the stream."""

    __slots__ = ("_message", "_num_bytes", "_streams", "_unparsed", "arrived", "index")

    def __init__(self, index: int, unparsed: UnparsedMessage, streams: FrameStreams) -> None:
        """`streams` gives the memory of the message if it has any; see `is_held`."""
        self.index = index
        self.arrived = time.monotonic()
        self._streams = streams
        num_bytes = max(1, unparsed.num_bytes)
        self._num_bytes = num_bytes if streams.take_memory(num_bytes) else 0
        self._unparsed = unparsed if self._num_bytes else None
        self._message: Any = None

    @property
    def is_held(self) -> bool:
        """False if there is no memory for the frame, so that its message is dropped."""
        return self._num_bytes > 0

    @property
    def num_read(self) -> int | None:
        """The responses that the client had read when it sent the frame; None if it does not say."""
        try:
            message = self._parsed()
        except Exception:  # `take` raises it
            return None
        return message.frame.read_response_count if message.frame.HasField("read_response_count") else None

    def take(self) -> Any:
        """Returns the message and forgets it. Its memory is taken until `release`.

        Raises what `UnparsedMessage.parsed` raises, and `TooManyCalls` if the frame is not held.
        """
        message = self._parsed()
        self._message = None
        return message

    def release(self) -> None:
        """Gives the memory of the frame back. A second call does nothing."""
        self._message = self._unparsed = None
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._streams.give_memory_back(num_bytes)

    def _parsed(self) -> Any:
        if self._message is None:
            if self._unparsed is None:
                raise TooManyCalls("the memory for frames that wait is full")
            self._message = self._unparsed.parsed()
            self._unparsed = None
        return self._message


class _Inbox:
    """Holds the frame of a stream that waits: the newest, or with `keeps_all` the next."""

    def __init__(self, streams: FrameStreams, *, keeps_all: bool) -> None:
        self.num_dropped = 0
        self._streams = streams
        self._keeps_all = keeps_all
        self._frame: _Frame | None = None
        self._is_over = False
        self._end: Exception | None = None
        self._has_changed = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def fill(self, messages: AsyncIterator[UnparsedMessage], ends_at: float) -> None:
        """Reads all frames, until the moment `ends_at` on the clock of the event loop."""
        index = 0
        try:
            async with asyncio.timeout_at(ends_at):
                async for message in messages:
                    self._put(_Frame(index, message, self._streams))
                    rest_s = message.num_bytes * self._streams.counts.num_streams / _MAX_BYTES_PER_S
                    del message
                    index += 1
                    if rest_s >= _LEAST_REST_S:
                        await asyncio.sleep(rest_s)
                    if self._keeps_all:
                        await self._is_empty.wait()
        except TimeoutError:
            self._end = StreamExpired(self._streams.max_age_s)
        except Exception as error:
            self._end = error
        finally:
            self._is_over = True
            self._has_changed.set()

    async def take(self, num_responses: int) -> _Frame | None:
        """Returns the frame that waits, once there is one; None at the end. Raises the error that ends the stream.

        If the client says how many of the `num_responses` it has read, waits until it has read nearly all.
        """
        timeout_s: float | None = None
        while not self._is_over and not self._may_leave(num_responses):
            timeout_s = None if self._frame is None else _LAST_WORD_S
            self._has_changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._has_changed.wait()
            except TimeoutError:  # no further frame comes that could say it
                break
        if self._end is not None:
            raise self._end
        frame, self._frame = self._frame, None
        self._is_empty.set()
        return frame

    def _may_leave(self, num_responses: int) -> bool:
        if self._frame is None or self._keeps_all:
            return self._frame is not None
        if num_responses <= _MAX_UNREAD:
            return True
        num_read = self._frame.num_read
        return num_read is None or num_responses - num_read <= _MAX_UNREAD

    def clear(self) -> None:
        """Drops the frame that waits."""
        if self._frame is not None:
            self._drop(self._frame)
            self._frame = None

    def _put(self, frame: _Frame) -> None:
        self.clear()
        if not frame.is_held and not self._keeps_all:
            self._drop(frame)
            return
        self._frame = frame
        self._is_empty.clear()
        self._has_changed.set()

    def _drop(self, frame: _Frame) -> None:
        frame.release()
        self.num_dropped += 1
        self._streams.counts.num_dropped += 1


class _FrameStream:
    """Runs one stream of frames."""

    def __init__(self, streams: FrameStreams, kind: _Kind, call: CallContext) -> None:
        self._streams = streams
        self._kind = kind
        self._call = call
        self._tracker: Tracker | None = None
        self._num_answered = 0
        self._num_failed = 0

    async def responses(self, messages: AsyncIterator[UnparsedMessage]) -> AsyncGenerator[Any, None]:
        """Yields a response for each frame that is looked at. If the caller leaves, its frame is cancelled."""
        ends_at = asyncio.get_running_loop().time() + self._streams.max_age_s
        first = await anext(messages, None)
        request, keeps_all, tracks = self._settings(None if first is None else first.parsed())
        del first
        self._tracker = Tracker() if tracks else None
        inbox = _Inbox(self._streams, keeps_all=keeps_all)
        reading = asyncio.create_task(inbox.fill(messages, ends_at))
        self._streams.counts.num_streams += 1
        try:
            while (frame := await inbox.take(self._num_answered + self._num_failed)) is not None:
                response, pause_s = await self._response(frame, request)
                response.dropped_frame_count = inbox.num_dropped
                del frame
                yield response
                if pause_s:  # until then further frames would fail for the same reason
                    await asyncio.wait((reading,), timeout=min(pause_s, _MAX_PAUSE_S))
        finally:
            self._streams.counts.num_streams -= 1
            reading.cancel()
            await asyncio.wait((reading,))
            inbox.clear()
            facts = {
                "request_id": self._call.request_id,
                "answered": self._num_answered,
                "failed": self._num_failed,
                "dropped": inbox.num_dropped,
            }
            _log.info(
                "request_id=%(request_id)s stream of frames ended: %(answered)d answered, %(failed)d failed, "
                "%(dropped)d dropped",
                facts,
            )

    def _settings(self, message: Any) -> tuple[Point | Detect, bool, bool]:
        """Returns the request about each frame, with a placeholder as its image, and whether all frames are kept
        and objects are named. Raises `InvalidRequest` and `SkillUnsupported`."""
        request = request_about_frames(message, self._kind.binding)
        with naming(_settings_path):
            self._streams.engine.info.check_number_of_objects(request)
        if request.skill not in self._streams.engine.info.skills:
            raise SkillUnsupported(request.skill, self._streams.engine.info.model)
        request = replace(request, options=replace(request.options, is_transient=True))
        return request, message.settings.every_frame, getattr(message.settings, "track", False)

    async def _response(self, frame: _Frame, request: Point | Detect) -> tuple[Any, float | None]:
        """Returns the response about a frame, and after a failure that may pass the seconds to wait. Raises
        `CallFailed` where the stream must end."""
        # In a task of its own: each open call has one.
        serving = asyncio.create_task(self._serve(frame, request))
        try:
            return await serving
        except asyncio.CancelledError:
            serving.cancel()
            await asyncio.wait((serving,))
            raise

    async def _serve(self, frame: _Frame, request: Point | Detect) -> tuple[Any, float | None]:
        requests, stream_call = self._streams.requests, self._call
        call = requests.begin(stream_call.headers, stream_call.deadline, stream_call.method, stream_call.peer)
        call.request_id = f"{stream_call.request_id}-{frame.index}"
        call.default_route = stream_call.request_id
        response = self._kind.response(frame_index=frame.index)
        try:
            async with requests.admit(call, takes_place=False):
                call.release = frame.release
                with naming(_frame_path):
                    response.result.CopyFrom(await self._result(frame, request, call, response.waiting_duration))
        except BaseException as error:
            ends_stream = _ends_stream(error, self._streams.engine.status)
            failure = requests.fail(call, error)
            if failure is None:
                raise
            self._num_failed += 1
            self._streams.counts.num_failed += 1
            if ends_stream:
                raise CallFailed(failure) from None
            response.error.CopyFrom(_frame_error(failure))
            return response, failure.retry_after_s
        finally:
            frame.release()
        requests.succeed(call)
        self._num_answered += 1
        self._streams.counts.num_answered += 1
        return response, None

    async def _result(
        self, frame: _Frame, request: Point | Detect, call: CallContext, waiting_duration: Duration
    ) -> Any:
        message = frame.take()
        if message.WhichOneof("part") != "frame":
            raise InvalidRequest((Violation("settings", "must come once, and frames after it"),))
        asked = parsing.framed(request, message.frame.image)
        del message
        submission, binding = self._streams.submission, self._kind.binding
        waiting_duration.FromNanoseconds(round((time.monotonic() - frame.arrived) * 1e9))
        streams = await submission.submit_samples(asked.request, asked.references, call)
        del asked
        assert call.request is not None
        model, objects = call.request.model(self._streams.served), request.objects
        if objects:
            answers = await submission.answers_by_object(objects, streams, call)
            assert binding.render_groups is not None, "both kinds of requests have groups"
            assert call.finished is not None
            result = binding.render_groups(answers, rendering.info(call.finished, call.request_id, model))
        else:
            finished = await last_event(streams, call)
            result = await submission.rendered(finished, partial(binding.render, finished, call.request_id, model))
        if self._tracker is not None:
            await self._track(self._tracker, result, request)
        return result

    async def _track(self, tracker: Tracker, result: wire.DetectResponse, request: Point | Detect) -> None:
        """Names the objects that were found."""
        kinds = [(group.object, group.objects) for group in result.groups if not group.HasField("error")]
        for kind, found in kinds or [(request.object, result.objects)]:
            boxes = [Box(each.box.x_min, each.box.y_min, each.box.x_max, each.box.y_max) for each in found]
            if len(boxes) ** 2 <= _MAX_PAIRS_AT_ONCE:
                names: Sequence[int] = tracker.name(kind, boxes)
            else:
                names = await asyncio.to_thread(tracker.name, kind, boxes)
            for each, name in zip(found, names, strict=True):
                each.track_id = name


def request_about_frames(message: Any, binding: Binding) -> Point | Detect:
    """Returns the request in the first message of a stream, with a placeholder as its image.

    `binding` is that of the method for one image. Raises `InvalidRequest`.
    """
    if message is None or message.WhichOneof("part") != "settings":
        raise InvalidRequest((Violation("settings", "must come first"),))
    asked = message.settings.request
    if asked.HasField("image"):
        raise InvalidRequest((Violation("settings.request.image", "must be absent: frames follow"),))
    asked.image.data = _PLACEHOLDER_IMAGE
    with naming(_settings_path):
        request = binding.parse(asked)
    assert isinstance(request, Point | Detect)
    return request


def _ends_stream(error: BaseException, status: EngineStatus) -> bool:
    """Returns True if every further frame of the stream would fail with this error, too."""
    if isinstance(error, EngineUnavailable):
        return status in (EngineStatus.DRAINING, EngineStatus.DEAD)
    if isinstance(error, InvalidRequest):
        return not any(violation.field.startswith("frame.") for violation in error.violations)
    return isinstance(error, _ENDS_STREAM)


def _frame_error(failure: CallFailure) -> wire.FrameError:
    return wire.FrameError(code=failure.code.value, reason=failure.reason, message=failure.message)


def _settings_path(field: str) -> str:
    return f"settings.request.{field}" if field and not field.startswith("settings") else field


def _frame_path(field: str) -> str:
    """Returns the path in the messages of the stream of a field of the request about a frame."""
    return f"frame.{field}" if field.startswith("image") else _settings_path(field)
