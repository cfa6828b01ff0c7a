"""The planned time of a server that waits and computes nothing."""

import heapq
import itertools
from collections.abc import Callable

import pytest

from bench.harness.delayed_server import ANSWER_S, KNOWN_S, MAX_AT_ONCE, NEW_S, STEP_S, Device


class Clock:
    """Time that passes from one call to the next; each is late by some time."""

    def __init__(self, lag_s: float) -> None:
        self.now_s = 0.0
        self._lag_s = lag_s
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (when_s, next(self._numbers), call))

    def run(self, until_s: float) -> None:
        while self._calls and self._calls[0][0] + self._lag_s <= until_s:
            when_s, _, call = heapq.heappop(self._calls)
            self.now_s = max(self.now_s, when_s + self._lag_s)
            call()
        self.now_s = until_s


@pytest.mark.parametrize("lag_s", [0.0, 0.5])
def test_requests_are_answered_in_full_steps_which_a_late_processor_does_not_delay(lag_s: float):
    clock = Clock(lag_s)
    device = Device(10.0, clock.time, clock.call_at)
    answers = [device.submit(NEW_S) for _ in range(2 * MAX_AT_ONCE + 1)]
    first_s = 10 * (STEP_S + NEW_S)  # the first request came to a server without work
    step_s = 10 * (STEP_S + MAX_AT_ONCE * NEW_S)
    for num_answered, end_s in (
        (1, first_s),
        (1 + MAX_AT_ONCE, first_s + step_s),
        (len(answers), first_s + 2 * step_s),
    ):
        answered_s = end_s + 10 * ANSWER_S + lag_s
        clock.run(answered_s - 1e-6)
        assert sum(answer.is_set() for answer in answers) < num_answered
        clock.run(answered_s + 1e-6)
        assert sum(answer.is_set() for answer in answers) == num_answered


def test_a_known_image_takes_less():
    clock = Clock(0.0)
    device = Device(1.0, clock.time, clock.call_at)
    answer = device.submit(KNOWN_S)
    clock.run(STEP_S + KNOWN_S + ANSWER_S)
    assert answer.is_set()
