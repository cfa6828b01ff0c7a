"""How near answers are to those of a reference."""

import pytest

from kestrel_runtime.api.events import Location, PointOutput
from kestrel_runtime.verify.answers import Agreement, answer_differs, answer_of


def test_scores_are_compared_where_they_are_expected():
    found = answer_of(PointOutput((Location(0.25, 0.5), Location(0.5, 0.5)), (0.5, 0.0021)))
    assert found["scores"] == [0.5, 0.0021]
    places = {"points": found["points"]}
    assert answer_differs(found, places) is None
    assert answer_differs(found, {**places, "scores": [0.5001, 0.0022]}) is None
    for scores in ([0.5, 0.003], [0.51, 0.0021], [0.5], []):
        assert answer_differs(found, {**places, "scores": scores}) is not None
    assert answer_differs(answer_of(PointOutput(())), {"points": [], "scores": []}) is None
    assert answer_differs(places, {**places, "scores": [0.5, 0.0021]}) is not None


def test_distances_and_overlaps_are_those_of_the_nearest_results():
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
