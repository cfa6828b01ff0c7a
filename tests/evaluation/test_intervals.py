"""Intervals: they repeat, they know pictures, and they need two of them."""

import math

from kestrel_grpc.evaluation.intervals import NUM_RESAMPLES, bootstrap_intervals, mean_interval


def test_equal_values_leave_no_doubt():
    assert mean_interval([0.5] * 10, [str(number) for number in range(10)]) == (0.5, 0.5)


def test_the_interval_of_independent_answers_is_that_of_a_share():
    values = [1.0] * 60 + [0.0] * 40
    interval = mean_interval(values, [str(number) for number in range(100)])
    assert interval is not None
    half = 1.96 * math.sqrt(0.6 * 0.4 / 100)  # the normal approximation
    assert abs(interval[0] - (0.6 - half)) < 0.03
    assert abs(interval[1] - (0.6 + half)) < 0.03
    assert mean_interval(values, [str(number) for number in range(100)]) == interval


def test_answers_about_one_picture_count_as_one_sample():
    """Two pictures, one all right and one all wrong: fifty answers about each tell no more than one."""
    assert mean_interval([1.0] * 50 + [0.0] * 50, ["right"] * 50 + ["wrong"] * 50) == (0.0, 1.0)


def test_one_picture_has_no_interval():
    assert mean_interval([1.0, 0.0], ["same", "same"]) is None


def test_each_resample_has_as_many_pictures_as_the_set():
    totals: list[float] = []

    def statistics(weights):
        totals.append(float(weights.sum()))
        return [math.nan, totals[-1]]

    assert bootstrap_intervals(statistics, 5) == [None, (5.0, 5.0)]
    assert totals == [5.0] * NUM_RESAMPLES
