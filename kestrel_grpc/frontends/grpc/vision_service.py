"""Implements `VisionService`: parses a request, submits it, renders its events.

`BINDINGS` has all of its RPCs. A new one is a line there, a function that converts its message to a request, and
one that converts the events of that request to its response.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.media_pb2 import NormalizedPoint
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.submission import ObjectAnswer, Submission, ending_with, last_event, naming
from kestrel_grpc.frontends.grpc import parsing, rendering
from kestrel_grpc.frontends.masks import forms_of
from kestrel_runtime.api.errors import Violation
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    EmbedOutput,
    Event,
    Finished,
    FoundObject,
    Location,
    OutlineBox,
    PatchEmbeddings,
    PointOutput,
    QueryOutput,
    SegmentMask,
    SegmentOutput,
    Started,
    TextDelta,
    TextEvent,
)
from kestrel_runtime.api.requests import (
    EMBEDDING_TYPES,
    MAX_OBJECT_NAMES,
    Caption,
    Chat,
    Detect,
    Embed,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    Segment,
)

ObjectRequestT = TypeVar("ObjectRequestT", Point, Detect, Segment)
_ObjectsMessage = wire.PointRequest | wire.DetectRequest | wire.StreamPointRequest | wire.StreamDetectRequest

_CAPTION_LENGTHS: Mapping[int, str] = MappingProxyType(
    {
        wire.CAPTION_LENGTH_UNSPECIFIED: "normal",
        wire.CAPTION_LENGTH_SHORT: "short",
        wire.CAPTION_LENGTH_NORMAL: "normal",
        wire.CAPTION_LENGTH_LONG: "long",
    }
)


_MASK_FORMATS: Mapping[int, str] = MappingProxyType(
    {
        wire.MASK_FORMAT_UNSPECIFIED: "svg",
        wire.MASK_FORMAT_SVG_PATH: "svg",
        wire.MASK_FORMAT_POLYGON: "polygon",
        wire.MASK_FORMAT_RUN_LENGTH: "rle",
        wire.MASK_FORMAT_PNG: "png",
    }
)
_EMBEDDING_TYPES: Mapping[int, str] = MappingProxyType(
    {
        wire.EMBEDDING_TYPE_UNSPECIFIED: "float16",
        wire.EMBEDDING_TYPE_FLOAT16: "float16",
        wire.EMBEDDING_TYPE_FLOAT32: "float32",
    }
)


class VisionService:
    """Serves each of `BINDINGS` under the name of its RPC. Each call is one request of the engine and ends with it.

    Each call drops its message once the engine has the request: the message holds a copy of the image. `add` adds
    other methods.
    """

    def __init__(self, submission: Submission, model: str) -> None:
        self._submission = submission
        self._model = model
        for binding in BINDINGS:
            serve = self._events_of(binding) if binding.is_streamed else self._answer_of(binding)
            setattr(self, binding.rpc, serve)

    def add(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Adds methods by the names of their RPCs."""
        for name, method in methods.items():
            setattr(self, name, method)

    def _answer_of(self, binding: Binding) -> Callable[[Any, CallContext], Awaitable[Any]]:
        parse, render = binding.parse, binding.render

        async def answer(message: Any, call: CallContext) -> Any:
            asked = parsing.parsed(parse, message)
            del message
            objects = asked.request.objects
            with naming(asked.field_name):
                streams = await self._submission.submit_samples(asked.request, asked.references, call)
                del asked
                assert call.request is not None
                model = call.request.model(self._model)
                if objects:
                    answers = await self._submission.answers_by_object(objects, streams, call)
                    assert binding.render_groups is not None, "requests about several objects have groups"
                    assert call.finished is not None
                    return binding.render_groups(answers, rendering.info(call.finished, call.request_id, model))
                finished = await last_event(streams, call)
            return await self._submission.rendered(finished, partial(render, finished, call.request_id, model))

        return answer

    def _events_of(self, binding: Binding) -> Callable[[Any, CallContext], AsyncGenerator[Any, None]]:
        parse, render = binding.parse, binding.render

        async def events(message: Any, call: CallContext) -> AsyncGenerator[Any, None]:
            asked = parsing.parsed(parse, message)
            del message
            names, objects = naming(asked.field_name), asked.request.objects
            with names:
                streams = await self._submission.submit_samples(asked.request, asked.references, call)
            del asked
            assert call.request is not None
            model = call.request.model(self._model)
            if objects:
                with names:
                    async with aclosing(self._submission.events_by_object(objects, streams, call)) as of_objects:
                        async for item in of_objects:
                            yield self._response_of_objects(binding, item, call, model)
                return
            (stream,) = streams
            with names, ending_with(stream):
                async for event in stream:
                    if isinstance(event, Finished):
                        call.finished = event
                        last = partial(render, event, call.request_id, model)
                        yield await self._submission.rendered(event, last)
                    else:
                        yield render(event, call.request_id, model)

        return events

    def _response_of_objects(
        self,
        binding: Binding,
        item: tuple[int, Started | FoundObject] | list[ObjectAnswer],
        call: CallContext,
        model: str,
    ) -> Any:
        if isinstance(item, list):
            assert binding.render_groups is not None, "requests about several objects have groups"
            assert call.finished is not None
            return binding.render_groups(item, rendering.info(call.finished, call.request_id, model))
        index, event = item
        response = binding.render(event, call.request_id, model)
        response.object_index = index if isinstance(event, FoundObject) else 0
        return response


