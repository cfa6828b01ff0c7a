"""What recordings amount to."""

from array import array

import pytest

from bench.harness.summary import Row, summarise
from kestrel_grpc.cli.bench.loops import Sample, Window
from kestrel_grpc.cli.bench.numbers import Objective
from kestrel_grpc.cli.bench.processes import Recording

OBJECTIVE = Objective(first_token_ms=500.0, per_token_ms=100.0)


def answer(started: float, ended: float, *arrivals: float, num_tokens: int = 3, error: str = "") -> Sample:
    return Sample(started, ended, num_tokens, array("d", arrivals or (ended,)), error)


def row_of(*samples: Sample, is_open: bool = False) -> Row:
    recording = Recording(Window(0.0, 10.0), samples, 0.25, 1.5)
    return summarise("direct", 4, recording, 3, OBJECTIVE, is_open=is_open)


def test_a_request_counts_by_its_part_in_the_window():
    row = row_of(answer(-1.0, 1.0), answer(2.0, 3.0), answer(9.0, 13.0))
    assert row.requests_per_s == pytest.approx((0.5 + 1.0 + 0.25) / 10)
    assert row.tokens_per_s == pytest.approx(3 * 1.75 / 10)


def test_percentiles_are_of_the_requests_that_began_in_the_window():
    row = row_of(answer(-5.0, 1.0), answer(2.0, 3.0))
    assert row.num_requests == 1
    assert row.total_ms["p50"] == pytest.approx(1000)


def test_a_window_within_one_answer_takes_what_it_has():
    row = row_of(answer(-5.0, 15.0))
    assert row.num_requests == 1
    assert row.requests_per_s == pytest.approx(1 / 20)


def test_tokens_that_came_with_the_first_piece_took_no_time_after_it():
    sample = Sample(1.0, 1.5, 5, array("d", (1.2, 1.5)), num_first_tokens=2)
    assert row_of(sample).per_token_ms["p50"] == pytest.approx(100)


def test_only_answers_within_the_objective_are_good():
    in_time = answer(0.0, 1.0, 0.5, 0.55, num_tokens=6)
    late_start = answer(0.0, 1.0, 0.6, num_tokens=6)
    slow = answer(0.0, 1.0, 0.4, num_tokens=3)
    row = row_of(in_time, late_start, slow)
    assert row.requests_per_s == pytest.approx(0.3)
    assert row.goodput_per_s == pytest.approx(0.1)


def test_in_an_open_loop_what_was_sent_in_the_window_is_good_wherever_it_ends():
    row = row_of(answer(9.7, 10.1), answer(9.8, 10.9), is_open=True)
    assert row.goodput_per_s == pytest.approx(0.1)


def test_failures_are_counted_by_name_and_earn_nothing():
    row = row_of(answer(0.0, 1.0), answer(0.0, 1.0, error="UNAVAILABLE"), answer(0.0, 1.0, error="UNAVAILABLE"))
    assert row.errors == {"UNAVAILABLE": 2}
    assert row.requests_per_s == pytest.approx(0.1)
