"""Provides what both clients need to send a call and to read its stream; `async_calls` sends it.

- `Asyncio` and `Threads` hold the operations in which the two clients differ.
- `Retries` decides whether and when a refused call is sent again: only if the server says when to try again, since
  its queue is full, it limits the rate of a token, or it is stopping or recovering. gRPC itself repeats calls that
  no server has accepted, within about a second.
- `SentImages` decides how a call sends its image: in its message, or stored on the server and named. A client
  remembers the digests of the images that it has sent. An image that it sends a second time is stored on the server
  first, and from then on named. If the server has dropped the image, it is stored again.
- `Events` converts the events of a stream to pieces and a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from kestrel_client import images, results
from kestrel_client.connection import Connection
from kestrel_client.errors import (
    LOCAL_REASONS,
    RESULT_MISSING,
    Cancelled,
    Failure,
    ImageNotFound,
    KestrelClientError,
    Overloaded,
    PermissionDenied,
    ServerError,
    Unavailable,
)
from kestrel_client.results import (
    Box,
    CaptionResult,
    DetectedObject,
    DetectResult,
    EmbedResult,
    PointedObject,
    PointResult,
    QueryResult,
    Segment,
    SegmentResult,
    TextDelta,
)
from kestrel_client.v1 import image_service_pb2, media_pb2, vision_service_pb2

_FIRST_WAIT_S = 0.1
_LONGEST_TIMEOUT_S = 1e9
"""The longest time for a call: gRPC takes one of some 250 years or more for a deadline that has passed."""
_LONGEST_WAIT_S = 5.0
DEFAULT_STORE_FROM_BYTES = 2**20
"""Below this, sending an image again takes hardly longer than naming it, see `bench/NOTES.md`."""
_MAX_REMEMBERED = 4096
_IN_MESSAGE, _STORE_FIRST, _BY_NAME = "in message", "store first", "by name"
AnyResult = TypeVar("AnyResult", QueryResult, CaptionResult, SegmentResult, PointResult, DetectResult, EmbedResult)
AnyPiece = TypeVar("AnyPiece", TextDelta, Segment, tuple[str, PointedObject], tuple[str, DetectedObject], bytes)
AnyReturned = TypeVar("AnyReturned")
END: Any = object()
"""The value that `next` returns at the end of an iterator."""
TextResponse = (
    vision_service_pb2.QueryResponse | vision_service_pb2.CaptionResponse | vision_service_pb2.ChatResponse
)


class Asyncio:
    """The operations of the client that awaits."""

    Event = asyncio.Event
    Lock = asyncio.Lock

    @staticmethod
    def channel(connection: Connection) -> grpc.aio.Channel:
        """Returns the channel of a connection."""
        if connection.credentials is None:
            return grpc.aio.insecure_channel(connection.target, connection.options)
        return grpc.aio.secure_channel(connection.target, connection.credentials, connection.options)

    @staticmethod
    async def run(function: Callable[..., AnyReturned], *arguments: Any) -> AnyReturned:
        """Returns the function's result. A thread runs it, since it may take too long for the event loop."""
        return await asyncio.to_thread(function, *arguments)

    @staticmethod
    async def wait(cancelled: asyncio.Event, duration_s: float) -> None:
        """Waits for a time, or until the call is cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cancelled.wait(), duration_s)

    @staticmethod
    def iterator(values: Any) -> Any:
        """Returns the iterator over what may be iterated over with `async for` or without."""
        return aiter(values) if hasattr(values, "__aiter__") else iter(values)

    @staticmethod
    async def next(iterator: Any) -> Any:
        """Returns the next value; `END` after the last. A thread waits for an iterator that blocks."""
        if hasattr(iterator, "__anext__"):
            return await anext(iterator, END)
        return await asyncio.to_thread(next, iterator, END)

    @staticmethod
    async def read(call: Any, cancelled: asyncio.Event, request_id: str) -> Any:
        """Returns the next message of a stream; None at its end."""
        try:
            return await call.read() or None  # the mark of the end is false, every message is true
        except asyncio.CancelledError:
            # The same exception means that this task is cancelled, which must propagate, or that the call is.
            task = asyncio.current_task()
            if cancelled.is_set() and not (task is not None and task.cancelling()):
                raise cancelled_here(request_id) from None
            raise


class Threads:
    """The operations of the client that blocks; see `Asyncio`."""

    Event = threading.Event
    Lock = threading.Lock

    @staticmethod
    def channel(connection: Connection) -> grpc.Channel:
        if connection.credentials is None:
            return grpc.insecure_channel(connection.target, connection.options)
        return grpc.secure_channel(connection.target, connection.credentials, connection.options)

    @staticmethod
    def run(function: Callable[..., AnyReturned], *arguments: Any) -> AnyReturned:
        return function(*arguments)

    @staticmethod
    def wait(cancelled: threading.Event, duration_s: float) -> None:
        cancelled.wait(duration_s)

    @staticmethod
    def iterator(values: Any) -> Any:
        return iter(values)

    @staticmethod
    def next(iterator: Any) -> Any:
        return next(iterator, END)

    @staticmethod
    def read(call: Any, cancelled: threading.Event, request_id: str) -> Any:
        return next(call, None)


class Retries:
    """The attempts of one call, all of them within `timeout_s`, and none begun later than `max_retry_s`."""

    def __init__(self, timeout_s: float, max_retry_s: float, max_queue_s: float | None) -> None:
        self.timeout_s = timeout_s = min(timeout_s, _LONGEST_TIMEOUT_S)
        now = time.monotonic()
        self._ends = now + timeout_s
        # A caller who limits the wait for a start does not wait longer by waiting here.
        self._gives_up = now + min(max_retry_s, timeout_s, max_retry_s if max_queue_s is None else max_queue_s)
        self._least_wait_s = _FIRST_WAIT_S

    @property
    def remaining_s(self) -> float:
        """Returns the time that is left for the next attempt, in seconds."""
        return self._ends - time.monotonic()

    def wait_s(self, error: KestrelClientError, default_s: float | None = None) -> float | None:
        """Returns the seconds to wait after this failure before the next attempt; None to give up.

        `default_s` is the wait where the server asks for none; None gives up then, and after other failures than
        those that pass.
        """
        may_pass = default_s is not None or isinstance(error, Overloaded | Unavailable)
        if not may_pass or error.reason == "QUEUE_TIMEOUT":
            return None
        asked_s = error.failure.retry_after_s
        if asked_s is None:
            asked_s = default_s
        if asked_s is None:
            return None
        # Callers that were refused together must not come back together.
        wait_s = max(asked_s, self._least_wait_s) * random.uniform(1.0, 1.5)
        self._least_wait_s = min(2 * self._least_wait_s, _LONGEST_WAIT_S)
        return wait_s if time.monotonic() + wait_s <= self._gives_up else None


class SentImages:
    """The images that a client has sent. May be used by several threads.

    Images of at least `store_from_bytes` are stored when they are sent again; None means never.
    """

    def __init__(self, store_from_bytes: int | None) -> None:
        self._store_from_bytes = store_from_bytes
        self._is_stored: OrderedDict[str, bool] = OrderedDict()  # those used last at the end
        self._lock = threading.Lock()

    def delivery(self, data: bytes) -> Delivery:
        """Returns the way in which a call sends an image, which counts as sent from now on."""
        image_id = images.name_of(data)
        if self._store_from_bytes is None or len(data) < self._store_from_bytes:
            return Delivery(self, data, image_id, [_IN_MESSAGE])
        with self._lock:
            is_stored = self._is_stored.get(image_id)
            self._is_stored[image_id] = bool(is_stored)
            self._is_stored.move_to_end(image_id)
            if len(self._is_stored) > _MAX_REMEMBERED:
                self._is_stored.popitem(last=False)
        ways = [_IN_MESSAGE]
        if is_stored is not None:
            ways.insert(0, _STORE_FIRST)
        if is_stored:
            ways.insert(0, _BY_NAME)
        return Delivery(self, data, image_id, ways)

    def note_stored(self, image_id: str) -> None:
        """Notes that the server has the image now."""
        with self._lock:
            self._is_stored[image_id] = True

    def give_up(self) -> None:
        """Notes that the server stores no images for this client, so that all are sent in messages."""
        self._store_from_bytes = None


class Delivery:
    """The way in which one call sends its image: the best one first, and the next where that fails."""

    def __init__(self, sent: SentImages, data: bytes, image_id: str, ways: list[str]) -> None:
        self.image_id = image_id
        """The name under which a server stores the image."""
        self._sent = sent
        self._data = data
        self._ways = ways

    @property
    def must_store(self) -> bool:
        """Returns True if the image is to be stored before the call."""
        return self._ways[0] is _STORE_FIRST

    def put_request(self) -> image_service_pb2.PutImageRequest:
        """Returns the request that stores the image."""
        return image_service_pb2.PutImageRequest(data=self._data)

    def note_stored(self) -> None:
        """Notes that the image is stored."""
        self._sent.note_stored(self.image_id)

    def note_not_stored(self, error: KestrelClientError) -> None:
        """Notes that the image could not be stored."""
        self._ways.pop(0)
        if isinstance(error, PermissionDenied) or error.code is grpc.StatusCode.UNIMPLEMENTED:
            self._sent.give_up()

    def fill(self, message: media_pb2.Image) -> None:
        """Puts the image or its name into a message."""
        if self._ways[0] is _IN_MESSAGE:
            message.data = self._data
        else:
            message.image_id = self.image_id

    def can_retry(self, error: KestrelClientError) -> bool:
        """Returns True if a failed call is to be tried again, since the server did not have the image."""
        if not isinstance(error, ImageNotFound) or len(self._ways) == 1:
            return False
        self._ways.pop(0)
        return True


class Events(ABC, Generic[AnyPiece, AnyResult]):
    """Reads one stream's events in order: `accept` each of them, then take the `result`."""

    def __init__(self, read: Callable[..., AnyResult]) -> None:
        self._read = read
        self._result: AnyResult | None = None

    def accept(self, response: Any) -> AnyPiece | None:
        """Returns the piece of the answer in this event, or None if it is of another kind."""
        if response.HasField("completed"):
            self._result = self._read(response.completed)
            return None
        return self.piece(response)

    @property
    def result(self) -> AnyResult:
        """Returns the whole result, once the stream has ended."""
        if self._result is None:
            text = "the stream ended without a result"
            raise ServerError(Failure(grpc.StatusCode.INTERNAL, text, RESULT_MISSING))
        return self._result

    @abstractmethod
    def piece(self, response: Any) -> AnyPiece | None:
        """Returns the new text of an event that is not the last."""