def query(message: wire.QueryRequest | wire.CompleteQueryRequest) -> Query:
    """Returns the request for an answer to a question, streamed or not."""
    violations = _stream_violations(message)
    return parsing.new_request(
        Query,
        message,
        violations,
        needs_image=False,
        question=message.question,
        reasoning=message.reasoning,
        spatial_refs=parsing.spatial_refs(message.spatial_refs, violations),
        constraint=parsing.constraint(message.constraint) if message.HasField("constraint") else None,
    )


def query_event(event: TextEvent, request_id: str, model: str) -> wire.QueryResponse:
    """Returns one message of a `Query` stream."""
    if isinstance(event, TextDelta):  # first: nearly every event is one
        response = wire.QueryResponse()
        rendering.fill_delta(response.delta, event)
        return response
    if isinstance(event, Started):
        return wire.QueryResponse(started=rendering.started(event, request_id, model))
    return wire.QueryResponse(completed=query_result(event, request_id, model))


def query_result(finished: Finished, request_id: str, model: str) -> wire.QueryResult:
    """Returns a whole answer."""
    output = _expect(finished, QueryOutput)
    return wire.QueryResult(
        answer=output.answer,
        reasoning=None if output.reasoning is None else rendering.reasoning(output.reasoning),
        logprobs=rendering.logprobs(output.logprobs),
        info=rendering.info(finished, request_id, model),
    )


def complete_query(finished: Finished, request_id: str, model: str) -> wire.CompleteQueryResponse:
    """Returns the response with a whole answer."""
    return wire.CompleteQueryResponse(
        result=query_result(finished, request_id, model),
        alternatives=[_query_alternative(other) for other in finished.alternatives],
    )


def _query_alternative(finished: Finished) -> wire.QueryAlternative:
    output = _expect(finished, QueryOutput)
    return wire.QueryAlternative(
        answer=output.answer,
        reasoning=None if output.reasoning is None else rendering.reasoning(output.reasoning),
        logprobs=rendering.logprobs(output.logprobs),
        finish_reason=rendering.finish_reason(finished),
        stop_sequence=finished.stop_sequence,
    )


def chat(message: wire.ChatRequest | wire.CompleteChatRequest) -> Chat:
    """Returns the request for an answer to a conversation, streamed or not."""
    return parsing.new_chat(message, _stream_violations(message))


def chat_event(event: TextEvent, request_id: str, model: str) -> wire.ChatResponse:
    """Returns one message of a `Chat` stream."""
    if isinstance(event, TextDelta):
        response = wire.ChatResponse()
        rendering.fill_delta(response.delta, event)
        return response
    if isinstance(event, Started):
        return wire.ChatResponse(started=rendering.started(event, request_id, model))
    return wire.ChatResponse(completed=query_result(event, request_id, model))


def complete_chat(finished: Finished, request_id: str, model: str) -> wire.CompleteChatResponse:
    """Returns the response with a whole answer."""
    return wire.CompleteChatResponse(
        result=query_result(finished, request_id, model),
        alternatives=[_query_alternative(other) for other in finished.alternatives],
    )


def caption(message: wire.CaptionRequest | wire.CompleteCaptionRequest) -> Caption:
    """Returns the request for a description, streamed or not."""
    violations = _stream_violations(message)
    length = _CAPTION_LENGTHS.get(message.length)
    if length is None:
        violations.append(Violation("length", f"{message.length} is not a known value"))
    return parsing.new_request(Caption, message, violations, length=length or "normal")


