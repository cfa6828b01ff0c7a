"""Events → protobuf: every field, and nothing lost."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc import vision_service as vision
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Finished,
    FinishReason,
    FoundObject,
    Grounding,
    Location,
    Output,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)

TIMING = Timing(queue_s=0.001, preprocess_s=0.0625, prefill_s=1.5, time_to_first_token_s=12.0, decode_s=1e-9)
INFO = {
    "request_id": "id",
    "model": "m",
    "finish_reason": "FINISH_REASON_STOP",
    "usage": {
        "input_token_count": 735,
        "output_token_count": 12,
        "image_token_count": 729,
        "cached_token_count": 720,
    },
    "timing": {
        "queue_duration": "0.001s",
        "preprocess_duration": "0.062500s",
        "prefill_duration": "1.500s",
        "time_to_first_token": "12s",
        "decode_duration": "0.000000001s",
    },
    "image_width_px": 640,
    "image_height_px": 480,
}
BOX = Box(0.125, 0.25, 0.5, 0.75)
BOX_DICT = {"x_min": 0.125, "y_min": 0.25, "x_max": 0.5, "y_max": 0.75}


def finished(output: Output, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(output, reason, Usage(735, 729, 12, 720), TIMING, image_size_px=(640, 480))


def as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def test_query_result_has_answer_and_info():
    result = vision.query_result(finished(QueryOutput("a bird", None)), "id", "m")
    assert as_dict(result) == {"answer": "a bird", "info": INFO}


def test_reasoning_keeps_its_groundings():
    thought = Reasoning("so a bird", (Grounding(3, 9, (Location(0.5, 0.25), Location(0.0, 1.0))),))
    result = vision.query_result(finished(QueryOutput("a bird", thought)), "id", "m")
    grounding = {"start_char": 3, "end_char": 9, "points": [{"x": 0.5, "y": 0.25}, {"y": 1.0}]}
    assert as_dict(result.reasoning) == {"text": "so a bird", "groundings": [grounding]}


def test_reasoning_that_was_not_asked_for_is_absent_and_an_empty_one_is_not():
    assert not vision.query_result(finished(QueryOutput("", None)), "id", "m").HasField("reasoning")
    assert vision.query_result(finished(QueryOutput("", Reasoning("", ()))), "id", "m").HasField("reasoning")


def test_caption_result_has_caption_and_info():
    result = vision.caption_result(finished(CaptionOutput("a bird")), "id", "m")
    assert as_dict(result) == {"caption": "a bird", "info": INFO}


def test_points_boxes_and_outlines_keep_their_order():
    points = vision.point_response(finished(PointOutput((Location(0.5, 0.25), Location(1.0, 0.75)))), "id", "m")
    places = [{"x": 0.5, "y": 0.25}, {"x": 1.0, "y": 0.75}]
    assert as_dict(points) == {"points": places, "objects": [{"point": place} for place in places], "info": INFO}
    boxes = vision.detect_response(finished(DetectOutput((BOX,))), "id", "m")
    assert as_dict(boxes) == {"objects": [{"box": BOX_DICT}], "info": INFO}
    outlines = vision.segment_response(finished(SegmentOutput((SegmentMask("M 0 0 z", BOX),))), "id", "m")
    assert as_dict(outlines) == {"segments": [{"svg_path": "M 0 0 z", "box": BOX_DICT}], "info": INFO}


def test_objects_have_their_scores_whole_and_streamed():
    scored = PointOutput((Location(0.5, 0.25), Location(1.0, 0.75)), (0.5, 0.0))
    points = vision.point_response(finished(scored), "id", "m")
    assert [(item.point.x, item.score) for item in points.objects] == [(0.5, 0.5), (1.0, 0.0)]
    assert all(item.HasField("score") for item in points.objects)
    boxes = vision.detect_response(finished(DetectOutput((BOX,), (0.25,))), "id", "m")
    assert as_dict(boxes)["objects"] == [{"box": BOX_DICT, "score": 0.25}]
    assert vision.detect_event(FoundObject(BOX, 0.25), "id", "m").found == boxes.objects[0]
    assert vision.point_event(FoundObject(Location(1.0, 0.75), 0.0), "id", "m").found == points.objects[1]


def test_streams_carry_the_same_events():
    started, delta = Started(Usage(735, 729)), TextDelta("a ", TextChannel.REASONING, 3, 2)
    expected_delta = generation_pb2.TextDelta(
        text="a ", channel=generation_pb2.TEXT_CHANNEL_REASONING, token_index=3, token_count=2
    )
    expected_started = generation_pb2.StreamStarted(
        request_id="id", model="m", usage=generation_pb2.Usage(input_token_count=735, image_token_count=729)
    )
    for event, response in ((vision.query_event, wire.QueryResponse), (vision.caption_event, wire.CaptionResponse)):
        assert event(started, "id", "m") == response(started=expected_started)
        assert event(delta, "id", "m") == response(delta=expected_delta)
    answer, caption = finished(QueryOutput("a bird", None)), finished(CaptionOutput("a bird"))
    assert vision.query_event(answer, "id", "m").completed == vision.query_result(answer, "id", "m")
    assert vision.caption_event(caption, "id", "m").completed == vision.caption_result(caption, "id", "m")


@pytest.mark.parametrize("reason", FinishReason)
def test_each_finish_reason_has_its_value(reason: FinishReason):
    info = vision.point_response(finished(PointOutput(()), reason), "id", "m").info
    assert generation_pb2.FinishReason.Name(info.finish_reason) == f"FINISH_REASON_{reason.name}"


@pytest.mark.parametrize("channel", [channel for channel in TextChannel if channel is not TextChannel.PATH])
def test_each_channel_has_its_value(channel: TextChannel):
    delta = vision.query_event(TextDelta("", channel, 0, 0), "id", "m").delta
    assert generation_pb2.TextChannel.Name(delta.channel) == f"TEXT_CHANNEL_{channel.name}"


def test_duration_that_rounds_up_to_a_second_stays_well_formed():
    timing = Timing(0.9999999999, 0.0, 0.0, 0.0, 0.0)
    message = vision.point_response(Finished(PointOutput(()), FinishReason.STOP, Usage(1, 0), timing), "id", "m")
    assert message.info.timing.queue_duration == Duration(seconds=1)
