"""Sends the frames of the blocking client and reads what was found in each. `client` says which requests there are.

Generated from `async_frames.py` by tools/blocking_client.py. Change that file, and generate this one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from kestrel_client import requests
from kestrel_client.blocking_calls import BlockingCalls
from kestrel_client.errors import (
    KestrelClientError,
    StreamIdle,
    Unavailable,
    client_closed,
    errors_of,
    from_rpc_error,
    invalid_argument,
)
from kestrel_client.images import ImageInput, image_bytes, put_reference
from kestrel_client.requests import CallOptions
from kestrel_client.results import AnyFound, DetectedObject, DetectResult, FrameResult, frame_result
from kestrel_client.sending import END, Retries, Threads, cancelled_here
from kestrel_client.v1 import vision_service_pb2

_SHORT_WAIT_S = 0.5


class FrameStream(Generic[AnyFound]):
    """A stream of frames: iterate over what was found in each that the server has looked at, in their order.

    Frames are taken from the caller as fast as they can be sent. The stream ends when they end. Where the server
    ends it, since it stops or the stream is old, or the connection is lost, another call goes on with the next
    frame. Cancelling the stream, or leaving its `with` block, ends it at once.

    Attributes:
        request_id: Names the stream in the server's log.
    """

    def __init__(
        self,
        calls: BlockingCalls,
        rpc: Any,
        images: Iterable[ImageInput],
        build: Callable[[], Any],
        read: Callable[[Any], AnyFound],
        options: CallOptions,
    ) -> None:
        """`build` returns the first message, `read` reads the result of a frame."""
        self.request_id = requests.request_id(options)
        self._calls = calls
        self._rpc = rpc
        self._read = read
        self._options = options
        self._cancelled = Threads.Event()
        self._call: Any = None
        with errors_of(self.request_id):
            # Wrong options are reported now, and not when the connection is lost.
            timeout_s = _retries(options, calls.max_retry_s).timeout_s
            self._timeout_s = math.inf if options.get("timeout_s") is None else timeout_s
            self._source = _Frames(images, build())
        self._ends: float | None = None
        self._retries: Retries | None = None
        """The attempts since the last response; None after a response."""
        self._num_dropped = 0
        """Frames that the server had dropped in earlier calls."""
        self._num_dropped_now = 0
        self._first_track = 0
        self._last_track = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_source"):  # otherwise an argument was wrong
            self.cancel()

    def __iter__(self) -> Iterator[FrameResult[AnyFound]]:
        return self

    def __next__(self) -> FrameResult[AnyFound]:
        """Returns what was found in the next frame that the server has looked at."""
        with errors_of(self.request_id):
            found = self._next()
        if found is None:
            raise StopIteration
        return found

    def cancel(self) -> None:
        """Ends the stream. Does nothing once it has ended."""
        self._cancelled.set()
        self._source.close()
        if self._call is not None:
            self._call.cancel()

    def _next(self) -> FrameResult[AnyFound] | None:
        while True:
            if self._call is None:
                self._start()
            try:
                response = Threads.read(self._call, self._cancelled, self.request_id)
            except grpc.RpcError as error:
                self._call = None
                self._resume(from_rpc_error(error, self.request_id))
                continue
            if response is not None:
                self._retries = None
                return self._accept(response)
            if self._source.failure is not None:
                raise self._source.failure
            return None

    def _start(self) -> None:
        calls = self._calls
        if self._cancelled.is_set():
            raise cancelled_here(self.request_id)
        if calls.is_closed:
            raise client_closed()
        if self._ends is None:
            self._ends = time.monotonic() + self._timeout_s
        self._num_dropped += self._num_dropped_now
        self._num_dropped_now, self._first_track = 0, self._last_track
        self._call = self._rpc(
            self._source.new_messages(),
            timeout=None if self._ends == math.inf else self._ends - time.monotonic(),
            metadata=requests.metadata(self.request_id, calls.connection.token),
            wait_for_ready=calls.wait_for_ready,
        )

    def _resume(self, failure: KestrelClientError) -> None:
        """Waits until another call may go on after this failure; raises it if none may."""
        if self._source.failure is not None:
            raise self._source.failure
        calls = self._calls
        if self._cancelled.is_set():
            raise cancelled_here(self.request_id)
        if isinstance(failure, StreamIdle):
            return
        if self._retries is None:
            self._retries = _retries(self._options, calls.max_retry_s)
        # Without a wait that the server asks for, the connection is lost, and another server may answer. So it may
        # after a status of gRPC's own: that is what grpc.aio reports if a stream ends while it sends a message.
        is_of_grpc = failure.code is grpc.StatusCode.INTERNAL and not failure.failure.is_from_server
        lost_s = _SHORT_WAIT_S if isinstance(failure, Unavailable) or is_of_grpc else None
        wait_s = self._retries.wait_s(failure, lost_s)
        if wait_s is None:
            raise Threads.run(calls.connection.explain, failure, self._timeout_s)
        Threads.wait(self._cancelled, wait_s)

    def _accept(self, response: Any) -> FrameResult[AnyFound]:
        found = frame_result(response, self._read, self.request_id)
        self._num_dropped_now = found.dropped_count
        index = self._source.first_index + found.index
        self._source.note_answered(index)
        result: Any = found.result
        if isinstance(result, DetectResult):
            result = replace(
                result,
                objects=self._tracked(result.objects),
                groups=tuple(replace(group, objects=self._tracked(group.objects)) for group in result.groups),
            )
        return replace(found, index=index, result=result, dropped_count=self._num_dropped + found.dropped_count)

    def _tracked(self, objects: tuple[DetectedObject, ...]) -> tuple[DetectedObject, ...]:
        """Returns the objects with other names than those of earlier calls, which the server does not know."""
        ids = [None if each.track_id is None else self._first_track + each.track_id for each in objects]
        self._last_track = max((self._last_track, *(each for each in ids if each is not None)))
        return tuple(replace(each, track_id=name) for each, name in zip(objects, ids, strict=True))


def _retries(options: CallOptions, max_retry_s: float) -> Retries:
    """Returns the attempts to go on; `max_queue_s` of the options limits how long a frame waits, and not them."""
    return requests.retries({**options, "max_queue_s": None}, math.inf, max_retry_s)


class _Frames:
    """Gives the frames of the caller to one call after the other. The newest call alone gets further frames."""

    def __init__(self, images: Iterable[ImageInput], settings: Any) -> None:
        self.failure: Exception | None = None
        """The error that the caller's frames have raised; None if there is none."""
        self.first_index = 0
        """The index of the first frame of the newest call."""
        if isinstance(images, str | bytes):  # or its characters would be frames
            raise invalid_argument("images", "are frames in a list or from an iterator, not a single one")
        try:
            self._images = Threads.iterator(images)
        except TypeError:
            kind = type(images).__name__
            raise invalid_argument("images", f"are frames in a list or from an iterator, not a {kind}") from None
        self._settings = settings
        self._keeps_all = settings.settings.every_frame
        self._taking = Threads.Lock()
        self._changing = threading.Lock()
        self._call_number = 0
        self._num_taken = 0
        self._num_read = 0
        """Responses of the newest call that have been read."""
        self._waiting: deque[tuple[int, Any]] = deque()
        self._sent: deque[tuple[int, Any]] = deque()
        """Frames without an answer, which another call sends again: all, or the newest."""

    def new_messages(self) -> Any:
        """Returns the messages of a new call."""
        with self._changing:
            self._call_number += 1
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
            self._num_read = 0
            self.first_index = self._waiting[0][0] if self._waiting else self._num_taken
            return self._messages(self._call_number)

    def note_answered(self, index: int) -> None:
        """Notes that a response has been read, and that the frames up to this one need not be sent again."""
        with self._changing:
            self._num_read += 1
            while self._sent and self._sent[0][0] <= index:
                self._sent.popleft()

    def close(self) -> None:
        """Gives no further frame to any call."""
        self._call_number += 1

    def _messages(self, call_number: int) -> Iterator[Any]:
        yield self._settings
        while (message := self._next(call_number)) is not None:
            yield message

    def _next(self, call_number: int) -> Any:
        """Returns the next message; None at the end of the frames or of the call."""
        while call_number == self._call_number:
            message = self._first_waiting(call_number)
            if message is not None:
                return message
            with self._taking:  # another call may still wait for a frame of the caller
                if call_number == self._call_number and not self._waiting and not self._take():
                    return None
        return None

    def _first_waiting(self, call_number: int) -> Any:
        """Returns the message of the first frame that waits; None if none waits, or the call has ended."""
        with self._changing:
            if call_number != self._call_number or not self._waiting:
                return None
            index, message = self._waiting.popleft()
            if not self._keeps_all:
                self._sent.clear()
                message.frame.read_response_count = self._num_read
            self._sent.append((index, message))
            return message

    def _take(self) -> bool:
        """Takes a frame of the caller. Returns False if there is none."""
        try:
            image = Threads.next(self._images)
            if image is END:
                return False
            message = Threads.run(self._message, image)
        except Exception as error:  # of the caller's; the reader of the stream gets it
            self.failure = error
            return False
        with self._changing:
            self._waiting.append((self._num_taken, message))
            self._num_taken += 1
        return True

    def _message(self, image: ImageInput) -> Any:
        frame = vision_service_pb2.Frame()
        if not put_reference(frame.image, image):
            frame.image.data = image_bytes(image)
        return type(self._settings)(frame=frame)