def caption_event(event: TextEvent, request_id: str, model: str) -> wire.CaptionResponse:
    """Returns one message of a `Caption` stream."""
    if isinstance(event, TextDelta):
        response = wire.CaptionResponse()
        rendering.fill_delta(response.delta, event)
        return response
    if isinstance(event, Started):
        return wire.CaptionResponse(started=rendering.started(event, request_id, model))
    return wire.CaptionResponse(completed=caption_result(event, request_id, model))


def caption_result(finished: Finished, request_id: str, model: str) -> wire.CaptionResult:
    """Returns a whole description."""
    output = _expect(finished, CaptionOutput)
    return wire.CaptionResult(
        caption=output.caption,
        logprobs=rendering.logprobs(output.logprobs),
        info=rendering.info(finished, request_id, model),
    )


def complete_caption(finished: Finished, request_id: str, model: str) -> wire.CompleteCaptionResponse:
    """Returns the response with a whole description."""
    return wire.CompleteCaptionResponse(
        result=caption_result(finished, request_id, model),
        alternatives=[_caption_alternative(other) for other in finished.alternatives],
    )


def _caption_alternative(finished: Finished) -> wire.CaptionAlternative:
    output = _expect(finished, CaptionOutput)
    return wire.CaptionAlternative(
        caption=output.caption,
        logprobs=rendering.logprobs(output.logprobs),
        finish_reason=rendering.finish_reason(finished),
        stop_sequence=finished.stop_sequence,
    )


def point(message: wire.PointRequest | wire.StreamPointRequest) -> Point:
    """Returns the request for the positions of objects, streamed or not."""
    return _about_objects(Point, message, **_settings(message))


def point_response(finished: Finished, request_id: str, model: str) -> wire.PointResponse:
    """Returns the response with the positions."""
    found = _pointed(_expect(finished, PointOutput))
    return wire.PointResponse(**found, info=rendering.info(finished, request_id, model))


def point_groups(answers: Sequence[ObjectAnswer], info: generation_pb2.ResponseInfo) -> wire.PointResponse:
    """Returns the response with the positions of several objects."""
    groups = [
        wire.PointGroup(**_pointed(_outputs(answer, PointOutput)), **_group_facts(answer)) for answer in answers
    ]
    return wire.PointResponse(groups=groups, info=info)


def point_event(event: Event, request_id: str, model: str) -> wire.StreamPointResponse:
    """Returns one message of a `StreamPoint` stream."""
    if isinstance(event, FoundObject):
        assert isinstance(event.place, Location), "points are found"
        return wire.StreamPointResponse(found=_pointed_object(event.place, event.score))
    if isinstance(event, Started):
        return wire.StreamPointResponse(started=rendering.started(event, request_id, model))
    return wire.StreamPointResponse(completed=point_response(_last(event), request_id, model))


def last_point_event(
    answers: Sequence[ObjectAnswer], info: generation_pb2.ResponseInfo
) -> wire.StreamPointResponse:
    """Returns the last message of a `StreamPoint` stream about several objects."""
    return wire.StreamPointResponse(completed=point_groups(answers, info))


def detect(message: wire.DetectRequest | wire.StreamDetectRequest) -> Detect:
    """Returns the request for boxes around objects, streamed or not."""
    return _about_objects(Detect, message, **_settings(message))


def detect_response(finished: Finished, request_id: str, model: str) -> wire.DetectResponse:
    """Returns the response with the boxes."""
    objects = _detected(_expect(finished, DetectOutput))
    return wire.DetectResponse(objects=objects, info=rendering.info(finished, request_id, model))


def detect_groups(answers: Sequence[ObjectAnswer], info: generation_pb2.ResponseInfo) -> wire.DetectResponse:
    """Returns the response with the boxes around several objects."""
    groups = [
        wire.DetectGroup(objects=_detected(_outputs(answer, DetectOutput)), **_group_facts(answer))
        for answer in answers
    ]
    return wire.DetectResponse(groups=groups, info=info)


def detect_event(event: Event, request_id: str, model: str) -> wire.StreamDetectResponse:
    """Returns one message of a `StreamDetect` stream."""
    if isinstance(event, FoundObject):
        assert isinstance(event.place, Box), "boxes are found"
        return wire.StreamDetectResponse(found=_detected_object(event.place, event.score))
    if isinstance(event, Started):
        return wire.StreamDetectResponse(started=rendering.started(event, request_id, model))
    return wire.StreamDetectResponse(completed=detect_response(_last(event), request_id, model))


