"""Sends the requests of the asyncio client and reads the responses. `aio` says which requests there are.

`blocking_calls` is generated from this file: after a change run `python -m tools.blocking_client`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from kestrel_client import adapters, requests
from kestrel_client.connection import Connection
from kestrel_client.errors import InvalidRequest, KestrelClientError, client_closed, errors_of, from_rpc_error
from kestrel_client.images import (
    ImageInput,
    bytes_in,
    fields_of,
    image_bytes,
    invalid_image,
    name_of,
    names_in,
    put_reference,
)
from kestrel_client.requests import CallOptions
from kestrel_client.results import (
    DetectedObject,
    DetectResult,
    EmbedResult,
    PointedObject,
    PointResult,
    Segment,
    SegmentResult,
    TextChannel,
    TextDelta,
)
from kestrel_client.sending import (
    AnyPiece,
    AnyResult,
    Asyncio,
    Delivery,
    DetectEvents,
    Events,
    OutlineEvents,
    PatchEvents,
    PointEvents,
    Retries,
    SentImages,
    TextEvents,
    Threads,
    cancelled_here,
)
from kestrel_client.v1 import media_pb2
from kestrel_client.v1.engine_service_pb2 import UploadAdapterResponse
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub


class AsyncCalls:
    """The connection of a client. The arguments are those of `AsyncClient`."""

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        wait_for_ready: bool,
        max_retry_s: float,
        store_from_bytes: int | None,
    ) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.max_retry_s = max_retry_s
        self.wait_for_ready = wait_for_ready
        self.sent_images = SentImages(store_from_bytes)
        self.is_closed = False
        self._channel = Asyncio.channel(connection)
        self.vision = VisionServiceStub(self._channel)
        self.images = ImageServiceStub(self._channel)
        self.engine = EngineServiceStub(self._channel)

    async def call(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, *images: ImageInput | None
    ) -> Any:
        """Sends the message that `build` returns, with the images, and returns the response."""
        attempts = self._attempts(rpc, build, options, images)
        with errors_of(attempts.request_id):
            while True:
                try:
                    return await (await attempts.start())
                except grpc.RpcError as error:
                    await attempts.retry(error)

    def stream(
        self,
        rpc: Any,
        build: Callable[[], Any],
        options: CallOptions,
        read: Callable[..., AnyResult],
        *images: ImageInput | None,
    ) -> AsyncTextStream[AnyResult]:
        """Returns the stream of text for the message that `build` returns, with the images."""
        return AsyncTextStream(self._attempts(rpc, build, options, images), TextEvents(read))

    def outline(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput, object: str
    ) -> AsyncSegmentStream:
        """Returns the stream of an outline, as `stream` returns one of text."""
        return AsyncSegmentStream(self._attempts(rpc, build, options, (image,)), OutlineEvents(object))

    def points(
        self,
        rpc: Any,
        build: Callable[[], Any],
        options: CallOptions,
        image: ImageInput,
        object: str | Sequence[str],
        min_score: float | None,
    ) -> AsyncPointStream:
        """Returns the stream of points, as `stream` returns one of text."""
        return AsyncPointStream(self._attempts(rpc, build, options, (image,)), PointEvents(object, min_score))

    def boxes(
        self,
        rpc: Any,
        build: Callable[[], Any],
        options: CallOptions,
        image: ImageInput,
        object: str | Sequence[str],
        min_score: float | None,
    ) -> AsyncDetectStream:
        """Returns the stream of boxes, as `stream` returns one of text."""
        return AsyncDetectStream(self._attempts(rpc, build, options, (image,)), DetectEvents(object, min_score))

    async def patches(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput
    ) -> EmbedResult:
        """Reads the whole stream of the embeddings of an image's patches."""
        return await AsyncStream(self._attempts(rpc, build, options, (image,)), PatchEvents()).result()

    async def image_bytes(self, image: ImageInput) -> bytes:
        """Returns the file of an image."""
        with errors_of(requests.new_request_id()):
            return await Asyncio.run(image_bytes, image)

    async def upload_adapter(
        self, name: str, path: str | os.PathLike[str], *, replace: bool, timeout_s: float | None
    ) -> UploadAdapterResponse:
        """Sends the files of an adapter, and returns the response.

        By default the call may take the time of other calls, and as long as a server allows for files of that size.
        """
        if self.is_closed:
            raise client_closed()
        request_id = requests.new_request_id()
        with errors_of(request_id):
            upload = await Asyncio.run(adapters.opened, name, path, replace)
            if timeout_s is None:
                timeout_s = self.timeout_s + upload.header.size_bytes / adapters.LEAST_BYTES_PER_S
            sending = adapters.Sending(
                Threads.channel(self.connection),
                upload,
                timeout=timeout_s,
                metadata=requests.metadata(request_id, self.connection.token),
                wait_for_ready=self.wait_for_ready,
            )
            try:
                return await Asyncio.run(sending.result)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, request_id)
                raise await Asyncio.run(self.connection.explain, failure, timeout_s) from error
            except BaseException:
                sending.cancel()
                raise

    async def close(self) -> None:
        """Closes the connection."""
        self.is_closed = True
        await self._channel.close()

    def _attempts(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, images: Sequence[ImageInput | None]
    ) -> _Attempts:
        request_id = requests.request_id(options)
        with errors_of(request_id):
            return _Attempts(self, rpc, build(), images, options, request_id)


