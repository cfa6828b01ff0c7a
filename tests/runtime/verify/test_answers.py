"""How near answers are to those of a reference."""

from __future__ import annotations

import pytest

from kestrel_runtime.verify.answers import Agreement


def test_distances_and_overlaps_are_those_of_the_nearest_results() -> None:
    box = {"x_min": 0.0, "y_min": 0.0, "x_max": 0.5, "y_max": 0.5}
    half = {**box, "x_max": 0.25}
    near = Agreement.of(
        [
            ({"points": [{"x": 0.5, "y": 0.1}, {"x": 0.5, "y": 0.5}]}, {"points": [{"x": 0.5, "y": 0.6}]}),
            ({"points": []}, {"points": [{"x": 0.5, "y": 0.6}]}),
            ({"objects": [half]}, {"objects": [box]}),
            ({"objects": []}, {"objects": [box]}),
            ({"answer": "yes"}, {"answer": "yes"}),
        ]
    )
    assert (near.num_answers, near.num_equal) == (5, 1)
    assert near.point_distance == pytest.approx((0.1 + 1) / 2)
    assert near.box_overlap == pytest.approx((0.5 + 0) / 2)
    assert Agreement.of([]) == Agreement(0, 0, None, None)