def last_detect_event(
    answers: Sequence[ObjectAnswer], info: generation_pb2.ResponseInfo
) -> wire.StreamDetectResponse:
    """Returns the last message of a `StreamDetect` stream about several objects."""
    return wire.StreamDetectResponse(completed=detect_groups(answers, info))


def _pointed(output: PointOutput | None) -> dict[str, Any]:
    """Returns the fields of a response or a group with points."""
    if output is None:
        return {}
    found = [_pointed_object(*item) for item in zip_longest(output.points, output.scores)]
    return {"points": rendering.points(output.points), "objects": found}


def _pointed_object(place: Location, score: float | None) -> wire.PointedObject:
    (point,) = rendering.points((place,))
    return wire.PointedObject(point=point, score=score)


def _detected(output: DetectOutput | None) -> list[wire.DetectedObject]:
    if output is None:
        return []
    return [_detected_object(*item) for item in zip_longest(output.boxes, output.scores)]


def _detected_object(box: Box, score: float | None) -> wire.DetectedObject:
    return wire.DetectedObject(box=rendering.region(box), score=score)


def _outputs(answer: ObjectAnswer, output_type: type[Any]) -> Any:
    return None if answer.finished is None else _expect(answer.finished, output_type)


def _group_facts(answer: ObjectAnswer) -> dict[str, Any]:
    """Returns the fields that groups of all kinds have."""
    facts: dict[str, Any] = {"object": answer.object}
    if answer.finished is not None:
        facts["finish_reason"] = rendering.finish_reason(answer.finished)
    if answer.failure is not None:
        failure = answer.failure
        facts["error"] = wire.ObjectError(code=failure.code.value, reason=failure.reason, message=failure.message)
    return facts


def segment(message: wire.SegmentRequest | wire.StreamSegmentRequest) -> Segment:
    """Returns the request for the outline of an object, streamed or not."""
    form = _MASK_FORMATS.get(message.mask_format)
    problems = [] if form else [Violation("mask_format", f"{message.mask_format} is not a known value")]
    return _about_objects(Segment, message, problems, mask_format=form or "svg")


def segment_response(finished: Finished, request_id: str, model: str) -> wire.SegmentResponse:
    """Returns the response with the outlines."""
    segments = [_segment(mask, finished) for mask in _expect(finished, SegmentOutput).segments]
    return wire.SegmentResponse(segments=segments, info=rendering.info(finished, request_id, model))


def _segment(mask: SegmentMask, finished: Finished) -> wire.Segment:
    forms = forms_of(mask, finished)
    lines = [wire.Polygon(points=[NormalizedPoint(x=x, y=y) for x, y in line]) for line in forms.polygons or ()]
    runs = None if forms.run_lengths is None else wire.RunLengthMask(**forms.run_lengths._asdict())
    return wire.Segment(
        svg_path=mask.svg_path,
        box=rendering.region(mask.box),
        is_partial=mask.is_partial,
        polygons=lines,
        run_length=runs,
        png=forms.png,
    )


def segment_event(event: Event, request_id: str, model: str) -> wire.StreamSegmentResponse:
    """Returns one message of a `StreamSegment` stream."""
    if isinstance(event, TextDelta):
        path = wire.PathDelta(text=event.text, token_index=event.token_index, token_count=event.num_tokens)
        return wire.StreamSegmentResponse(path_delta=path)
    if isinstance(event, Started):
        return wire.StreamSegmentResponse(started=rendering.started(event, request_id, model))
    if isinstance(event, OutlineBox):
        return wire.StreamSegmentResponse(box=rendering.region(event.box))
    return wire.StreamSegmentResponse(completed=segment_response(_last(event), request_id, model))


def gaze(message: wire.GazeRequest) -> Gaze:
    """Returns the request for the position that the person with this eye looks at."""
    violations = [] if message.HasField("eye") else [Violation("eye", "is required")]
    return parsing.new_request(Gaze, message, violations, eye=PointRef(message.eye.x, message.eye.y))


def gaze_response(finished: Finished, request_id: str, model: str) -> wire.GazeResponse:
    """Returns the response with the position."""
    target = next(iter(rendering.points(_expect(finished, PointOutput).points)), None)
    return wire.GazeResponse(target=target, info=rendering.info(finished, request_id, model))


def embed_image(message: wire.EmbedImageRequest) -> Embed:
    """Returns the request for the mean of an image's embeddings."""
    return parsing.new_request(Embed, message, [], normalize=message.normalize)


