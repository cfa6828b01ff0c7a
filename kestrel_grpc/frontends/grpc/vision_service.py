"""`VisionService`: parse, submit, render. Statuses, headers and ids are made by `CallScope`."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc import parsing, rendering
from kestrel_grpc.images.data_uris import is_embedded
from kestrel_grpc.images.image_uris import ImageSource
from kestrel_grpc.wire.call_context import Asked, Call
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Request
from kestrel_runtime.api.stream import Stream

# Stands for an image that is still to come.
_NO_IMAGE_YET = b"?"


class VisionService:
    """The five tasks. Each call is one request of the engine and ends with it."""

    def __init__(self, engine: Engine, images: ImageSource) -> None:
        self._engine = engine
        self._images = images
        self._model = engine.info.model

    async def Query(self, message: wire.QueryRequest, call: Call) -> AsyncGenerator[wire.QueryResponse, None]:
        stream = await self._submit(parsing.query, message, call)
        del message
        with _ending_with(stream):
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.query_event(event, call.request_id, self._model)

    async def Caption(self, message: wire.CaptionRequest, call: Call) -> AsyncGenerator[wire.CaptionResponse, None]:
        stream = await self._submit(parsing.caption, message, call)
        del message
        with _ending_with(stream):
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.caption_event(event, call.request_id, self._model)

    async def CompleteQuery(self, message: wire.CompleteQueryRequest, call: Call) -> wire.CompleteQueryResponse:
        stream = await self._submit(parsing.query, message, call)
        del message
        finished = await _finish(stream, call)
        return wire.CompleteQueryResponse(result=rendering.query_result(finished, call.request_id, self._model))

    async def CompleteCaption(
        self, message: wire.CompleteCaptionRequest, call: Call
    ) -> wire.CompleteCaptionResponse:
        stream = await self._submit(parsing.caption, message, call)
        del message
        finished = await _finish(stream, call)
        return wire.CompleteCaptionResponse(result=rendering.caption_result(finished, call.request_id, self._model))

    async def Point(self, message: wire.PointRequest, call: Call) -> wire.PointResponse:
        stream = await self._submit(parsing.point, message, call)
        del message
        return rendering.point_response(await _finish(stream, call), call.request_id, self._model)

    async def Detect(self, message: wire.DetectRequest, call: Call) -> wire.DetectResponse:
        stream = await self._submit(parsing.detect, message, call)
        del message
        return rendering.detect_response(await _finish(stream, call), call.request_id, self._model)

    async def Segment(self, message: wire.SegmentRequest, call: Call) -> wire.SegmentResponse:
        stream = await self._submit(parsing.segment, message, call)
        del message
        return rendering.segment_response(await _finish(stream, call), call.request_id, self._model)

    async def _submit(self, parse: Callable[[Any], Request], message: Any, call: Call) -> Stream:
        """Hand a request to the engine. From then on nothing here holds its image, if the caller does not."""
        if message.image.WhichOneof("source") == "uri":
            request = await self._with_image(parse, message, call)
        else:
            request = parse(message)
        call.asked = Asked(request)
        stream = self._engine.submit(request, deadline_s=call.remaining_s, tenant=call.tenant)
        call.release()
        return stream

    async def _with_image(self, parse: Callable[[Any], Request], message: Any, call: Call) -> Request:
        """The request with the image that it only names. It is fetched once the engine has room for the request."""
        uri = message.image.uri
        message.image.data = _NO_IMAGE_YET
        request = parse(message)
        call.asked = Asked(request)
        if not is_embedded(uri):
            call.release()
        with self._engine.expecting(request, deadline_s=call.remaining_s, tenant=call.tenant):
            return replace(request, image=await self._images.fetch(uri))


async def _finish(stream: Stream, call: Call) -> Finished:
    """The last of a request's events."""
    with _ending_with(stream):
        call.finished = await stream.result()
        return call.finished


@contextmanager
def _ending_with(stream: Stream) -> Iterator[None]:
    """However the block ends, the request ends with it."""
    try:
        yield
    finally:
        stream.cancel()
