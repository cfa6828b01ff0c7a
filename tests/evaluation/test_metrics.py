"""The metrics, on cases that were computed by hand from their published definitions."""

import pytest

from kestrel_grpc.evaluation.metrics import (
    edit_distance,
    is_in_box,
    is_in_polygons,
    normalised_for_vqa,
    normalised_levenshtein_similarity,
    relaxed_accuracy,
    vqa_accuracy,
)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("95", "100", 1.0),  # 5 % less
        ("105.0", "100", 1.0),
        ("94.9", "100", 0.0),
        ("105.1", "100", 0.0),
        ("-10", "10", 0.0),
        ("-10.4", "-10", 1.0),
        ("0.57", "0.6", 1.0),  # the bound itself, which floats miss by a rounding
        ("12%", "0.12", 1.0),
        ("12 %", "12.4%", 1.0),
        ("12", "12%", 0.0),
        ("0.01", "0", 0.0),
        ("0.0", "0", 1.0),
        ("Yes ", "yes", 1.0),
        ("yes.", "yes", 0.0),
        ("1,000", "1,000", 1.0),
        ("1,000", "1,001", 0.0),  # texts
        ("nan", "nan", 1.0),
        ("2e3", "2000", 1.0),
    ],
)
def test_relaxed_accuracy_takes_five_percent_of_a_number_and_equal_texts(answer: str, truth: str, expected: float):
    assert relaxed_accuracy(answer, truth) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A Red, Red Rose.", "red red rose"),
        ("3.50 dollars.", "3.50 dollars"),
        ("100,978", "100978"),
        ("2:50 pm", "2:50 pm"),
        ("girl's", "girl's"),
        ("dont", "don't"),
        ("its", "its"),
        ("Two and ten", "2 and 10"),
        ("t-shirt/shirt", "t shirt shirt"),
        ("the", ""),
    ],
)
def test_texts_are_normalised_as_the_page_of_vqa_says(text: str, expected: str):
    assert normalised_for_vqa(text) == expected


@pytest.mark.parametrize(
    ("num_equal", "expected"),
    [
        # Leave one of ten people out: of the nine others, min(equal ones / 3, 1).
        (0, 0.0),
        (1, (9 * (1 / 3) + 1 * 0) / 10),
        (2, (8 * (2 / 3) + 2 * (1 / 3)) / 10),
        (3, (7 * 1 + 3 * (2 / 3)) / 10),
        (4, 1.0),
        (10, 1.0),
    ],
)
def test_vqa_accuracy_is_the_mean_over_all_people_but_one(num_equal: int, expected: float):
    truths = ["Three."] * num_equal + [f"other {number}" for number in range(10 - num_equal)]
    assert vqa_accuracy("the 3", truths) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "truths", "expected"),
    [
        ("Kitten ", ["kitten"], 1.0),
        ("sitting", ["kitten"], 1 - 3 / 7),
        ("sitting", ["kitten", "sittin"], 1 - 1 / 7),
        ("ab", ["cb"], 0.0),  # half of the letters: the bound
        ("abc", ["xbc"], 1 - 1 / 3),
        ("", ["a"], 0.0),
        ("a  b", ["A b"], 1.0),
    ],
)
def test_anls_is_the_similarity_to_the_nearest_truth_above_one_half(
    answer: str, truths: list[str], expected: float
):
    assert normalised_levenshtein_similarity(answer, truths) == pytest.approx(expected)


def test_the_edit_distance_counts_each_kind_of_edit():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("abc", "abc") == 0


def test_a_point_counts_within_the_box_and_within_one_of_the_outlines():
    box = (0.2, 0.2, 0.6, 0.6)
    assert is_in_box(0.2, 0.6, box)
    assert not is_in_box(0.19, 0.4, box)
    ell = [(0.0, 0.0), (0.6, 0.0), (0.6, 0.2), (0.2, 0.2), (0.2, 0.6), (0.0, 0.6)]
    island = [(0.8, 0.8), (0.9, 0.8), (0.9, 0.9), (0.8, 0.9)]
    inside = [(0.5, 0.1), (0.1, 0.5), (0.85, 0.85)]
    outside = [(0.4, 0.4), (0.7, 0.1), (0.95, 0.85)]
    assert [is_in_polygons(x, y, [ell, island]) for x, y in inside + outside] == [True] * 3 + [False] * 3
