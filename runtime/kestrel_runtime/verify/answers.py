"""Converts calls and answers of `expected.json` to requests and from outputs, and compares answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Location,
    Output,
    PointOutput,
    QueryOutput,
    SegmentOutput,
)
from kestrel_runtime.api.requests import (
    BoxRef,
    Caption,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    SamplingParams,
    Segment,
    SpatialRef,
)

_COORDINATE_TOLERANCE = 1e-5
_SCORES = "scores"
"""The name of the scores of points and boxes, which only some fixtures have."""
_SCORE_TOLERANCE, _SCORE_SHARE = 1.5e-4, 1e-2
"""Scores may differ by this and by this share of them: they are rounded to four digits, and sharp logits multiply
the errors of float32."""


def request_of(call: dict[str, Any], data: bytes | None, max_tokens: int) -> Request:
    """Returns the greedy request of a call about the image `data`."""
    args, greedy = call["args"], SamplingParams(temperature=0.0, max_tokens=max_tokens)
    refs = tuple(_spatial_ref(ref) for ref in args.get("spatial_refs", ()))
    if call["skill"] == "query":
        return Query(args["question"], data, args["reasoning"], refs, greedy)
    assert data is not None, "only queries go without an image"
    if call["skill"] == "caption":
        return Caption(data, args["length"], greedy)
    if call["skill"] == "gaze":
        return Gaze(data, PointRef(*args["eye"]), SamplingParams(temperature=0.0))
    kinds = {"point": Point, "detect": Detect, "segment": Segment}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens if call["skill"] == "segment" else None)
    return kinds[call["skill"]](args["object"], data, args.get("max_objects"), refs, sampling)


def _spatial_ref(sides: list[float]) -> SpatialRef:
    return PointRef(*sides) if len(sides) == 2 else BoxRef(*sides)


def answer_of(output: Output) -> dict[str, Any]:
    """Returns an output in the form of `expected.json`."""
    if isinstance(output, QueryOutput):
        plain: dict[str, Any] = {"answer": output.answer}
        if output.reasoning is not None:
            grounding = [
                {
                    "start_idx": item.start_char,
                    "end_idx": item.end_char,
                    "points": [[p.x, p.y] for p in item.points],
                }
                for item in output.reasoning.groundings
            ]
            plain["reasoning"] = {"text": output.reasoning.text, "grounding": grounding}
        return plain
    if isinstance(output, CaptionOutput):
        return {"caption": output.caption}
    if isinstance(output, PointOutput):
        return {"points": [_sides(point) for point in output.points], **_scores(output)}
    if isinstance(output, DetectOutput):
        return {"objects": [_sides(box) for box in output.boxes], **_scores(output)}
    assert isinstance(output, SegmentOutput), "fixtures have no calls of other skills"
    return {"segments": [{"svg_path": item.svg_path, "bbox": _sides(item.box)} for item in output.segments]}


def _scores(output: PointOutput | DetectOutput) -> dict[str, Any]:
    return {_SCORES: list(output.scores)} if output.scores else {}


def _sides(place: Location | Box) -> dict[str, float]:
    return {name: getattr(place, name) for name in type(place).__struct_fields__}


def answer_differs(actual: Any, expected: Any) -> str | None:
    """Returns a message with both answers if they differ by more than rounding, else None.

    Scores are compared where the expected answer has some.
    """
    same = _matches(actual, expected)
    return None if same else f"expected {json.dumps(expected)}, got {json.dumps(actual)}"


def _matches(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() - {_SCORES} == expected.keys() - {_SCORES}
            and _scores_match(actual.get(_SCORES, []), expected.get(_SCORES))
            and all(_matches(actual[key], value) for key, value in expected.items() if key != _SCORES)
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_matches, actual, expected))
    if isinstance(expected, float):  # the reference leaves boxes unclipped
        return abs(actual - min(max(expected, 0.0), 1.0)) <= _COORDINATE_TOLERANCE
    return actual == expected


def _scores_match(actual: list[float], expected: list[float] | None) -> bool:
    return expected is None or (
        len(actual) == len(expected)
        and all(
            abs(one - other) <= _SCORE_TOLERANCE + _SCORE_SHARE * other
            for one, other in zip(actual, expected, strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of answers with those of a reference."""

    num_answers: int
    num_equal: int
    point_distance: float | None
    """The mean distance of the reference's points to the nearest point of the answer, as a fraction of the image's
    sides; 1 if the answer has no point. None if the reference has no points."""
    box_overlap: float | None
    """The mean intersection over union of the reference's boxes with the best box of the answer; None without
    boxes."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Agreement:
        """Returns the agreement of pairs (answer, expected)."""
        pairs = list(pairs)
        distances, overlaps = [], []
        for answer, expected in pairs:
            found = answer.get("points", [])
            distances += [
                min((math.dist(_point(point), _point(other)) for other in found), default=1.0)
                for point in expected.get("points", [])
            ]
            found = answer.get("objects", [])
            overlaps += [
                max((_overlap(_box(box), _box(other)) for other in found), default=0.0)
                for box in expected.get("objects", [])
            ]
        return cls(
            num_answers=len(pairs),
            num_equal=sum(answer_differs(answer, expected) is None for answer, expected in pairs),
            point_distance=sum(distances) / len(distances) if distances else None,
            box_overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        )


def _point(place: Mapping[str, float]) -> tuple[float, float]:
    return place["x"], place["y"]


def _box(sides: Mapping[str, float]) -> tuple[float, float, float, float]:
    x_min, y_min, x_max, y_max = (min(max(sides[name], 0.0), 1.0) for name in Box.__struct_fields__)
    return x_min, y_min, x_max, y_max


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    both = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - shared
    return shared / both if both > 0 else float(one == other)
