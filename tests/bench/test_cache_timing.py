"""The timing attack: its statistic is right, and trials hit where they should and nowhere else. Judges no times."""

from __future__ import annotations

import pytest

from bench.cache_timing import area_under_curve, served, summary, trials


@pytest.mark.parametrize(
    ("known", "unknown", "area"),
    [
        ([1.0, 2.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 4.0], [2.0, 3.0], 0.5),
        ([1.0, 3.0], [2.0, 4.0], 0.75),
        ([1.0, 1.0], [1.0], 0.5),
        ([1.0], [1.0, 2.0, 2.0, 0.5], (0.5 + 1 + 1 + 0) / 4),
    ],
)
def test_the_area_is_the_share_of_pairs_in_which_the_known_one_is_shorter(
    known: list[float], unknown: list[float], area: float
) -> None:
    assert area_under_curve(known, unknown) == pytest.approx(area)


def test_only_within_one_namespace_an_image_that_the_victim_has_asked_about_is_cached() -> None:
    with served() as callers:
        found = trials(callers, num_across=30, num_within=30, seed=1)
    across, within = (
        summary([item for item in found if item.shares_namespace is shares]) for shares in (False, True)
    )
    assert across["trials"] == within["trials"] == 30
    assert 0 < across["known"] < 30
    assert across["hits_known"] == across["hits_unknown"] == within["hits_unknown"] == 0
    assert within["hits_known"] == within["known"] > 0
