"""From response messages to values."""

import dataclasses
import json

import pytest

from kestrel_client import (
    CaptionAlternative,
    EngineStatus,
    FinishReason,
    QueryAlternative,
    TextChannel,
    Timing,
    TokenLogprob,
    TopLogprob,
    results,
)
from kestrel_client.v1 import engine_service_pb2, generation_pb2, media_pb2, vision_service_pb2
from tests.client import canned


def test_timing_is_in_seconds():
    timing = results.caption_result(canned.caption_result()).timing
    assert timing == Timing(
        queue_s=0.001, preprocess_s=0.002, prefill_s=0.03, time_to_first_token_s=0.033, decode_s=1.5
    )


def test_every_finish_reason_of_the_contract_is_known():
    for name in generation_pb2.DESCRIPTOR.enum_types_by_name["FinishReason"].values_by_name:
        info = generation_pb2.ResponseInfo(finish_reason=name)
        result = results.caption_result(vision_service_pb2.CaptionResult(info=info))
        assert (result.finish_reason is FinishReason.UNKNOWN) == name.endswith("_UNSPECIFIED")


def test_every_channel_of_the_contract_is_known():
    for name in generation_pb2.DESCRIPTOR.enum_types_by_name["TextChannel"].values_by_name:
        delta = results.text_delta(generation_pb2.TextDelta(channel=name))
        assert (delta.channel is TextChannel.UNKNOWN) == name.endswith("_UNSPECIFIED")


def test_every_status_of_an_engine_is_known():
    for name in engine_service_pb2.DESCRIPTOR.enum_types_by_name["EngineStatus"].values_by_name:
        engine = engine_service_pb2.EngineLoad(status=name)
        (read,) = results.load(engine_service_pb2.GetLoadResponse(engines=[engine])).engines
        assert (read.status is EngineStatus.UNKNOWN) == name.endswith("_UNSPECIFIED")


def test_a_server_without_the_parts_of_the_load_has_none():
    response = engine_service_pb2.GetLoadResponse(load=engine_service_pb2.Load(page_count=5))
    load = results.load(response)
    assert (load.page_count, load.engines, load.frontends) == (5, (), ())


def test_a_reason_from_the_future_is_unknown_rather_than_an_error():
    message = vision_service_pb2.CaptionResult()
    message.info.MergeFromString(b"\x18\x63")  # field 3, value 99
    assert results.caption_result(message).finish_reason is FinishReason.UNKNOWN


def test_a_result_cannot_be_changed_and_can_be_written_as_json():
    result = results.query_result(canned.query_result(thought=canned.THOUGHT))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.answer = "else"  # pyrefly: ignore[read-only] that is the test
    written = json.loads(json.dumps(dataclasses.asdict(result)))
    assert written["finish_reason"] == "length"
    assert written["reasoning"]["groundings"][0] == {
        "start_char": 5,
        "end_char": 10,
        "points": [{"x": 0.5, "y": 0.25}],
    }


def test_a_stop_string_logprobs_and_alternatives_are_read():
    top = generation_pb2.TopLogprob(text="b", bytes=b"b", logprob=-2.0, token_id=4)
    token = generation_pb2.TokenLogprob(text="a", bytes=b"a", logprob=-1.0, token_id=3, top=[top])
    read = TokenLogprob("a", b"a", -1.0, 3, (TopLogprob("b", b"b", -2.0, 4),))
    reason = generation_pb2.FINISH_REASON_STOP_SEQUENCE
    info = generation_pb2.ResponseInfo(finish_reason=reason, stop_sequence="end")
    thought = generation_pb2.Reasoning(text="t", logprobs=[token])
    query = results.complete_query(
        vision_service_pb2.CompleteQueryResponse(
            result=vision_service_pb2.QueryResult(answer="a", reasoning=thought, logprobs=[token], info=info),
            alternatives=[
                vision_service_pb2.QueryAlternative(
                    answer="b", reasoning=thought, logprobs=[token], finish_reason=reason, stop_sequence="end"
                )
            ],
        )
    )
    assert (query.stop_sequence, query.logprobs) == ("end", (read,))
    assert query.reasoning is not None
    assert query.reasoning.logprobs == (read,)
    wanted = QueryAlternative("b", query.reasoning, (read,), FinishReason.STOP_SEQUENCE, "end")
    assert query.alternatives == (wanted,)
    caption = results.complete_caption(
        vision_service_pb2.CompleteCaptionResponse(
            result=vision_service_pb2.CaptionResult(caption="a", logprobs=[token], info=info),
            alternatives=[
                vision_service_pb2.CaptionAlternative(caption="b", logprobs=[token], finish_reason=reason)
            ],
        )
    )
    assert caption.logprobs == (read,)
    assert caption.alternatives == (CaptionAlternative("b", (read,), FinishReason.STOP_SEQUENCE, None),)
    delta = results.text_delta(generation_pb2.TextDelta(text="a", logprobs=[token]))
    assert delta.logprobs == (read,)


def test_places_are_also_told_in_pixels_of_the_image():
    points = [media_pb2.NormalizedPoint(x=0.25, y=0.5), media_pb2.NormalizedPoint(x=1, y=1)]
    pointed = results.point_result(vision_service_pb2.PointResponse(points=points, info=canned.INFO), "kite")
    assert (pointed.width_px, pointed.height_px, pointed.object) == (200, 100, "kite")
    assert pointed.points_px == ((50, 50), (199, 99))
    found = [vision_service_pb2.DetectedObject(box=canned.BOX)]
    detected = results.detect_result(vision_service_pb2.DetectResponse(objects=found, info=canned.INFO), "kite")
    assert detected.boxes_px == ((50, 12, 150, 50),)
    outlined = results.segment_result(canned.segment_response("kite"), "kite")
    assert outlined.polygons_px == (outlined.segments[0].polygon(200, 100),)
    gaze = results.gaze_result(vision_service_pb2.GazeResponse(target=points[0], info=canned.INFO))
    assert gaze.target_px == (50, 50)
    assert results.gaze_result(vision_service_pb2.GazeResponse(info=canned.INFO)).target_px is None


def test_without_the_size_of_the_image_there_are_no_pixels():
    pointed = results.point_result(vision_service_pb2.PointResponse(points=[media_pb2.NormalizedPoint()]), "kite")
    assert (pointed.width_px, pointed.height_px) == (None, None)
    with pytest.raises(ValueError, match="did not report the size"):
        _ = pointed.points_px


def test_scores_of_points_and_boxes_are_read_where_there_are_some():
    place, box = media_pb2.NormalizedPoint(x=0.5, y=0.25), media_pb2.NormalizedBox(x_max=1.0, y_max=1.0)
    pointed = [
        vision_service_pb2.PointedObject(point=place, score=0.0),
        vision_service_pb2.PointedObject(point=place),
    ]
    response = vision_service_pb2.PointResponse(points=[place] * 2, objects=pointed, info=canned.INFO)
    assert [item.score for item in results.point_result(response, "kite").objects] == [0.0, None]
    group = vision_service_pb2.PointGroup(object="kite", points=[place], objects=pointed[:1])
    grouped = results.point_result(vision_service_pb2.PointResponse(groups=[group], info=canned.INFO), ["kite"])
    assert [item.point.x for item in grouped.groups[0].objects] == [0.5]
    found = [vision_service_pb2.DetectedObject(box=box, score=0.75), vision_service_pb2.DetectedObject(box=box)]
    detected = results.detect_result(vision_service_pb2.DetectResponse(objects=found, info=canned.INFO), "kite")
    assert [item.score for item in detected.objects] == [0.75, None]
