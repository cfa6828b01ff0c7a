"""Sends the requests of the blocking client and reads the responses. `client` says which requests there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from kestrel_client import requests
from kestrel_client.connection.channel import Connection
from kestrel_client.errors import KestrelClientError, client_closed, errors_of, from_rpc_error
from kestrel_client.images import inputs
from kestrel_client.images.inputs import ImageInput, put_reference
from kestrel_client.images.sent_images import Delivery, SentImages
from kestrel_client.requests import CallOptions
from kestrel_client.results import Segment, SegmentResult, TextChannel, TextDelta
from kestrel_client.retries import Retries
from kestrel_client.streams import AnyPiece, AnyResult, Events, OutlineEvents, TextEvents, cancelled_here
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub


class BlockingCalls:
    """The connection of a client. The arguments are those of `Client`."""

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        wait_for_ready: bool,
        max_retry_s: float,
        store_from_bytes: int | None,
    ) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._max_retry_s = max_retry_s
        self._wait_for_ready = wait_for_ready
        self._sent = SentImages(store_from_bytes)
        self._is_closed = False
        target, options = connection.target, connection.options
        self._channel = (
            grpc.insecure_channel(target, options)
            if connection.credentials is None
            else grpc.secure_channel(target, connection.credentials, options)
        )
        self.vision = VisionServiceStub(self._channel)
        self.images = ImageServiceStub(self._channel)
        self.engine = EngineServiceStub(self._channel)

    def call(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput | None = None
    ) -> Any:
        """The response to the message that `build` returns."""
        request_id = requests.request_id(options)
        with errors_of(request_id):
            attempts = self._attempts_of(rpc, build(), options, image, request_id)
            while True:
                try:
                    return attempts.start()
                except grpc.RpcError as error:
                    attempts.retry(error, time.sleep)

    def stream(
        self,
        rpc: Any,
        build: Callable[[], Any],
        options: CallOptions,
        image: ImageInput | None,
        read: Callable[..., AnyResult],
    ) -> TextStream[AnyResult]:
        """The started stream of text for the message that `build` returns."""
        return TextStream(self._attempts(rpc, build, options, image), TextEvents(read))

    def outline(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput, object: str
    ) -> SegmentStream:
        """The stream of an outline, as `stream` is one of text."""
        return SegmentStream(self._attempts(rpc, build, options, image), OutlineEvents(object))

    def _attempts(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput | None
    ) -> _Attempts:
        request_id = requests.request_id(options)
        with errors_of(request_id):
            return self._attempts_of(rpc, build(), options, image, request_id)

    def _attempts_of(
        self, rpc: Any, message: Any, options: CallOptions, image: ImageInput | None, request_id: str
    ) -> _Attempts:
        retries = requests.retries(options, self._timeout_s, self._max_retry_s)
        return _Attempts(self, rpc, message, self._delivery(message, image), retries, request_id)

    def image_bytes(self, image: ImageInput) -> bytes:
        """The file of an image."""
        with errors_of(requests.new_request_id()):
            return inputs.image_bytes(image)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._channel.close()

    def _delivery(self, message: Any, image: ImageInput | None) -> Delivery | None:
        """How the image is sent; None where there is none, or the message has what there is to send of it."""
        if image is None or put_reference(message.image, image):
            return None
        return self._sent.delivery(inputs.image_bytes(image))

    def explained(self, failure: KestrelClientError, retries: Retries) -> KestrelClientError:
        """The failure, with what this client finds out about it."""
        return self._connection.explain(failure, retries.timeout_s)

    def start(self, rpc: Any, message: Any, delivery: Delivery | None, retries: Retries, request_id: str) -> Any:
        """The response of a unary call, or the call itself of a streaming one, which does not wait."""
        if delivery is not None:
            if delivery.must_store:
                self._store(delivery, retries, request_id)
            delivery.fill(message.image)
        metadata = requests.metadata(request_id, self._connection.token)
        try:
            return rpc(message, timeout=retries.remaining_s, metadata=metadata, wait_for_ready=self._wait_for_ready)
        except ValueError as error:
            if self._is_closed:
                raise client_closed() from error
            raise

    def _store(self, delivery: Delivery, retries: Retries, request_id: str) -> None:
        try:
            self.start(self.images.PutImage, delivery.put_request(), None, retries, request_id)
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error, request_id))
        else:
            delivery.note_stored()


class _Attempts:
    """A call that begins when it is asked to, and again where the server has refused it for now."""

    def __init__(
        self,
        calls: BlockingCalls,
        rpc: Any,
        message: Any,
        delivery: Delivery | None,
        retries: Retries,
        request_id: str,
    ) -> None:
        self.request_id = request_id
        self._calls = calls
        self._rpc = rpc
        self._message = message
        self._delivery = delivery
        self._retries = retries

    def start(self) -> Any:
        """What `BlockingCalls.start` returns."""
        return self._calls.start(self._rpc, self._message, self._delivery, self._retries, self.request_id)

    def retry(self, error: grpc.RpcError, sleep: Callable[[float], object]) -> None:
        """Return when the call may start again after this error; raise its failure where it may not."""
        failure = from_rpc_error(error, self.request_id)
        if self._delivery is not None and self._delivery.can_retry(failure):
            return
        wait_s = self._retries.wait_s(failure)
        if wait_s is None:
            raise self._calls.explained(failure, self._retries) from error
        sleep(wait_s)

    def explained(self, error: grpc.RpcError) -> KestrelClientError:
        """The failure of a call that must not start again."""
        return self._calls.explained(from_rpc_error(error, self.request_id), self._retries)


class Stream(Generic[AnyPiece, AnyResult]):
    """A stream of pieces of an answer, which ends with the `result`.

    Cancelling it, leaving its `with` block or dropping it before its end stops the server from generating.

    Attributes:
        request_id: Names the request in the server's log.
    """

    def __init__(self, attempts: _Attempts, events: Events[AnyPiece, AnyResult]) -> None:
        self.request_id = attempts.request_id
        self._attempts = attempts
        self._events = events
        self._has_response = False
        self._cancelled = threading.Event()
        with errors_of(self.request_id):
            self._call = attempts.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def result(self) -> AnyResult:
        """The whole result, after reading the rest of the stream."""
        while self._next_piece() is not None:
            pass
        with errors_of(self.request_id):
            return self._events.result

    def cancel(self) -> None:
        """Cancels the call. Does nothing once the stream has ended."""
        self._cancelled.set()
        self._call.cancel()

    def _next_piece(self) -> AnyPiece | None:
        while True:
            try:
                for response in self._call:
                    self._has_response = True
                    piece = self._events.accept(response)
                    if piece is not None:
                        return piece
                return None
            except grpc.RpcError as error:
                if self._has_response:
                    raise self._attempts.explained(error) from error
                self._attempts.retry(error, self._cancelled.wait)
                if self._cancelled.is_set():
                    raise cancelled_here(self.request_id) from None
                with errors_of(self.request_id):
                    self._call = self._attempts.start()
                if self._cancelled.is_set():  # since the line above, when there was no call to cancel
                    self._call.cancel()


class TextStream(Stream[TextDelta, AnyResult]):
    """A stream of text: iterate over its pieces, then read the `result`."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece of the answer or caption."""
        while (delta := self._next_piece()) is not None:
            if delta.channel is TextChannel.ANSWER:
                return delta.text
        raise StopIteration

    def deltas(self) -> Iterator[TextDelta]:
        """The pieces of every channel, including the reasoning, in the order of their arrival."""
        while (delta := self._next_piece()) is not None:
            yield delta


class SegmentStream(Stream[Segment, SegmentResult]):
    """A stream of an outline: iterate over it as it grows, then read the `result`.

    The first segment has the box and an empty path; each later one has a longer path.
    """

    def __iter__(self) -> Iterator[Segment]:
        return self

    def __next__(self) -> Segment:
        """The outline as far as it has been drawn."""
        segment = self._next_piece()
        if segment is None:
            raise StopIteration
        return segment
