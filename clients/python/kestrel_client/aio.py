"""The asyncio client. Sends requests and reads responses; `requests` and `results` build the values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, Unpack

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
from kestrel_client.streams import AnyResult, TextEvents, cancelled_here
from kestrel_client.v1 import engine_service_pb2 as engine_pb2
from kestrel_client.v1 import image_service_pb2 as image_pb2
from kestrel_client.v1 import vision_service_pb2 as vision_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub


class AsyncClient:
    """Calls one server, or several behind one name, from the event loop it was made in.

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
            grpc.aio.insecure_channel(address, channel_options())
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, channel_options())
        )
        self._vision = VisionServiceStub(self._channel)
        self._images = ImageServiceStub(self._channel)
        self._engine = EngineServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> AsyncTextStream[QueryResult]:
        """Answers a question, with or without an image, as a stream of text."""
        message = requests.query(vision_pb2.QueryRequest, question, reasoning, spatial_refs, options)
        attempts = self._stream(self._vision.Query, message, image, options)
        return AsyncTextStream(attempts, TextEvents(results.query_result))

    async def complete_query(
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
        response = await self._call(self._vision.CompleteQuery, message, image, options)
        return results.query_result(response.result)

    def caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> AsyncTextStream[CaptionResult]:
        """Describes an image, as a stream of text."""
        message = requests.caption(vision_pb2.CaptionRequest, length, options)
        attempts = self._stream(self._vision.Caption, message, image, options)
        return AsyncTextStream(attempts, TextEvents(results.caption_result))

    async def complete_caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> CaptionResult:
        """Describes an image in one response."""
        message = requests.caption(vision_pb2.CompleteCaptionRequest, length, options)
        response = await self._call(self._vision.CompleteCaption, message, image, options)
        return results.caption_result(response.result)

    async def point(
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
        return results.point_result(await self._call(self._vision.Point, message, image, options))

    async def detect(
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
        return results.detect_result(await self._call(self._vision.Detect, message, image, options))

    async def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> SegmentResult:
        """Finds the outline of an object."""
        message = requests.segment(object, spatial_refs, options)
        return results.segment_result(await self._call(self._vision.Segment, message, image, options))

    async def upload_image(
        self, image: ImageInput, *, ttl_s: float | None = None, pin: bool = False, timeout_s: float | None = None
    ) -> StoredImage:
        """Stores an image on the server, for `ttl_s` seconds or as long as the server does by default.

        With `pin` it is kept for that time even where its memory is needed for other images. The result, or its
        `image_id`, stands for the image in every request. `image` has to be a file, its bytes or a PIL image.
        """
        options = CallOptions(timeout_s=timeout_s)
        data = await asyncio.to_thread(image_bytes, image)
        response = await self._call(self._images.PutImage, requests.put_image(data, ttl_s, pin), None, options)
        return results.stored_image(response.image)

    async def get_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> StoredImage:
        """Describes a stored image. Raises `ImageNotFound`."""
        message = image_pb2.GetImageRequest(image_id=requests.image_id(image))
        response = await self._call(self._images.GetImage, message, None, CallOptions(timeout_s=timeout_s))
        return results.stored_image(response.image)

    async def read_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> bytes:
        """The file of a stored image. Raises `ImageNotFound`."""
        message = image_pb2.GetImageRequest(image_id=requests.image_id(image), include_data=True)
        return (await self._call(self._images.GetImage, message, None, CallOptions(timeout_s=timeout_s))).data

    async def delete_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> None:
        """Drops a stored image, and what the server has computed from it. Raises `ImageNotFound`."""
        message = image_pb2.DeleteImageRequest(image_id=requests.image_id(image))
        await self._call(self._images.DeleteImage, message, None, CallOptions(timeout_s=timeout_s))

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The version, the instance and the limits of the server."""
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.GetServerInfoRequest()
        return results.server_info(await self._call(self._engine.GetServerInfo, message, None, options))

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Lists the models served."""
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.ListModelsRequest()
        return results.models(await self._call(self._engine.ListModels, message, None, options))

    async def load(self, *, timeout_s: float | None = None) -> Load:
        """How busy the server is."""
        options = CallOptions(timeout_s=timeout_s)
        return results.load(await self._call(self._engine.GetLoad, engine_pb2.GetLoadRequest(), None, options))

    async def clear_cache(
        self, *, token: str | None = None, namespace: str | None = None, timeout_s: float | None = None
    ) -> ClearedCache:
        """Removes what is cached for the token of this name or for a namespace that tokens share, or else for all.

        Needs the scope `admin`.
        """
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.ClearCacheRequest(token=token, namespace=namespace)
        return results.cleared_cache(await self._call(self._engine.ClearCache, message, None, options))

    async def cancel_requests(
        self, *, request_id: str | None = None, token: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Cancels the requests of this id, or of the token of this name; returns how many.

        Needs the scope `admin`.
        """
        options = CallOptions(timeout_s=timeout_s)
        message = engine_pb2.CancelRequestsRequest(request_id=request_id, token=token)
        response = await self._call(self._engine.CancelRequests, message, None, options)
        return response.cancelled_request_count

    async def close(self) -> None:
        """Closes the connection; calls that are still open end."""
        await self._channel.close()

    async def _call(self, rpc: Any, message: Any, image: ImageInput | None, options: CallOptions) -> Any:
        delivery = await self._delivery(message, image)
        while True:
            call = await self._start(rpc, message, delivery, options)
            try:
                return await call
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if delivery is None or not delivery.can_retry(failure):
                    raise failure from error

    def _stream(self, rpc: Any, message: Any, image: ImageInput | None, options: CallOptions) -> _Attempts:
        return _Attempts(self, rpc, message, image, options)

    async def _delivery(self, message: Any, image: ImageInput | None) -> Delivery | None:
        """How the image is sent; None where there is none, or the message has what there is to send of it."""
        if image is None or put_reference(message.image, image):
            return None
        # Reading a file, compressing an image or hashing it would block the event loop for too long.
        return await asyncio.to_thread(lambda: self._sent.delivery(image_bytes(image)))

    async def _start(self, rpc: Any, message: Any, delivery: Delivery | None, options: CallOptions) -> Any:
        """The started call, which the caller awaits."""
        if delivery is not None:
            if delivery.must_store:
                await self._store(delivery, options)
            delivery.fill(message.image)
        return rpc(
            message,
            timeout=requests.timeout_s(options, self._timeout_s),
            metadata=requests.metadata(options, self._token),
            wait_for_ready=self._wait_for_ready,
        )

    async def _store(self, delivery: Delivery, options: CallOptions) -> None:
        call = await self._start(self._images.PutImage, delivery.put_request(), None, options)
        try:
            await call
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error))
        else:
            delivery.note_stored()


class _Attempts:
    """A streaming call that begins when it is asked for, and again where the server did not have its image."""

    def __init__(
        self, client: AsyncClient, rpc: Any, message: Any, image: ImageInput | None, options: CallOptions
    ) -> None:
        self._client = client
        self._rpc = rpc
        self._message = message
        self._image = image
        self._options = options
        self._delivery: Delivery | None = None
        self._has_begun = False

    async def start(self) -> Any:
        """The started call."""
        client = self._client
        if not self._has_begun:
            self._delivery = await client._delivery(self._message, self._image)  # pyright: ignore[reportPrivateUsage]
            self._has_begun = True
        return await client._start(  # pyright: ignore[reportPrivateUsage]
            self._rpc, self._message, self._delivery, self._options
        )

    def can_retry(self, failure: KestrelClientError) -> bool:
        """Whether to start again after this failure."""
        return self._delivery is not None and self._delivery.can_retry(failure)


class AsyncTextStream(Generic[AnyResult]):
    """A stream of text: iterate over its pieces, then read the `result`.

    The call begins with the first piece asked for. Cancelling it, leaving its `async with` block or dropping
    it before its end stops the server from writing on.
    """

    def __init__(self, attempts: _Attempts, events: TextEvents[AnyResult]) -> None:
        self._attempts = attempts
        self._events = events
        self._call: Any = None
        self._cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Without this, a call that is no longer referred to would go on: its own tasks refer to it.
        self.cancel()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """The next piece of the answer or caption."""
        while (delta := await self._next_delta()) is not None:
            if delta.channel is TextChannel.ANSWER:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The pieces of every channel, including the reasoning, in the order of their arrival."""
        while (delta := await self._next_delta()) is not None:
            yield delta

    async def result(self) -> AnyResult:
        """The whole result, after reading the rest of the stream."""
        while await self._next_delta() is not None:
            pass
        return self._events.result

    def cancel(self) -> None:
        """Cancels the call. Does nothing once the stream has ended."""
        if self._call is None or self._call.cancel():
            self._cancelled = True

    async def _next_delta(self) -> TextDelta | None:
        while True:
            if self._cancelled:
                raise cancelled_here()
            try:
                if self._call is None:
                    self._call = await self._attempts.start()
                while response := await self._call.read():  # the mark of the end is false, every message is true
                    delta = self._events.accept(response)
                    if delta is not None:
                        return delta
                return None
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if not self._attempts.can_retry(failure):
                    raise failure from error
                self._call = None
            except asyncio.CancelledError:
                # The same exception means that this task is cancelled, which must propagate, or that the stream is.
                task = asyncio.current_task()
                if self._cancelled and not (task is not None and task.cancelling()):
                    raise cancelled_here() from None
                raise
