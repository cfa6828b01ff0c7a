"""Sends the requests of the asyncio client and reads the responses. `aio` says which requests there are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from kestrel_client import requests
from kestrel_client.connection.channel import Connection
from kestrel_client.errors import SERVER_UNREACHABLE, KestrelClientError, client_closed, errors_of, from_rpc_error
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
        self._connection = connection
        self._timeout_s = timeout_s
        self._max_retry_s = max_retry_s
        self._wait_for_ready = wait_for_ready
        self._sent = SentImages(store_from_bytes)
        self._is_closed = False
        target, options = connection.target, connection.options
        self._channel = (
            grpc.aio.insecure_channel(target, options)
            if connection.credentials is None
            else grpc.aio.secure_channel(target, connection.credentials, options)
        )
        self.vision = VisionServiceStub(self._channel)
        self.images = ImageServiceStub(self._channel)
        self.engine = EngineServiceStub(self._channel)

    async def call(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput | None = None
    ) -> Any:
        """The response to the message that `build` returns."""
        request_id = requests.request_id(options)
        with errors_of(request_id):
            message, retries = build(), self.retries(options)
            delivery = await self.delivery(message, image)
            while True:
                call = await self.start(rpc, message, delivery, retries, request_id)
                try:
                    return await call
                except grpc.RpcError as error:
                    await self.retry(error, request_id, delivery, retries, asyncio.sleep)

    def stream(
        self,
        rpc: Any,
        build: Callable[[], Any],
        options: CallOptions,
        image: ImageInput | None,
        read: Callable[..., AnyResult],
    ) -> AsyncTextStream[AnyResult]:
        """The stream of text for the message that `build` returns; it starts when it is first read."""
        return AsyncTextStream(self._attempts(rpc, build, options, image), TextEvents(read))

    def outline(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput, object: str
    ) -> AsyncSegmentStream:
        """The stream of an outline, as `stream` is one of text."""
        return AsyncSegmentStream(self._attempts(rpc, build, options, image), OutlineEvents(object))

    def _attempts(
        self, rpc: Any, build: Callable[[], Any], options: CallOptions, image: ImageInput | None
    ) -> _Attempts:
        request_id = requests.request_id(options)
        with errors_of(request_id):
            return _Attempts(self, rpc, build(), image, options, request_id)

    async def image_bytes(self, image: ImageInput) -> bytes:
        """The file of an image."""
        with errors_of(requests.new_request_id()):
            return await asyncio.to_thread(inputs.image_bytes, image)

    async def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        await self._channel.close()

    async def delivery(self, message: Any, image: ImageInput | None) -> Delivery | None:
        """How the image is sent; None where there is none, or the message has what there is to send of it."""
        if image is None or put_reference(message.image, image):
            return None
        # Reading a file, compressing an image or hashing it would block the event loop for too long.
        return await asyncio.to_thread(lambda: self._sent.delivery(inputs.image_bytes(image)))

    def retries(self, options: CallOptions) -> Retries:
        """The attempts of a call that begins now."""
        return requests.retries(options, self._timeout_s, self._max_retry_s)

    async def retry(
        self,
        error: grpc.RpcError,
        request_id: str,
        delivery: Delivery | None,
        retries: Retries,
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        """Return when the call may be sent again after this error; raise its failure where it may not."""
        failure = from_rpc_error(error, request_id)
        if delivery is not None and delivery.can_retry(failure):
            return
        wait_s = retries.wait_s(failure)
        if wait_s is None:
            raise await self.explained(failure, retries) from error
        await sleep(wait_s)

    async def explained(self, failure: KestrelClientError, retries: Retries) -> KestrelClientError:
        """The failure, with what this client finds out about it."""
        if failure.reason != SERVER_UNREACHABLE:
            return self._connection.explain(failure, retries.timeout_s)
        return await asyncio.to_thread(self._connection.explain, failure, retries.timeout_s)

    async def start(
        self, rpc: Any, message: Any, delivery: Delivery | None, retries: Retries, request_id: str
    ) -> Any:
        """The started call, which the caller awaits."""
        if delivery is not None:
            if delivery.must_store:
                await self._store(delivery, retries, request_id)
            delivery.fill(message.image)
        metadata = requests.metadata(request_id, self._connection.token)
        try:
            return rpc(message, timeout=retries.remaining_s, metadata=metadata, wait_for_ready=self._wait_for_ready)
        except grpc.aio.UsageError as error:
            if self._is_closed:
                raise client_closed() from error
            raise

    async def _store(self, delivery: Delivery, retries: Retries, request_id: str) -> None:
        call = await self.start(self.images.PutImage, delivery.put_request(), None, retries, request_id)
        try:
            await call
        except grpc.RpcError as error:
            delivery.note_not_stored(from_rpc_error(error, request_id))
        else:
            delivery.note_stored()


class _Attempts:
    """A streaming call that begins when it is asked for, and again where the server has refused it for now."""

    def __init__(
        self,
        calls: AsyncCalls,
        rpc: Any,
        message: Any,
        image: ImageInput | None,
        options: CallOptions,
        request_id: str,
    ) -> None:
        self.request_id = request_id
        self._calls = calls
        self._rpc = rpc
        self._message = message
        self._image = image
        self._options = options
        self._delivery: Delivery | None = None
        self._retries: Retries | None = None

    async def start(self) -> Any:
        """The started call."""
        if self._retries is None:
            self._retries = self._calls.retries(self._options)
            self._delivery = await self._calls.delivery(self._message, self._image)
        return await self._calls.start(self._rpc, self._message, self._delivery, self._retries, self.request_id)

    async def retry(self, error: grpc.RpcError, sleep: Callable[[float], Awaitable[object]]) -> None:
        """Return when the call may start again after this error; raise its failure where it may not."""
        assert self._retries is not None, "only a started call fails"
        await self._calls.retry(error, self.request_id, self._delivery, self._retries, sleep)

    async def explained(self, error: grpc.RpcError) -> KestrelClientError:
        """The failure of a call that must not start again."""
        assert self._retries is not None, "only a started call fails"
        return await self._calls.explained(from_rpc_error(error, self.request_id), self._retries)


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
        self._cancelled = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Without this, a call that is no longer referred to would go on: its own tasks refer to it.
        self.cancel()

    async def result(self) -> AnyResult:
        """The whole result, after reading the rest of the stream."""
        while await self._next_piece() is not None:
            pass
        with errors_of(self.request_id):
            return self._events.result

    def cancel(self) -> None:
        """Cancels the call. Does nothing once the stream has ended."""
        if self._call is None or self._call.cancel():
            self._cancelled.set()

    async def _next_piece(self) -> AnyPiece | None:
        while True:
            if self._cancelled.is_set():
                raise cancelled_here(self.request_id)
            try:
                if self._call is None:
                    with errors_of(self.request_id):
                        self._call = await self._attempts.start()
                while response := await self._call.read():  # the mark of the end is false, every message is true
                    self._has_response = True
                    piece = self._events.accept(response)
                    if piece is not None:
                        return piece
                return None
            except grpc.RpcError as error:
                if self._has_response:
                    raise await self._attempts.explained(error) from error
                self._call = None
                await self._attempts.retry(error, self._sleep)
            except asyncio.CancelledError:
                # The same exception means that this task is cancelled, which must propagate, or that the stream is.
                task = asyncio.current_task()
                if self._cancelled.is_set() and not (task is not None and task.cancelling()):
                    raise cancelled_here(self.request_id) from None
                raise

    async def _sleep(self, duration_s: float) -> None:
        """Wait, or until the stream is cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), duration_s)


class AsyncTextStream(AsyncStream[TextDelta, AnyResult]):
    """A stream of text: iterate over its pieces, then read the `result`."""

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """The next piece of the answer or caption."""
        while (delta := await self._next_piece()) is not None:
            if delta.channel is TextChannel.ANSWER:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The pieces of every channel, including the reasoning, in the order of their arrival."""
        while (delta := await self._next_piece()) is not None:
            yield delta


class AsyncSegmentStream(AsyncStream[Segment, SegmentResult]):
    """A stream of an outline: iterate over it as it grows, then read the `result`.

    The first segment has the box and an empty path; each later one has a longer path.
    """

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        """The outline as far as it has been drawn."""
        segment = await self._next_piece()
        if segment is None:
            raise StopAsyncIteration
        return segment
