"""Sends the requests of the blocking client and reads the responses. `client` says which requests there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self

import grpc

from kestrel_client import requests
from kestrel_client.channel import address_of, channel_options, token_of
from kestrel_client.errors import KestrelClientError, client_closed, errors_of, from_rpc_error
from kestrel_client.images import inputs
from kestrel_client.images.inputs import ImageInput, put_reference
from kestrel_client.images.sent_images import Delivery, SentImages
from kestrel_client.requests import CallOptions
from kestrel_client.results import Segment, SegmentResult, TextChannel, TextDelta
from kestrel_client.streams import AnyPiece, AnyResult, Events, OutlineEvents, TextEvents
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub


class BlockingCalls:
    """The connection of a client. The arguments are those of `Client`."""

    def __init__(
        self,
        address: str | None,
        timeout_s: float,
        wait_for_ready: bool,
        max_retries: int,
        token: str | None,
        credentials: grpc.ChannelCredentials | None,
        store_from_bytes: int | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._wait_for_ready = wait_for_ready
        self._token = token_of(token)
        self._sent = SentImages(store_from_bytes)
        self._is_closed = False
        where, options = address_of(address), channel_options(max_retries)
        self._channel = (
            grpc.insecure_channel(where, options)
            if credentials is None
            else grpc.secure_channel(where, credentials, options)
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
            message = build()
            delivery = self._delivery(message, image)
            while True:
                try:
                    return self._start(rpc, message, delivery, options, request_id)
                except grpc.RpcError as error:
                    failure = from_rpc_error(error, request_id)
                    if delivery is None or not delivery.can_retry(failure):
                        raise failure from error

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

    def outline(self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput) -> SegmentStream:
        """The stream of an outline, as `stream` is one of text."""
        return SegmentStream(self._attempts(rpc, build, options, image), OutlineEvents())

    def _attempts(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput | None
    ) -> _Attempts:
        request_id = requests.request_id(options)
        with errors_of(request_id):
            message = build()
            delivery = self._delivery(message, image)
        return _Attempts(
            request_id,
            lambda: self._start(rpc, message, delivery, options, request_id),
            lambda failure: delivery is not None and delivery.can_retry(failure),
        )

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

    def _start(
        self, rpc: Any, message: Any, delivery: Delivery | None, options: CallOptions, request_id: str
    ) -> Any:
        """The response of a unary call, or the call itself of a streaming one, which does not wait."""
        if delivery is not None:
            if delivery.must_store:
                self._store(delivery, options, request_id)
            delivery.fill(message.image)
        timeout_s = requests.timeout_s(options, self._timeout_s)
        metadata = requests.metadata(request_id, self._token)
        try:
            return rpc(message, timeout=timeout_s, metadata=metadata, wait_for_ready=self._wait_for_ready)
        except ValueError as error:
            if self._is_closed:
                raise client_closed() from error
            raise

    def _store(self, delivery: Delivery, options: CallOptions, request_id: str) -> None:
        try:
            self._start(self.images.PutImage, delivery.put_request(), None, options, request_id)
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error, request_id))
        else:
            delivery.note_stored()


class _Attempts(NamedTuple):
    """A streaming call that is begun again where `can_retry` says so about its failure."""

    request_id: str
    start: Callable[[], Any]
    can_retry: Callable[[KestrelClientError], bool]


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
        self._call.cancel()

    def _next_piece(self) -> AnyPiece | None:
        while True:
            try:
                for response in self._call:
                    piece = self._events.accept(response)
                    if piece is not None:
                        return piece
                return None
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.request_id)
                if not self._attempts.can_retry(failure):
                    raise failure from error
                with errors_of(self.request_id):
                    self._call = self._attempts.start()


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
