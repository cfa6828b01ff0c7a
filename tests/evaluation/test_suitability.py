"""Warnings about prompts that do not suit the model or the metric, by the answers."""

from collections.abc import Sequence

import pytest

from kestrel_grpc.evaluation.suitability import object_warnings, question_warnings
from kestrel_grpc.evaluation.tasks import Answer

TRUTHS = (["12"], ["Red"], ["blue sky", "sky"], ["45%"])


def warnings_of(texts: Sequence[str], scores: Sequence[float] = (0.0,) * 4, *, is_cut: bool = False) -> list[str]:
    return [*question_warnings("ANLS", [Answer(text, is_cut=is_cut) for text in texts], TRUTHS, scores)]


@pytest.mark.parametrize(
    ("texts", "warning"),
    [
        (["", "red", "", "45%"], "2 of 4 answers are empty"),
        (["yes", "Yes.", "YES", "yes"], "4 of 4 answers are the same, 'yes', and the expected ones are not"),
        (["12", "It is red.", "The blue sky", "45%"], "2 of 4 answers have the expected one within a longer text"),
        (
            ["It is about nine", "I see a green thing", "There is a cloud here", "It is half of it"],
            "answers have 5 words, the expected ones 1 (medians), and ANLS compares whole texts",
        ),
    ],
)
def test_answers_that_show_an_unsuitable_prompt_are_named(texts: list[str], warning: str):
    (found,) = warnings_of(texts)
    assert found.startswith(warning)
    assert found.endswith("--prompt sets another prompt")


@pytest.mark.parametrize(
    "texts", [["13", "green", "cloud", "45"], ["12", "Red.", "sky", "45 %"], ["12", "a", "b", "c"]]
)
def test_wrong_answers_of_the_right_form_are_no_reason_to_warn(texts: list[str]):
    assert warnings_of(texts) == []


def test_right_answers_and_equal_truths_are_no_reason_to_warn():
    assert warnings_of(["the 12 of", "red", "sky", "45%"], [1.0] * 4) == []
    assert [*question_warnings("ANLS", [Answer("no")] * 3, [["No"]] * 3, [1.0] * 3)] == []


def test_answers_that_the_limit_ended_are_named():
    (found,) = warnings_of(["12", "red", "sky", "45%"], [1.0] * 4, is_cut=True)
    assert found == "4 of 4 answers were ended by their limit; --max-tokens sets a higher one"


def test_failed_calls_and_few_answers_show_nothing():
    assert [*question_warnings("ANLS", [Answer(error="gone")] * 4, TRUTHS, [0.0] * 4)] == []
    assert [*question_warnings("ANLS", [Answer("")] * 2, TRUTHS[:2], [0.0] * 2)] == []


def test_a_set_of_which_nothing_is_found_is_named():
    assert [*object_warnings([Answer()] * 3)] == [
        "none of 3 answers has an object: the model may not know the objects of this set"
    ]
    assert [*object_warnings([Answer(), Answer(), Answer(points=((0.5, 0.25),))])] == []
    assert [*object_warnings([Answer(), Answer(), Answer(boxes=((0.0, 0.0, 0.5, 0.25),))])] == []
    assert [*object_warnings([Answer(error="gone")] * 3)] == []
