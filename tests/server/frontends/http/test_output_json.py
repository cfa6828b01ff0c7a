"""Results of the engine as JSON, byte for byte."""

import json

import pytest

from kestrel_grpc.frontends.http.output_json import (
    FINISH_REASONS,
    large_json,
    objects,
    pairs,
    result,
    sent_event,
    to_json,
)
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    FinishReason,
    Grounding,
    Location,
    PointOutput,
    QueryOutput,
    Reasoning,
)

PLACE = Location(0.5, 0.25)
THOUGHT = Reasoning("A bird.", (Grounding(2, 6, (PLACE,)),))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (QueryOutput("a kestrel", None), b'{"answer":"a kestrel"}'),
        (
            QueryOutput("a kestrel", THOUGHT),
            b'{"answer":"a kestrel","reasoning":{"text":"A bird.",'
            b'"grounding":[{"start_idx":2,"end_idx":6,"points":[[0.5,0.25]]}]}}',
        ),
        (CaptionOutput("a kestrel"), b'{"caption":"a kestrel"}'),
        (PointOutput((PLACE,)), b'{"points":[{"x":0.5,"y":0.25}]}'),
        (
            DetectOutput((Box(0.125, 0.25, 0.5, 0.75),)),
            b'{"objects":[{"x_min":0.125,"y_min":0.25,"x_max":0.5,"y_max":0.75}]}',
        ),
    ],
)
def test_results_as_json(output: QueryOutput | CaptionOutput | PointOutput | DetectOutput, expected: bytes):
    assert to_json(result(output, objects, pairs)) == expected


def test_points_are_objects_or_pairs():
    assert objects([PLACE]) == [{"x": 0.5, "y": 0.25}]
    assert pairs([PLACE]) == [(0.5, 0.25)]


def test_objects_have_their_scores_and_pairs_have_them_next_to_them():
    places, scores = (PLACE, Location(1.0, 0.0)), (0.5, 0.0)
    boxes = result(DetectOutput((Box(0.0, 0.25, 0.5, 1.0),), (0.75,)), pairs, pairs)
    assert boxes == {"objects": [{"x_min": 0.0, "y_min": 0.25, "x_max": 0.5, "y_max": 1.0, "score": 0.75}]}
    points = result(PointOutput(places, scores), objects, pairs)
    assert points == {"points": [{"x": 0.5, "y": 0.25, "score": 0.5}, {"x": 1.0, "y": 0.0, "score": 0.0}]}
    assert result(PointOutput(places, scores), pairs, pairs) == {
        "points": [(0.5, 0.25), (1.0, 0.0)],
        "scores": [0.5, 0.0],
    }


def test_text_is_sent_as_utf_8_and_half_a_surrogate_pair_as_a_question_mark():
    assert to_json({"chunk": "\u9e1f\n"}) == '{"chunk":"\u9e1f\\n"}'.encode()
    assert to_json({"chunk": "\ud83d"}) == b'{"chunk":"?"}'


def test_an_event_is_one_line_of_data():
    assert sent_event({"chunk": "a\n\nb"}) == b'data: {"chunk":"a\\n\\nb"}\n\n'


def test_every_finish_reason_has_a_name():
    assert FINISH_REASONS.keys() == set(FinishReason)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_have_are_refused(number: float):
    for facts in (number, {"logprob": number}, {"objects": [{"x_min": number}]}, [[1.0, number]]):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(facts)


@pytest.mark.parametrize(
    "make",
    [
        dict,
        list,
        lambda: {"a": [], "b": {}, "c": iter(()), "d": None, "e": ()},
        lambda: {"tokens": iter(range(100)), "nested": [{"tops": iter("é\ud800")}, (iter([{"x": 1.5}]), "y")]},
        lambda: [iter(range(length)) for length in (1, 15, 16, 17, 32, 33)],
        lambda: "text",
    ],
)
def test_a_large_answer_is_encoded_as_any_other(make):
    assert large_json(make()) == to_json(make())
    assert json.loads(large_json(make())) == json.loads(to_json(make()))


def test_large_answers_have_no_numbers_that_json_lacks():
    with pytest.raises(ValueError, match="JSON"):
        large_json({"tokens": iter([1.0, float("nan")])})