class TextEvents(Events[TextDelta, AnyResult]):
    """Reads the stream of a text: its pieces are those of the text."""

    def piece(self, response: TextResponse) -> TextDelta | None:
        return results.text_delta(response.delta) if response.HasField("delta") else None


class OutlineEvents(Events[Segment, SegmentResult]):
    """Reads the stream of an outline: its pieces are the outline as far as it has been drawn, first its box, then
    longer and longer paths."""

    def __init__(self, object: str) -> None:
        super().__init__(lambda message: results.segment_result(message, object))
        self._box: Box | None = None
        self._path = ""

    def piece(self, response: vision_service_pb2.StreamSegmentResponse) -> Segment | None:
        if response.HasField("box"):
            self._box = results.box(response.box)
        elif response.HasField("path_delta"):
            self._path += response.path_delta.text
        else:
            return None
        return None if self._box is None else Segment(self._path, self._box, is_partial=True)


class PointEvents(Events[tuple[str, PointedObject], PointResult]):
    """Reads the stream of points: its pieces are the places with the object that was looked for."""

    def __init__(self, object: str | Sequence[str], min_score: float | None) -> None:
        super().__init__(lambda message: results.point_result(message, object, min_score))
        self._names = _names(object)
        self._min_score = min_score

    def piece(self, response: vision_service_pb2.StreamPointResponse) -> tuple[str, PointedObject] | None:
        if not response.HasField("found"):
            return None
        results.require_scores((response.found,), self._min_score)
        return self._names[response.object_index], results.pointed_object(response.found)


