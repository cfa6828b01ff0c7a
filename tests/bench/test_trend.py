"""Straight lines through curves."""

import math

import pytest

from bench.harness.trend import Trend, means, median_slope


def test_a_straight_line_is_found_without_error():
    trend = Trend.of([(x, 3.0 - 0.5 * x) for x in range(10)])
    assert trend is not None
    assert trend.slope == pytest.approx(-0.5)
    assert trend.standard_error == pytest.approx(0.0, abs=1e-9)


def test_the_error_is_that_of_the_textbook():
    trend = Trend.of([(0.0, 0.0), (1.0, 3.0), (2.0, 0.0)])
    assert trend is not None
    assert trend.slope == pytest.approx(0.0)
    assert trend.standard_error == pytest.approx(math.sqrt(6 / 1 / 2))


def test_two_points_tell_nothing_of_their_error():
    assert Trend.of([(0.0, 0.0), (1.0, 1.0)]) is None


def test_a_step_moves_no_median_of_slopes():
    assert median_slope([(x, 7.0 if x >= 8 else 5.0) for x in range(10)]) == 0.0
    assert median_slope([(x, 0.5 * x + (100.0 if x == 4 else 0.0)) for x in range(10)]) == pytest.approx(0.5)
    assert median_slope([(0.0, 0.0), (1.0, 1.0)]) is None


def test_neighbours_become_one_point():
    assert means([(0.0, 1.0), (9.0, 3.0), (10.0, 7.0)], 10.0) == [(4.5, 2.0), (10.0, 7.0)]
