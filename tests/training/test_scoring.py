from collections import Counter

import pytest

from training import scoring

UNIT = [[(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]]
HOLE = [(0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.25, 0.75)]


def test_an_interval_of_nothing_says_nothing():
    assert scoring.interval(0, 0) == (0.0, 1.0)


def test_an_interval_holds_the_share_and_shrinks_with_evidence():
    few, many = scoring.interval(9, 10), scoring.interval(900, 1000)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]
    assert many == pytest.approx((0.8799, 0.9171), abs=1e-3)


def test_the_interval_of_a_mean_is_two_standard_errors_wide():
    low, high = scoring.mean_interval([0.0, 1.0] * 50)
    assert (low, high) == pytest.approx((0.5 - 0.0985, 0.5 + 0.0985), abs=1e-3)


@pytest.mark.parametrize("answer", ["Red.", "  red", "the RED", "a red", '"red"'])
def test_answers_compare_without_what_wordings_differ_in(answer: str):
    assert scoring.normalised(answer) == "red"


def test_grey_is_gray():
    assert scoring.normalised("Grey") == "gray"


def test_boxes_overlap_by_shared_over_joint_area():
    assert scoring.box_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert scoring.box_iou((0, 0, 1, 1), (2, 2, 3, 3)) == 0


def test_a_true_box_is_found_once_and_by_the_best():
    truth = [(0.0, 0.0, 1.0, 1.0)]
    assert scoring.matched([(0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 0.9)], truth, 0.5) == 1
    assert scoring.matched([(0.0, 0.0, 1.0, 0.4)], truth, 0.5) == 0


def test_precision_falls_with_false_boxes_and_with_missed_ones():
    assert scoring.average_precision(2, 2, 2) == 1
    assert scoring.average_precision(2, 4, 2) == 0.5
    assert scoring.average_precision(1, 1, 2) == 0.5
    assert scoring.average_precision(0, 0, 2) == 0


def test_outlines_overlap_as_areas_do():
    half = [[(0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0)]]
    assert scoring.outline_iou(UNIT, UNIT) == 1
    assert scoring.outline_iou(UNIT, half) == pytest.approx(0.5, abs=0.01)
    assert scoring.outline_iou(UNIT, []) == 0


def test_a_contour_within_a_contour_is_a_hole():
    assert scoring.outline_iou(UNIT, [*UNIT, HOLE]) == pytest.approx(0.75, abs=0.02)
    assert scoring.contains([*UNIT, HOLE], 0.1, 0.1)
    assert not scoring.contains([*UNIT, HOLE], 0.5, 0.5)


def test_descriptions_are_counted_by_colour_and_noun():
    text = "Two red circles, a small grey star, the word RED and three green crosses."
    found = scoring.inventory(text, ("red", "gray", "green"), ("circle", "star", "cross"))
    assert found == Counter({"red circle": 2, "gray star": 1, "green cross": 3})


def test_multisets_share_what_both_have():
    assert scoring.shared_count(Counter(a=2, b=1), Counter(a=1, c=4)) == 1
