"""Tokens count for five seconds."""

import pytest

from kestrel_runtime.scheduling.token_rate import TokenRate


def test_only_the_last_seconds_count() -> None:
    rate = TokenRate()
    rate.add(100.0, 10)
    rate.add(103.0, 20)
    assert rate.per_second(104.0) == pytest.approx(6.0)
    assert rate.per_second(106.0) == pytest.approx(4.0)
    assert rate.per_second(200.0) == 0.0
    rate.add(200.0, 5)
    assert rate.per_second(200.0) == pytest.approx(1.0)
