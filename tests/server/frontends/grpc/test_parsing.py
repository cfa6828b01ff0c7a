"""protobuf → requests: presence, defaults, and every violation at once."""

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc import vision_service as vision
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    Caption,
    Gaze,
    PointRef,
    Priority,
    Query,
    RequestOptions,
    SamplingParams,
)

DATA = b"an encoded image"
IMAGE = {"data": DATA}
POINT_REF = {"point": {"x": 0.5, "y": 0.25}}
BOX_REF = {"box": {"x_min": 0.125, "y_min": 0.25, "x_max": 0.5, "y_max": 0.75}}


def violations(parse: Any, message: Any) -> list[str]:
    """The fields that are wrong with a message."""
    with pytest.raises(InvalidRequest) as caught:
        parse(message)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize("kind", [wire.QueryRequest, wire.CompleteQueryRequest])
def test_query_takes_its_defaults_where_fields_are_absent(kind: Any):
    assert vision.query(kind(question="why?")) == Query("why?")
    assert vision.query(kind(question="why?", image=IMAGE)) == Query("why?", DATA)


@pytest.mark.parametrize("kind", [wire.QueryRequest, wire.CompleteQueryRequest])
def test_query_takes_every_field(kind: Any):
    message = kind(
        question="why?",
        image=IMAGE,
        reasoning=True,
        spatial_refs=[POINT_REF, BOX_REF],
        sampling={
            "temperature": 0.5,
            "top_p": 0.25,
            "max_tokens": 7,
            "seed": 9,
            "stop": ["a", "b"],
            "include_stop": True,
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.5,
            "logit_bias": [{"token_id": 3, "bias": -2.0}, {"token_id": 7, "bias": 1.5}],
            "logprobs": 0,
            "n": 1,
        },
        options={"model": "m", "max_queue_duration": Duration(seconds=1, nanos=500_000_000)},
    )
    assert vision.query(message) == Query(
        question="why?",
        image=DATA,
        reasoning=True,
        spatial_refs=(PointRef(0.5, 0.25), BoxRef(0.125, 0.25, 0.5, 0.75)),
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            max_tokens=7,
            seed=9,
            stop=("a", "b"),
            include_stop=True,
            top_k=5,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            logit_bias=((3, -2.0), (7, 1.5)),
            logprobs=0,
            n=1,
        ),
        options=RequestOptions(model="m", max_queue_s=1.5),
    )


def test_each_setting_of_sampling_has_the_same_name_in_the_engine():
    message: Any = generation_pb2.SamplingParams.DESCRIPTOR
    assert {field.name for field in message.fields} == {field.name for field in fields(SamplingParams)}


def test_zero_that_is_set_is_not_absence():
    parsed = vision.query(wire.QueryRequest(question="why?", sampling={"temperature": 0.0, "seed": 0}))
    assert parsed.sampling == SamplingParams(temperature=0.0, seed=0)
    assert violations(vision.point, wire.PointRequest(object="bird", image=IMAGE, max_objects=0)) == ["max_objects"]


def test_each_value_of_an_enum_has_its_counterpart():
    for name, _ in wire.CaptionLength.items():
        word = name.removeprefix("CAPTION_LENGTH_").lower()
        for kind in (wire.CaptionRequest, wire.CompleteCaptionRequest):
            expected = Caption(DATA, "normal" if word == "unspecified" else word)
            assert vision.caption(kind(image=IMAGE, length=name)) == expected
    for name, number in generation_pb2.Priority.items():
        request = vision.query(wire.QueryRequest(question="?", options={"priority": number}))
        word = name.removeprefix("PRIORITY_")
        assert request.options.priority is Priority["NORMAL" if word == "UNSPECIFIED" else word]
    for name, number in generation_pb2.CachePolicy.items():
        request = vision.query(wire.QueryRequest(question="?", options={"cache": number}))
        word = name.removeprefix("CACHE_POLICY_")
        assert request.options.cache is CachePolicy["USE" if word == "UNSPECIFIED" else word]


def test_values_of_the_future_are_violations():
    caption = wire.CaptionRequest.FromString(wire.CaptionRequest(image=IMAGE).SerializeToString() + b"\x10\x63")
    assert caption.length == 99
    assert violations(vision.caption, caption) == ["length"]
    options = generation_pb2.RequestOptions.FromString(b"\x18\x63\x20\x63")
    assert (options.priority, options.cache) == (99, 99)
    query = wire.QueryRequest(question="?", options=options)
    assert violations(vision.query, query) == ["options.priority", "options.cache"]


RAW = {"pixels": bytes(12), "width_px": 2, "height_px": 2, "format": media_pb2.PIXEL_FORMAT_RGB8}


@pytest.mark.parametrize(
    ("number", "pixel_format", "num_bytes"),
    [
        (media_pb2.PIXEL_FORMAT_RGB8, PixelFormat.RGB8, 12),
        (media_pb2.PIXEL_FORMAT_BGR8, PixelFormat.BGR8, 12),
        (media_pb2.PIXEL_FORMAT_RGBA8, PixelFormat.RGBA8, 16),
        (media_pb2.PIXEL_FORMAT_GRAY8, PixelFormat.GRAY8, 4),
    ],
)
def test_pixels_are_packed_unless_they_say_otherwise(number: Any, pixel_format: Any, num_bytes: int):
    raw: Any = RAW | {"format": number, "pixels": bytes(num_bytes)}
    request = vision.caption(wire.CaptionRequest(image={"raw": raw}))
    assert request.image == RawImage.packed(bytes(num_bytes), 2, 2, pixel_format)
    raw |= {"pixels": bytes(60), "row_stride_bytes": 30}
    request = vision.query(wire.QueryRequest(question="?", image={"raw": raw}))
    assert request.image == RawImage(bytes(60), 2, 2, pixel_format, 30)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"pixels": b""}, ["pixels"]),
        ({"format": 0}, ["format"]),
        ({"format": 99}, ["format"]),
        ({"format": 0, "width_px": 0, "height_px": -1}, ["format", "width_px", "height_px"]),
        ({"width_px": 0, "height_px": 0}, ["width_px", "height_px"]),
        ({"row_stride_bytes": 5}, ["row_stride_bytes"]),
        ({"row_stride_bytes": -1}, ["row_stride_bytes"]),
        ({"height_px": 0, "row_stride_bytes": 5}, ["height_px", "row_stride_bytes"]),
    ],
)
def test_every_violation_of_raw_pixels_is_told(changes: dict[str, Any], fields: list[str]):
    message = wire.DetectRequest(object="", image={"raw": RAW | changes})
    found = violations(vision.detect, message)
    assert sorted(found) == sorted(["object", *(f"image.raw.{field}" for field in fields)])


