"""Converts the engine's events and results to protobuf. Knows nothing about calls or the engine.

`request_id` and `model` are sent in `started` and in the `info` of every result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Event,
    Finished,
    FinishReason,
    Location,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)

_FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
        FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
        FinishReason.MAX_OBJECTS: generation_pb2.FINISH_REASON_MAX_OBJECTS,
    }
)
_CHANNELS: Mapping[TextChannel, generation_pb2.TextChannel] = MappingProxyType(
    {
        TextChannel.ANSWER: generation_pb2.TEXT_CHANNEL_ANSWER,
        TextChannel.REASONING: generation_pb2.TEXT_CHANNEL_REASONING,
    }
)


def query_event(event: Event, request_id: str, model: str) -> wire.QueryResponse:
    """One message of a `Query` stream."""
    if isinstance(event, TextDelta):  # first: nearly every event is one
        response = wire.QueryResponse()
        _fill_delta(response.delta, event)
        return response
    if isinstance(event, Started):
        return wire.QueryResponse(started=_started(event, request_id, model))
    return wire.QueryResponse(completed=query_result(event, request_id, model))


def caption_event(event: Event, request_id: str, model: str) -> wire.CaptionResponse:
    """One message of a `Caption` stream."""
    if isinstance(event, TextDelta):
        response = wire.CaptionResponse()
        _fill_delta(response.delta, event)
        return response
    if isinstance(event, Started):
        return wire.CaptionResponse(started=_started(event, request_id, model))
    return wire.CaptionResponse(completed=caption_result(event, request_id, model))


def query_result(finished: Finished, request_id: str, model: str) -> wire.QueryResult:
    """A whole answer."""
    output = _expect(finished, QueryOutput)
    return wire.QueryResult(
        answer=output.answer,
        reasoning=None if output.reasoning is None else _reasoning(output.reasoning),
        info=_info(finished, request_id, model),
    )


def caption_result(finished: Finished, request_id: str, model: str) -> wire.CaptionResult:
    """A whole description."""
    output = _expect(finished, CaptionOutput)
    return wire.CaptionResult(caption=output.caption, info=_info(finished, request_id, model))


def point_response(finished: Finished, request_id: str, model: str) -> wire.PointResponse:
    """The places found."""
    output = _expect(finished, PointOutput)
    return wire.PointResponse(points=_points(output.points), info=_info(finished, request_id, model))


def detect_response(finished: Finished, request_id: str, model: str) -> wire.DetectResponse:
    """The boxes found."""
    output = _expect(finished, DetectOutput)
    objects = [wire.DetectedObject(box=_box(box)) for box in output.boxes]
    return wire.DetectResponse(objects=objects, info=_info(finished, request_id, model))


def segment_response(finished: Finished, request_id: str, model: str) -> wire.SegmentResponse:
    """The outlines found."""
    output = _expect(finished, SegmentOutput)
    segments = [wire.Segment(svg_path=mask.svg_path, box=_box(mask.box)) for mask in output.segments]
    return wire.SegmentResponse(segments=segments, info=_info(finished, request_id, model))


def _expect(finished: Finished, output_type: type[Any]) -> Any:
    assert isinstance(finished.output, output_type), f"the engine answered with {type(finished.output)}"
    return finished.output


def _fill_delta(delta: generation_pb2.TextDelta, event: TextDelta) -> None:
    # In its place: a message that is made apart and then copied into its parent takes twice the time.
    delta.text = event.text
    delta.channel = _CHANNELS[event.channel]
    delta.token_index = event.token_index
    delta.token_count = event.num_tokens


def _started(event: Started, request_id: str, model: str) -> generation_pb2.StreamStarted:
    return generation_pb2.StreamStarted(request_id=request_id, model=model, usage=_usage(event.usage))


def _info(finished: Finished, request_id: str, model: str) -> generation_pb2.ResponseInfo:
    return generation_pb2.ResponseInfo(
        request_id=request_id,
        model=model,
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        usage=_usage(finished.usage),
        timing=_timing(finished.timing),
    )


def _usage(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        input_token_count=usage.num_input_tokens,
        output_token_count=usage.num_output_tokens,
        cached_token_count=usage.num_cached_tokens,
        image_token_count=usage.num_image_tokens,
    )


def _timing(timing: Timing) -> generation_pb2.Timing:
    return generation_pb2.Timing(
        queue_duration=_duration(timing.queue_s),
        preprocess_duration=_duration(timing.preprocess_s),
        prefill_duration=_duration(timing.prefill_s),
        time_to_first_token=_duration(timing.time_to_first_token_s),
        decode_duration=_duration(timing.decode_s),
    )


def _duration(duration_s: float) -> Duration:
    seconds, nanos = divmod(round(duration_s * 1e9), 10**9)
    return Duration(seconds=seconds, nanos=nanos)


def _reasoning(reasoning: Reasoning) -> generation_pb2.Reasoning:
    return generation_pb2.Reasoning(
        text=reasoning.text,
        groundings=[
            generation_pb2.Grounding(
                start_char=grounding.start_char,
                end_char=grounding.end_char,
                points=_points(grounding.points),
            )
            for grounding in reasoning.groundings
        ],
    )


def _points(locations: Iterable[Location]) -> list[media_pb2.NormalizedPoint]:
    return [media_pb2.NormalizedPoint(x=location.x, y=location.y) for location in locations]


def _box(box: Box) -> media_pb2.NormalizedBox:
    return media_pb2.NormalizedBox(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)