class _Attempts:
    """A call that begins when it is asked to, and again if the server has refused it for now."""

    def __init__(
        self,
        calls: AsyncCalls,
        rpc: Any,
        message: Any,
        images: Sequence[ImageInput | None],
        options: CallOptions,
        request_id: str,
    ) -> None:
        self.request_id = request_id
        self.cancelled = Asyncio.Event()
        self._calls = calls
        self._rpc = rpc
        self._message = message
        self._images = images
        self._options = options
        self._deliveries: list[tuple[media_pb2.Image, Delivery]] = []
        """The images that are sent as files, each with its field of the message."""
        self._image_name: str | None = None
        self._retries: Retries | None = None

    async def start(self) -> Any:
        """Starts the call and returns it."""
        calls = self._calls
        if self._retries is None:
            self._retries = requests.retries(self._options, calls.timeout_s, calls.max_retry_s)
            for place, (field, image) in enumerate(zip(fields_of(self._message), self._images, strict=False)):
                try:
                    if image is not None and not put_reference(field, image):
                        self._deliveries.append((field, await Asyncio.run(self._deliver, image)))
                except InvalidRequest as error:
                    raise invalid_image(self._message, place, error) from None
            first = next(iter(fields_of(self._message)), None)
            if self._deliveries and self._deliveries[0][0] is first:
                self._image_name = self._deliveries[0][1].image_id
            elif (held := bytes_in(self._message)) is not None:
                self._image_name = await Asyncio.run(name_of, held)
            else:
                self._image_name = next(iter(names_in(self._message)), None)
        for field, delivery in self._deliveries:
            if delivery.must_store:
                await self._store(delivery)
            delivery.fill(field)
        return self._send(self._rpc, self._message)

    async def retry(self, error: grpc.RpcError) -> None:
        """Waits until the call may start again after this error; raises its failure if it may not."""
        assert self._retries is not None, "only a started call fails"
        failure = from_rpc_error(error, self.request_id)
        if any([delivery.can_retry(failure) for _, delivery in self._deliveries]):  # noqa: C419 - each takes note
            return
        wait_s = self._retries.wait_s(failure)
        if wait_s is None:
            raise await self.explained(error) from error
        await Asyncio.wait(self.cancelled, wait_s)

    async def explained(self, error: grpc.RpcError) -> KestrelClientError:
        """Returns the failure of a call that must not start again, with what this client finds out about it."""
        assert self._retries is not None, "only a started call fails"
        failure = from_rpc_error(error, self.request_id)
        return await Asyncio.run(self._calls.connection.explain, failure, self._retries.timeout_s)

    def _deliver(self, image: ImageInput) -> Delivery:
        return self._calls.sent_images.delivery(image_bytes(image))

    async def _store(self, delivery: Delivery) -> None:
        try:
            await self._send(self._calls.images.PutImage, delivery.put_request())
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error, self.request_id))
        else:
            delivery.note_stored()

    def _send(self, rpc: Any, message: Any) -> Any:
        """Returns the call, which the asyncio client awaits or reads."""
        assert self._retries is not None, "a call has a deadline"
        calls = self._calls
        metadata = requests.metadata(
            self.request_id,
            calls.connection.token,
            self._image_name,
            is_stored=any(names_in(message)),
            is_chat=hasattr(self._message, "messages"),
        )
        timeout_s = self._retries.remaining_s
        try:
            return rpc(message, timeout=timeout_s, metadata=metadata, wait_for_ready=calls.wait_for_ready)
        except (ValueError, grpc.aio.UsageError) as error:  # of the blocking client, of the asyncio client
            if calls.is_closed:
                raise client_closed() from error
            raise