def test_a_gaze_needs_an_eye():
    assert vision.gaze(wire.GazeRequest(image=IMAGE, eye={"x": 0.5})) == Gaze(DATA, PointRef(0.5, 0.0))
    assert violations(vision.gaze, wire.GazeRequest(sampling={"top_p": 2.0})) == ["eye", "image", "sampling.top_p"]


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (vision.point, wire.PointRequest()),
        (vision.detect, wire.DetectRequest()),
        (vision.segment, wire.SegmentRequest()),
    ],
)
def test_object_and_image_are_required_and_both_are_told(parse: Any, message: Any):
    assert violations(parse, message) == ["object", "image"]


@pytest.mark.parametrize("image", [{}, {"data": b""}])
def test_image_without_content_is_a_violation_even_where_none_is_needed(image: Any):
    assert violations(vision.query, wire.QueryRequest(question="why?", image=image)) == ["image"]
    assert violations(vision.caption, wire.CaptionRequest(image=image)) == ["image"]


def test_reference_to_nothing_keeps_the_index_of_those_behind_it():
    message = wire.QueryRequest(
        question="why?", image=IMAGE, spatial_refs=[POINT_REF, {}, {"point": {"x": 2.0, "y": 0.5}}]
    )
    assert violations(vision.query, message) == ["spatial_refs[1]", "spatial_refs[2].point.x"]


@pytest.mark.parametrize("ref", [{}, POINT_REF, {"point": {"x": 2.0}}])
def test_too_many_references_are_counted_and_not_looked_at(ref: Any):
    message = wire.QueryRequest(question=" ", image=IMAGE, spatial_refs=[ref] * (MAX_SPATIAL_REFS + 1))
    assert violations(vision.query, message) == ["spatial_refs", "question"]
    assert violations(vision.point, wire.PointRequest(spatial_refs=[ref] * 100_000)) == [
        "spatial_refs",
        "object",
        "image",
    ]


def test_all_violations_are_told_together():
    message = wire.QueryRequest(
        question=" ",
        image=IMAGE,
        spatial_refs=[{}, {"box": {"x_min": 0.5, "x_max": 0.25, "y_max": 1.5}}],
        sampling={"temperature": math.nan, "top_p": 0.0, "max_tokens": -1, "seed": -5},
        options={"max_queue_duration": Duration(seconds=1, nanos=-1)},
    )
    assert set(violations(vision.query, message)) == {
        "question",
        "spatial_refs[0]",
        "spatial_refs[1].box.x_max",
        "spatial_refs[1].box.y_max",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.seed",
        "options.max_queue_duration",
    }


@pytest.mark.parametrize(
    ("seconds", "nanos", "is_fine"),
    [
        (0, 1, True),
        (1, 0, True),
        (0, 0, False),
        (-1, 0, False),
        (0, -1, False),
        (1, -1, False),
        (0, 10**9, False),
        (2**62, 0, False),
        (315_576_000_000, 0, True),
    ],
)
def test_queue_time_is_a_positive_well_formed_duration(seconds: int, nanos: int, is_fine: bool):
    message = wire.QueryRequest(
        question="why?", options={"max_queue_duration": Duration(seconds=seconds, nanos=nanos)}
    )
    if is_fine:
        assert vision.query(message).options.max_queue_s == pytest.approx(seconds + nanos * 1e-9)
    else:
        assert violations(vision.query, message) == ["options.max_queue_duration"]


@pytest.mark.parametrize("kind", [wire.QueryRequest, wire.CompleteQueryRequest])
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"choices": {"values": ["yes", "no"]}}, Constraint(choices=("yes", "no"))),
        ({"regex": "[0-9]+"}, Constraint(regex="[0-9]+")),
        ({"json_schema": '{"type": "object"}'}, Constraint(json_schema='{"type": "object"}')),
    ],
)
def test_query_takes_each_kind_of_constraint(kind: Any, message: Any, expected: Constraint):
    assert vision.query(kind(question="why?", constraint=message)).constraint == expected


def test_everything_that_is_wrong_with_a_constraint_is_told_at_once():
    empty = wire.QueryRequest(question="", constraint={})
    assert violations(vision.query, empty) == ["question", "constraint"]
    schema = json.dumps({"if": {}, "properties": {"a": {"not": {"type": "string"}}}})
    wrong = wire.QueryRequest(question="", constraint={"json_schema": schema})
    assert violations(vision.query, wrong) == ["question", "constraint.json_schema", "constraint.json_schema"]
    choices = wire.QueryRequest(question="why?", constraint={"choices": {"values": ["a", "", "b", "x" * 513]}})
    assert violations(vision.query, choices) == ["constraint.choices.values[1]", "constraint.choices.values[3]"]
