"""`VisionService`: parse, submit, render. Statuses, headers and ids are made by `CallScope`."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc import parsing, rendering
from kestrel_grpc.call import Call
from kestrel_grpc.image_uris import ImageSource
from kestrel_grpc.seam import EngineSeam
from kestrel_runtime.events import Finished
from kestrel_runtime.requests import Request
from kestrel_runtime.stream import Stream

AnyMessage = TypeVar(
    "AnyMessage",
    wire.QueryRequest,
    wire.CompleteQueryRequest,
    wire.CaptionRequest,
    wire.CompleteCaptionRequest,
    wire.PointRequest,
    wire.DetectRequest,
    wire.SegmentRequest,
)


class VisionService:
    """The five tasks. Each call is one request of the engine and ends with it."""

    def __init__(self, engine: EngineSeam, images: ImageSource) -> None:
        self._engine = engine
        self._images = images
        self._model = engine.info.model

    async def Query(self, request: wire.QueryRequest, call: Call) -> AsyncGenerator[wire.QueryResponse, None]:
        with self._submitted(parsing.query(await self._with_image(request)), call) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.query_event(event, call.request_id, self._model)

    async def Caption(self, request: wire.CaptionRequest, call: Call) -> AsyncGenerator[wire.CaptionResponse, None]:
        with self._submitted(parsing.caption(await self._with_image(request)), call) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.caption_event(event, call.request_id, self._model)

    async def CompleteQuery(self, request: wire.CompleteQueryRequest, call: Call) -> wire.CompleteQueryResponse:
        finished = await self._finish(parsing.query(await self._with_image(request)), call)
        return wire.CompleteQueryResponse(result=rendering.query_result(finished, call.request_id, self._model))

    async def CompleteCaption(
        self, request: wire.CompleteCaptionRequest, call: Call
    ) -> wire.CompleteCaptionResponse:
        finished = await self._finish(parsing.caption(await self._with_image(request)), call)
        return wire.CompleteCaptionResponse(result=rendering.caption_result(finished, call.request_id, self._model))

    async def Point(self, request: wire.PointRequest, call: Call) -> wire.PointResponse:
        finished = await self._finish(parsing.point(await self._with_image(request)), call)
        return rendering.point_response(finished, call.request_id, self._model)

    async def Detect(self, request: wire.DetectRequest, call: Call) -> wire.DetectResponse:
        finished = await self._finish(parsing.detect(await self._with_image(request)), call)
        return rendering.detect_response(finished, call.request_id, self._model)

    async def Segment(self, request: wire.SegmentRequest, call: Call) -> wire.SegmentResponse:
        finished = await self._finish(parsing.segment(await self._with_image(request)), call)
        return rendering.segment_response(finished, call.request_id, self._model)

    async def _with_image(self, request: AnyMessage) -> AnyMessage:
        """The request, with the bytes of its image where it only says where they are."""
        if request.image.WhichOneof("source") == "uri":
            request.image.data = await self._images.fetch(request.image.uri)
        return request

    async def _finish(self, request: Request, call: Call) -> Finished:
        """The last of the request's events."""
        with self._submitted(request, call) as stream:
            call.finished = await stream.result()
            return call.finished

    @contextmanager
    def _submitted(self, request: Request, call: Call) -> Iterator[Stream]:
        """The request's events. However the call ends, the request ends with it."""
        call.request = request
        stream = self._engine.submit(request, deadline_s=call.remaining_s, tenant=call.tenant)
        try:
            yield stream
        finally:
            stream.cancel()
