"""When refusals are told, on a clock of the test's own."""

import asyncio

import pytest

from kestrel_grpc.calls.refusals import Refusals


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_refusals_of_a_connection_are_told_at_once_and_further_ones_at_a_rate():
    clock = Clock()
    refusals = Refusals(clock)
    delays = [refusals.delay_s("1.2.3.4:5") for _ in range(60)]
    assert delays[:50] == [0.0] * 50
    assert delays[50:] == pytest.approx([number / 5 for number in range(1, 11)])
    assert refusals.delay_s("1.2.3.4:6") == 0.0, "another connection"
    clock.now = 60.0
    assert refusals.delay_s("1.2.3.4:5") == 0.0


def test_refusals_of_a_token_have_a_bucket_of_their_own_and_wait_for_a_second_at_most():
    clock = Clock()
    refusals = Refusals(clock)
    delays = [refusals.token_delay_s("mallory") for _ in range(1000)]
    assert delays[:200] == [0.0] * 200
    assert delays[200:300] == pytest.approx([number / 100 for number in range(1, 101)])
    assert max(delays) == pytest.approx(1.0)
    assert refusals.token_delay_s("alice") == refusals.delay_s("mallory") == 0.0
    clock.now = 60.0
    assert refusals.token_delay_s("mallory") == 0.0


def test_no_refusal_waits_longer_than_ten_seconds():
    refusals = Refusals(Clock())
    assert max(refusals.delay_s("1.2.3.4:5") for _ in range(10_000)) == pytest.approx(10.0)


def test_connections_that_each_make_few_wait_together():
    refusals = Refusals(Clock())
    delays = [refusals.delay_s(f"1.2.3.4:{number}") for number in range(700)]
    assert delays[:500] == [0.0] * 500
    assert delays[-1] == pytest.approx(1.0)


def test_an_answer_fills_the_bucket_of_a_connection():
    refusals = Refusals(Clock())
    for _ in range(60):
        refusals.delay_s("1.2.3.4:5")
    refusals.reset("1.2.3.4:5")
    assert refusals.delay_s("1.2.3.4:5") == 0.0


def test_what_is_kept_of_connections_is_bounded():
    refusals = Refusals(Clock())
    for number in range(10_000):
        refusals.delay_s(f"1.2.3.4:{number}")
    assert len(refusals.connections) == 4096


async def test_closing_ends_the_delays_that_there_are():
    refusals = Refusals()
    for _ in range(60):
        refusals.delay_s("1.2.3.4:5")
    held = asyncio.create_task(refusals.hold("1.2.3.4:5"))
    await asyncio.sleep(0)
    assert not held.done()
    refusals.close()
    await held
    await refusals.hold("1.2.3.4:5")