def embed_patches(message: wire.StreamEmbedImageRequest) -> Embed:
    """Returns the request for the embeddings of an image's patches."""
    dtype = _EMBEDDING_TYPES.get(message.type)
    violations = [] if dtype else [Violation("type", f"{message.type} is not a known value")]
    dtype = dtype or EMBEDDING_TYPES[0]
    return parsing.new_request(Embed, message, violations, patches=True, normalize=message.normalize, dtype=dtype)


def embed_response(finished: Finished, request_id: str, model: str) -> wire.EmbedImageResponse:
    """Returns the response with the mean."""
    output = _expect(finished, EmbedOutput)
    info = rendering.info(finished, request_id, model)
    return wire.EmbedImageResponse(mean=output.mean, patch_count=output.num_patches, info=info)


def embed_event(event: Event, request_id: str, model: str) -> wire.StreamEmbedImageResponse:
    """Returns one message of a `StreamEmbedImage` stream."""
    if isinstance(event, PatchEmbeddings):
        piece = wire.PatchEmbeddings(first_patch=event.first_patch, patch_count=event.num_patches, data=event.data)
        return wire.StreamEmbedImageResponse(patches=piece)
    if isinstance(event, Started):
        return wire.StreamEmbedImageResponse(started=rendering.started(event, request_id, model))
    return wire.StreamEmbedImageResponse(completed=embed_response(_last(event), request_id, model))


def _stream_violations(message: Any) -> list[Violation]:
    """Returns a violation if a stream, which has one sample, is asked for several."""
    if isinstance(message, wire.QueryRequest | wire.CaptionRequest | wire.ChatRequest) and message.sampling.n > 1:
        return [Violation("sampling.n", "must be 1 in a stream")]
    return []


def _about_objects(
    kind: type[ObjectRequestT], message: Any, problems: Sequence[Violation] = (), **own: Any
) -> ObjectRequestT:
    violations = [*problems]
    refs = parsing.spatial_refs(message.spatial_refs, violations)
    return parsing.new_request(kind, message, violations, object=message.object, spatial_refs=refs, **own)


def _settings(message: _ObjectsMessage) -> dict[str, Any]:
    """Returns the fields of a request for points or boxes; of too many names, which are refused, no more than show
    it."""
    given = {
        name: getattr(message, name) if message.HasField(name) else None for name in ("max_objects", "min_score")
    }
    return {**given, "objects": tuple(message.objects[: MAX_OBJECT_NAMES + 1])}


def _last(event: Event) -> Finished:
    assert isinstance(event, Finished), f"the engine sent {type(event)}"
    return event


def _expect(finished: Finished, output_type: type[Any]) -> Any:
    assert isinstance(finished.output, output_type), f"the engine answered with {type(finished.output)}"
    return finished.output


@dataclass(frozen=True, slots=True)
class Binding:
    """Binds an RPC to its two functions. `render` converts an event, the request's id and the model's name to a
    response.

    It gets every event of the request if `is_streamed`, and otherwise the last one.
    """

    rpc: str
    parse: Callable[[Any], Request]
    render: Callable[[Any, str, str], Any]
    is_streamed: bool = False
    render_groups: Callable[[Sequence[ObjectAnswer], generation_pb2.ResponseInfo], Any] | None = None
    """Converts the answers about several objects to a response, in a stream the last; None if requests have no
    `objects`."""


BINDINGS = (
    Binding("Query", query, query_event, is_streamed=True),
    Binding("CompleteQuery", query, complete_query),
    Binding("Caption", caption, caption_event, is_streamed=True),
    Binding("CompleteCaption", caption, complete_caption),
    Binding("Point", point, point_response, render_groups=point_groups),
    Binding("Detect", detect, detect_response, render_groups=detect_groups),
    Binding("StreamPoint", point, point_event, is_streamed=True, render_groups=last_point_event),
    Binding("StreamDetect", detect, detect_event, is_streamed=True, render_groups=last_detect_event),
    Binding("Segment", segment, segment_response),
    Binding("StreamSegment", segment, segment_event, is_streamed=True),
    Binding("Gaze", gaze, gaze_response),
    Binding("EmbedImage", embed_image, embed_response),
    Binding("StreamEmbedImage", embed_patches, embed_event, is_streamed=True),
    Binding("Chat", chat, chat_event, is_streamed=True),
    Binding("CompleteChat", chat, complete_chat),
)