class AsyncStream(Generic[AnyPiece, AnyResult]):
    """A stream of pieces of an answer, which ends with the `result`.

    The call begins with the first piece asked for. Cancelling it, leaving its `async with` block or dropping
    it before its end stops the server from generating.

    Attributes:
        request_id: Names the request in the server's log.
    """

    def __init__(self, attempts: _Attempts, events: Events[AnyPiece, AnyResult]) -> None:
        self.request_id = attempts.request_id
        self._attempts = attempts
        self._events = events
        self._call: Any = None
        self._has_response = False
        # Reading starts the call.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Without this, a call that is no longer referred to would go on: tasks of gRPC refer to it.
        self.cancel()

    async def result(self) -> AnyResult:
        """Returns the whole result, after reading the rest of the stream."""
        while await self._next_piece() is not None:
            pass
        with errors_of(self.request_id):
            return self._events.result

    def cancel(self) -> None:
        """Cancels the call. Does nothing once the stream has ended."""
        self._attempts.cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def _start(self) -> None:
        with errors_of(self.request_id):
            if self._attempts.cancelled.is_set():
                raise cancelled_here(self.request_id)
            self._call = await self._attempts.start()
            if self._attempts.cancelled.is_set():  # meanwhile, when there was no call to cancel
                self._call.cancel()

    async def _next_piece(self) -> AnyPiece | None:
        while True:
            if self._call is None:
                await self._start()
            try:
                cancelled = self._attempts.cancelled
                while (response := await Asyncio.read(self._call, cancelled, self.request_id)) is not None:
                    self._has_response = True
                    piece = self._events.accept(response)
                    if piece is not None:
                        return piece
                return None
            except KestrelClientError as error:
                error.request_id = error.request_id or self.request_id
                raise
            except grpc.RpcError as error:
                if self._has_response:
                    raise await self._attempts.explained(error) from error
                self._call = None
                await self._attempts.retry(error)


class AsyncTextStream(AsyncStream[TextDelta, AnyResult]):
    """A stream of text: iterate over its pieces, then read the `result`."""

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """Returns the next piece of the answer or caption."""
        while (delta := await self._next_piece()) is not None:
            if delta.channel is TextChannel.ANSWER:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Returns the pieces of every channel, including the reasoning, in the order of their arrival."""
        while (delta := await self._next_piece()) is not None:
            yield delta


class AsyncSegmentStream(AsyncStream[Segment, SegmentResult]):
    """A stream of an outline: iterate over it as it grows, then read the `result`.

    The first segment has the box and an empty path; each later one has a longer path.
    """

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        """Returns the outline as far as it has been drawn."""
        segment = await self._next_piece()
        if segment is None:
            raise StopAsyncIteration
        return segment


class AsyncPointStream(AsyncStream[tuple[str, PointedObject], PointResult]):
    """A stream of points: iterate over what is found, each with the object that was looked for, then read the
    `result`."""

    def __aiter__(self) -> AsyncIterator[tuple[str, PointedObject]]:
        return self

    async def __anext__(self) -> tuple[str, PointedObject]:
        """Returns the object that was looked for, and what was found next."""
        found = await self._next_piece()
        if found is None:
            raise StopAsyncIteration
        return found


class AsyncDetectStream(AsyncStream[tuple[str, DetectedObject], DetectResult]):
    """A stream of boxes: iterate over what is found, each with the object that was looked for, then read the
    `result`."""

    def __aiter__(self) -> AsyncIterator[tuple[str, DetectedObject]]:
        return self

    async def __anext__(self) -> tuple[str, DetectedObject]:
        """Returns the object that was looked for, and what was found next."""
        found = await self._next_piece()
        if found is None:
            raise StopAsyncIteration
        return found
