"""From arguments to request messages."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from kestrel_client import Box, CallOptions, InvalidRequest, Point, requests
from kestrel_client.images import put_reference
from kestrel_client.v1 import generation_pb2, media_pb2, vision_service_pb2


def test_what_is_left_out_stays_out_of_the_message():
    message = requests.query(vision_service_pb2.QueryRequest, "what?", None, (), {})
    assert message.question == "what?"
    assert not message.HasField("reasoning")
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        assert not message.sampling.HasField(name)
    assert message.options.model == ""
    assert not message.options.HasField("max_queue_duration")
    assert not requests.point(vision_service_pb2.PointRequest, "kite", None, (), {}).HasField("max_objects")


def test_zero_and_false_are_values():
    message = requests.query(
        vision_service_pb2.CompleteQueryRequest, "what?", False, (), {"temperature": 0, "seed": 0}
    )
    assert message.HasField("reasoning")
    assert message.sampling.HasField("temperature")
    assert message.sampling.HasField("seed")


def test_every_option_reaches_its_field():
    message = requests.detect(
        vision_service_pb2.DetectRequest,
        "kite",
        7,
        [Point(0.5, 0.25)],
        {"temperature": 0.5, "top_p": 0.25, "max_tokens": 9, "seed": 3, "model": "tiny", "max_queue_s": 1.5},
    )
    assert (message.object, message.max_objects, len(message.spatial_refs)) == ("kite", 7, 1)
    assert message.sampling == generation_pb2.SamplingParams(temperature=0.5, top_p=0.25, max_tokens=9, seed=3)
    assert message.options.model == "tiny"
    assert message.options.max_queue_duration.ToMilliseconds() == 1500


def test_stop_strings_are_a_list_or_a_single_one():
    for given, sent in ((["a", "b"], ["a", "b"]), ("ab", ["ab"]), (None, [])):
        message = requests.caption(vision_service_pb2.CaptionRequest, None, {"stop": given, "include_stop": True})
        assert message.sampling.stop == sent
        assert message.sampling.include_stop


def test_every_setting_of_sampling_is_an_option():
    settings = set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert settings <= CallOptions.__annotations__.keys()


def test_every_setting_of_sampling_reaches_its_field():
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_tokens": 9,
        "seed": 3,
        "stop": ["a"],
        "include_stop": True,
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {3: 1.5},
        "logprobs": 0,
        "n": 2,
    }
    message = requests.caption(vision_service_pb2.CompleteCaptionRequest, None, CallOptions(**settings))
    wanted: dict[str, Any] = {**settings, "logit_bias": [{"token_id": 3, "bias": 1.5}]}
    assert message.sampling == generation_pb2.SamplingParams(**wanted)
    assert set(settings) == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(("policy", "number"), [(None, 0), ("use", 1), ("refresh", 2), ("bypass", 3)])
def test_a_cache_policy_is_sent_by_its_number(policy: Any, number: int):
    assert (
        requests.point(vision_service_pb2.PointRequest, "kite", None, (), {"cache": policy}).options.cache == number
    )


def test_references_keep_their_order_and_kind():
    message = requests.segment(vision_service_pb2.SegmentRequest, "kite", (Point(0.5, 0.25), Box(0, 0, 0.5, 1)), {})
    assert [ref.WhichOneof("ref") for ref in message.spatial_refs] == ["point", "box"]
    assert message.spatial_refs[0].point.y == 0.25
    assert message.spatial_refs[1].box.x_max == 0.5


@pytest.mark.parametrize(("length", "number"), [(None, 0), ("short", 1), ("normal", 2), ("long", 3)])
def test_a_length_is_sent_by_its_number(length: Any, number: int):
    assert requests.caption(vision_service_pb2.CaptionRequest, length, {}).length == number


def test_a_length_that_does_not_exist_is_refused():
    endless: Any = "endless"
    with pytest.raises(InvalidRequest, match="length: is one of short, normal, long, not 'endless'"):
        requests.caption(vision_service_pb2.CaptionRequest, endless, {})
    with pytest.raises(InvalidRequest, match="priority: is one of interactive, normal, batch, not 'endless'"):
        requests.point(vision_service_pb2.PointRequest, "kite", None, (), {"priority": endless})
    with pytest.raises(InvalidRequest, match="cache: is one of use, refresh, bypass, not 'endless'"):
        requests.point(vision_service_pb2.PointRequest, "kite", None, (), {"cache": endless})


@pytest.mark.parametrize(("priority", "number"), [(None, 0), ("interactive", 1), ("normal", 2), ("batch", 3)])
def test_a_priority_is_sent_by_its_number(priority: Any, number: int):
    assert (
        requests.point(vision_service_pb2.PointRequest, "kite", None, (), {"priority": priority}).options.priority
        == number
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("max_tokens", 2**40),
        ("max_tokens", 1.5),
        ("seed", "1"),
        ("model", 7),
        ("max_queue_s", "1"),
        ("max_queue_s", float("inf")),
        ("max_queue_s", 1e300),
    ],
)
def test_an_option_of_a_wrong_type_or_size_is_named(name: str, value: Any):
    options: Any = {name: value}
    with pytest.raises(InvalidRequest) as caught:
        requests.point(vision_service_pb2.PointRequest, "kite", None, (), options)
    assert caught.value.violations[0].field == name


def test_an_argument_in_the_wrong_place_is_named_and_not_printed():
    picture: Any = b"secret" * 1000
    for build in (
        lambda: requests.query(vision_service_pb2.QueryRequest, picture, None, (), {}),
        lambda: requests.point(vision_service_pb2.PointRequest, picture, None, (), {}),
        lambda: requests.detect(vision_service_pb2.DetectRequest, "kite", picture, (), {}),
        lambda: requests.segment(vision_service_pb2.SegmentRequest, "kite", [picture], {}),
        lambda: requests.image_id(picture),
    ):
        with pytest.raises(InvalidRequest, match="of type bytes") as caught:
            build()
        assert len(str(caught.value)) < 100


HALF = "a\ud800"
"""A text with half of a surrogate pair, as Python makes of a byte in a command line that is no UTF-8."""


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: requests.query(vision_service_pb2.QueryRequest, HALF, None, (), {}), "question"),
        (
            lambda: requests.query(vision_service_pb2.QueryRequest, "a", None, (), {"choices": ["a", HALF]}),
            "choices[1]",
        ),
        (lambda: requests.query(vision_service_pb2.QueryRequest, "a", None, (), {"regex": HALF}), "regex"),
        (
            lambda: requests.query(vision_service_pb2.QueryRequest, "a", None, (), {"json_schema": HALF}),
            "json_schema",
        ),
        (lambda: requests.query(vision_service_pb2.QueryRequest, "a", None, (), {"stop": HALF}), "stop"),
        (lambda: requests.query(vision_service_pb2.QueryRequest, "a", None, (), {"model": HALF}), "model"),
        (lambda: requests.detect(vision_service_pb2.DetectRequest, HALF, None, (), {}), "object"),
        (lambda: requests.point(vision_service_pb2.PointRequest, ["a", HALF], None, (), {}), "object[1]"),
        (lambda: requests.segment(vision_service_pb2.SegmentRequest, HALF, (), {}), "object"),
        (lambda: requests.image_id(HALF), "image"),
        (lambda: put_reference(media_pb2.Image(), f"https://example.com/{HALF}"), "image"),
    ],
)
def test_a_text_that_is_no_utf_8_is_named(build: Callable[[], object], field: str):
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert [violation.field for violation in caught.value.violations] == [field]
    assert str(caught.value).isascii()


def test_a_request_id_is_made_where_the_caller_has_none():
    assert requests.request_id({"request_id": "mine"}) == "mine"
    first, second = requests.request_id({}), requests.request_id({"request_id": None})
    assert first != second
    assert len(first) == len(second) == 32


@pytest.mark.parametrize("wrong", ["", "a b", "a\n", "é", "x" * 129, 7])
def test_a_request_id_that_no_call_can_carry_is_refused(wrong: Any):
    with pytest.raises(InvalidRequest) as caught:
        requests.request_id({"request_id": wrong})
    assert caught.value.violations[0].field == "request_id"
    assert caught.value.request_id


def test_a_call_may_shorten_or_lengthen_the_clients_timeout():
    assert requests.retries({}, 120, 30).timeout_s == 120
    assert requests.retries({"timeout_s": None}, 120, 30).timeout_s == 120
    assert requests.retries({"timeout_s": 600}, 120, 30).timeout_s == 600
    # gRPC takes a longer one for a deadline that has passed.
    for endless in (requests.retries({"timeout_s": 1e300}, 120, 30), requests.retries({}, float("inf"), 30)):
        assert 1e8 < endless.remaining_s < 1e9


@pytest.mark.parametrize(
    ("mistyped", "suggestion"),
    [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("timeout", "timeout_s"), ("zzz", None)],
)
def test_an_unknown_option_names_the_one_that_was_meant(mistyped: str, suggestion: str | None):
    options: Any = {mistyped: 1}
    with pytest.raises(TypeError) as caught:
        requests.caption(vision_service_pb2.CaptionRequest, None, options)
    meant = "" if suggestion is None else f" (did you mean {suggestion}?)"
    assert str(caught.value) == f"unexpected keyword argument: {mistyped}{meant}"


def test_a_constraint_is_for_queries():
    options: CallOptions = {"choices": ["yes", "no"]}
    asked = requests.query(vision_service_pb2.QueryRequest, "what?", None, (), options)
    assert asked.constraint.choices.values == ["yes", "no"]
    assert not requests.query(vision_service_pb2.QueryRequest, "what?", None, (), {}).HasField("constraint")
    for refused in (
        lambda: requests.caption(vision_service_pb2.CaptionRequest, None, options),
        lambda: requests.point(vision_service_pb2.PointRequest, "kite", None, (), {"regex": "a"}),
        lambda: requests.gaze(Point(0.5, 0.5), {"json_schema": {}}),
    ):
        with pytest.raises(InvalidRequest, match="is for queries"):
            refused()


def constraint(**options: Any) -> generation_pb2.Constraint:
    given = cast(CallOptions, options)
    return requests.query(vision_service_pb2.QueryRequest, "what?", None, (), given).constraint


def test_each_constraint_is_a_kind_of_its_message():
    assert constraint() == generation_pb2.Constraint()
    choices = generation_pb2.Choices(values=["a", "b"])
    assert constraint(choices=["a", "b"]) == generation_pb2.Constraint(choices=choices)
    assert constraint(regex="a+") == generation_pb2.Constraint(regex="a+")
    assert constraint(json_schema="{}") == generation_pb2.Constraint(json_schema="{}")
    schema = '{"b": 1, "a": [true]}'
    assert constraint(json_schema={"b": 1, "a": [True]}) == generation_pb2.Constraint(json_schema=schema)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"choices": ["a"], "regex": "a"}, "regex"),
        ({"choices": ["a"], "regex": "a", "json_schema": {}}, "regex"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"choices": "yes"}, "choices"),
        ({"choices": [1]}, "choices"),
        ({"regex": 1}, "regex"),
        ({"json_schema": {"const": object()}}, "json_schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema"),
    ],
)
def test_a_wrong_constraint_is_named(given: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        constraint(**given)
    assert [violation.field for violation in caught.value.violations] == [field]
