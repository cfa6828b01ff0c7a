"""The blocking client. Sends requests and reads responses; `requests` and `results` build the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, Unpack

import grpc

from kestrel_client import requests, results
from kestrel_client.channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, channel_options
from kestrel_client.errors import KestrelClientError, from_rpc_error
from kestrel_client.images import ImageInput, StoredImage, image_bytes, put_reference
from kestrel_client.requests import CallOptions, Length, SpatialRef
from kestrel_client.results import (
    CaptionResult,
    ClearedCache,
    DetectResult,
    Load,
    Model,
    PointResult,
    QueryResult,
    SegmentResult,
    ServerInfo,
    TextChannel,
    TextDelta,
)
from kestrel_client.sent_images import DEFAULT_STORE_FROM_BYTES, Delivery, SentImages
from kestrel_client.streams import AnyResult, TextEvents
from kestrel_client.v1 import engine_service_pb2 as engine_pb2
from kestrel_client.v1 import image_service_pb2 as image_pb2
from kestrel_client.v1 import vision_service_pb2 as vision_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub


class Client:
    """Calls one server, or several behind one name; safe to share between threads.

    Calls end after `timeout_s` at the latest, if they do not say otherwise themselves. With `wait_for_ready`
    a call waits that long for a server to come up; without it, it fails with `Unavailable` after a few short
    retries.

    An image of at least `store_from_bytes` that is sent again is stored on the server, and named from then on; None
    switches that off.

    Calls bear the `token`, for servers that ask for one. With `credentials`, such as those of
    `grpc.ssl_channel_credentials()`, the connection is encrypted.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        wait_for_ready: bool = False,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        store_from_bytes: int | None = DEFAULT_STORE_FROM_BYTES,
    ) -> None:
        self._timeout_s = timeout_s
        self._wait_for_ready = wait_for_ready
        self._token = token
        self._sent = SentImages(store_from_bytes)
        self._channel = (
            grpc.insecure_channel(address, channel_options())
            if credentials is None
            else grpc.secure_channel(address, credentials, channel_options())
        )
        self._vision = VisionServiceStub(self._channel)
        self._images = ImageServiceStub(self._channel)
        self._engine = EngineServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> TextStream[QueryResult]:
        """Answers a question, with or without an image, as a stream of text."""
        message = requests.query(vision_pb2.QueryRequest, question, reasoning, spatial_refs, options)
        return TextStream(
            self._stream(self._vision.Query, message, image, options), TextEvents(results.query_result)
        )

    def complete_query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> QueryResult:
        """Answers a question in one response."""
        message = requests.query(vision_pb2.CompleteQueryRequest, question, reasoning, spatial_refs, options)
        return results.query_result(self._call(self._vision.CompleteQuery, message, image, options).result)

    def caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> TextStream[CaptionResult]:
        """Describes an image, as a stream of text."""
        message = requests.caption(vision_pb2.CaptionRequest, length, options)
        return TextStream(
            self._stream(self._vision.Caption, message, image, options), TextEvents(results.caption_result)
        )

    def complete_caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> CaptionResult:
        """Describes an image in one response."""
        message = requests.caption(vision_pb2.CompleteCaptionRequest, length, options)
        return results.caption_result(self._call(self._vision.CompleteCaption, message, image, options).result)

    def point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> PointResult:
        """Finds the place of each object of a kind."""
        message = requests.point(object, max_objects, spatial_refs, options)
        return results.point_result(self._call(self._vision.Point, message, image, options))

    def detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> DetectResult:
        """Finds a box around each object of a kind."""
        message = requests.detect(object, max_objects, spatial_refs, options)
        return results.detect_result(self._call(self._vision.Detect, message, image, options))

    def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> SegmentResult:
        """Finds the outline of an object."""
        message = requests.segment(object, spatial_refs, options)
        return results.segment_result(self._call(self._vision.Segment, message, image, options))

    def upload_image(
        self, image: ImageInput, *, ttl_s: float | None = None, pin: bool = False, timeout_s: float | None = None
    ) -> StoredImage:
        """Stores an image on the server, for `ttl_s` seconds or as long as the server does by default.

        With `pin` it is kept for that time even where its memory is needed for other images. The result, or its
        `image_id`, stands for the image in every request. `image` has to be a file, its bytes or a PIL image.
        """
        options = CallOptions(timeout_s=timeout_s)
        data = image_bytes(image)
        response = self._call(self._images.PutImage, requests.put_image(data, ttl_s, pin), None, options)
        return results.stored_image(response.image)

    def get_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> StoredImage:
        """Describes a stored image. Raises `ImageNotFound`."""
        message = image_pb2.GetImageRequest(image_id=requests.image_id(image))
        response = self._call(self._images.GetImage, message, None, CallOptions(timeout_s=timeout_s))
        return results.stored_image(response.image)

    def read_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> bytes:
        """The file of a stored image. Raises `ImageNotFound`."""
        message = image_pb2.GetImageRequest(image_id=requests.image_id(image), include_data=True)
        return (self._call(self._images.GetImage, message, None, CallOptions(timeout_s=timeout_s))).data

    def delete_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> None:
        """Drops a stored image, and what the server has computed from it. Raises `ImageNotFound`."""
        message = image_pb2.DeleteImageRequest(image_id=requests.image_id(image))
        self._call(self._images.DeleteImage, message, None, CallOptions(timeout_s=timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The version, the instance and the limits of the server."""
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.GetServerInfoRequest()
        return results.server_info(self._call(self._engine.GetServerInfo, message, None, options))

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Lists the models served."""
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.ListModelsRequest()
        return results.models(self._call(self._engine.ListModels, message, None, options))

    def load(self, *, timeout_s: float | None = None) -> Load:
        """How busy the server is."""
        options = CallOptions(timeout_s=timeout_s)
        return results.load(self._call(self._engine.GetLoad, engine_pb2.GetLoadRequest(), None, options))

    def clear_cache(
        self, *, token: str | None = None, namespace: str | None = None, timeout_s: float | None = None
    ) -> ClearedCache:
        """Removes what is cached for the token of this name or for a namespace that tokens share, or else for all.

        Needs the scope `admin`.
        """
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.ClearCacheRequest(token=token, namespace=namespace)
        return results.cleared_cache(self._call(self._engine.ClearCache, message, None, options))

    def cancel_requests(
        self, *, request_id: str | None = None, token: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Cancels the requests of this id, or of the token of this name; returns how many.

        Needs the scope `admin`.
        """
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.CancelRequestsRequest(request_id=request_id, token=token)
        response = self._call(self._engine.CancelRequests, message, None, options)
        return response.cancelled_request_count

    def close(self) -> None:
        """Closes the connection; calls that are still open end."""
        self._channel.close()

    def _call(self, rpc: Any, message: Any, image: ImageInput | None, options: CallOptions) -> Any:
        delivery = self._delivery(message, image)
        while True:
            try:
                return self._start(rpc, message, delivery, options)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if delivery is None or not delivery.can_retry(failure):
                    raise failure from error

    def _stream(self, rpc: Any, message: Any, image: ImageInput | None, options: CallOptions) -> _Attempts:
        delivery = self._delivery(message, image)
        return _Attempts(
            lambda: self._start(rpc, message, delivery, options),
            lambda failure: delivery is not None and delivery.can_retry(failure),
        )

    def _delivery(self, message: Any, image: ImageInput | None) -> Delivery | None:
        """How the image is sent; None where there is none, or the message has what there is to send of it."""
        if image is None or put_reference(message.image, image):
            return None
        return self._sent.delivery(image_bytes(image))

    def _start(self, rpc: Any, message: Any, delivery: Delivery | None, options: CallOptions) -> Any:
        """The response of a unary call, or the call itself of a streaming one, which does not wait."""
        if delivery is not None:
            if delivery.must_store:
                self._store(delivery, options)
            delivery.fill(message.image)
        return rpc(
            message,
            timeout=requests.timeout_s(options, self._timeout_s),
            metadata=requests.metadata(options, self._token),
            wait_for_ready=self._wait_for_ready,
        )

    def _store(self, delivery: Delivery, options: CallOptions) -> None:
        try:
            self._start(self._images.PutImage, delivery.put_request(), None, options)
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error))
        else:
            delivery.note_stored()


class _Attempts(NamedTuple):
    """A streaming call that is begun again where `can_retry` says so about its failure."""

    start: Callable[[], Any]
    can_retry: Callable[[KestrelClientError], bool]


class TextStream(Generic[AnyResult]):
    """A stream of text: iterate over its pieces, then read the `result`.

    Cancelling it, leaving its `with` block or dropping it before its end stops the server from writing on.
    """

    def __init__(self, attempts: _Attempts, events: TextEvents[AnyResult]) -> None:
        self._attempts = attempts
        self._call = attempts.start()
        self._events = events

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece of the answer or caption."""
        while (delta := self._next_delta()) is not None:
            if delta.channel is TextChannel.ANSWER:
                return delta.text
        raise StopIteration

    def deltas(self) -> Iterator[TextDelta]:
        """The pieces of every channel, including the reasoning, in the order of their arrival."""
        while (delta := self._next_delta()) is not None:
            yield delta

    def result(self) -> AnyResult:
        """The whole result, after reading the rest of the stream."""
        while self._next_delta() is not None:
            pass
        return self._events.result

    def cancel(self) -> None:
        """Cancels the call. Does nothing once the stream has ended."""
        self._call.cancel()

    def _next_delta(self) -> TextDelta | None:
        while True:
            try:
                for response in self._call:
                    delta = self._events.accept(response)
                    if delta is not None:
                        return delta
                return None
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if not self._attempts.can_retry(failure):
                    raise failure from error
                self._call = self._attempts.start()
