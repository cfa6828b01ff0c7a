"""`VisionService`: parses a request, submits it, renders its events."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc import parsing, rendering
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.submission import Submission, ending_with, last_event
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Request


class VisionService:
    """The five tasks. Each call is one request of the engine and ends with it.

    Each method drops its message once the engine has the request: the message holds a copy of the image.
    """

    def __init__(self, submission: Submission, model: str) -> None:
        self._submission = submission
        self._model = model

    async def Query(
        self, message: wire.QueryRequest, call: CallContext
    ) -> AsyncGenerator[wire.QueryResponse, None]:
        stream = await self._submission.submit(*_parsed(parsing.query, message), call)
        del message
        with ending_with(stream):
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.query_event(event, call.request_id, self._model)

    async def Caption(
        self, message: wire.CaptionRequest, call: CallContext
    ) -> AsyncGenerator[wire.CaptionResponse, None]:
        stream = await self._submission.submit(*_parsed(parsing.caption, message), call)
        del message
        with ending_with(stream):
            async for event in stream:
                if isinstance(event, Finished):
                    call.finished = event
                yield rendering.caption_event(event, call.request_id, self._model)

    async def CompleteQuery(
        self, message: wire.CompleteQueryRequest, call: CallContext
    ) -> wire.CompleteQueryResponse:
        stream = await self._submission.submit(*_parsed(parsing.query, message), call)
        del message
        finished = await last_event(stream, call)
        return wire.CompleteQueryResponse(result=rendering.query_result(finished, call.request_id, self._model))

    async def CompleteCaption(
        self, message: wire.CompleteCaptionRequest, call: CallContext
    ) -> wire.CompleteCaptionResponse:
        stream = await self._submission.submit(*_parsed(parsing.caption, message), call)
        del message
        finished = await last_event(stream, call)
        return wire.CompleteCaptionResponse(result=rendering.caption_result(finished, call.request_id, self._model))

    async def Point(self, message: wire.PointRequest, call: CallContext) -> wire.PointResponse:
        stream = await self._submission.submit(*_parsed(parsing.point, message), call)
        del message
        return rendering.point_response(await last_event(stream, call), call.request_id, self._model)

    async def Detect(self, message: wire.DetectRequest, call: CallContext) -> wire.DetectResponse:
        stream = await self._submission.submit(*_parsed(parsing.detect, message), call)
        del message
        return rendering.detect_response(await last_event(stream, call), call.request_id, self._model)

    async def Segment(self, message: wire.SegmentRequest, call: CallContext) -> wire.SegmentResponse:
        stream = await self._submission.submit(*_parsed(parsing.segment, message), call)
        del message
        return rendering.segment_response(await last_event(stream, call), call.request_id, self._model)


def _parsed(parse: Callable[[Any], Request], message: Any) -> tuple[Request, ImageReference | None]:
    """The request, and what its message has in place of the bytes of its image."""
    return parse(message), parsing.image_reference(message)