class DetectEvents(Events[tuple[str, DetectedObject], DetectResult]):
    """Reads the stream of boxes: its pieces are the boxes with the object that was looked for."""

    def __init__(self, object: str | Sequence[str], min_score: float | None) -> None:
        super().__init__(lambda message: results.detect_result(message, object, min_score))
        self._names = _names(object)
        self._min_score = min_score

    def piece(self, response: vision_service_pb2.StreamDetectResponse) -> tuple[str, DetectedObject] | None:
        if not response.HasField("found"):
            return None
        results.require_scores((response.found,), self._min_score)
        return self._names[response.object_index], results.detected_object(response.found)


def _names(object: str | Sequence[str]) -> Sequence[str]:
    return (object,) if isinstance(object, str) else tuple(object)


class PatchEvents(Events[bytes, EmbedResult]):
    """Reads the stream of the embeddings of patches, which all belong to its result."""

    def __init__(self) -> None:
        self._patches: list[bytes] = []
        super().__init__(lambda message: results.embed_result(message, b"".join(self._patches)))

    def piece(self, response: vision_service_pb2.StreamEmbedImageResponse) -> bytes | None:
        if not response.HasField("patches"):
            return None
        self._patches.append(response.patches.data)
        return response.patches.data


def cancelled_here(request_id: str) -> Cancelled:
    """Returns the error for reading a stream after cancelling it."""
    code = grpc.StatusCode.CANCELLED
    return Cancelled(Failure(code, "the stream was cancelled", LOCAL_REASONS[code], request_id=request_id))
