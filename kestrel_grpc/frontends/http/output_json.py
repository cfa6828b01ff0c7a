"""What frontends whose answers are JSON have in common: results of the engine as JSON. Knows no call and no route.

Triton's frontend uses it too: the output tensor of its responses holds JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    FinishReason,
    Location,
    PointOutput,
    QueryOutput,
    Reasoning,
)

FINISH_REASONS: Mapping[FinishReason, str] = MappingProxyType(
    {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.MAX_OBJECTS: "max_objects",
        FinishReason.STOP_SEQUENCE: "stop_sequence",
    }
)
Points = Callable[[Iterable[Location]], list[Any]]
"""The format of points: `pairs` or `objects`."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(facts: Any) -> bytes:
    """JSON without spaces, in UTF-8; half of a surrogate pair becomes a question mark."""
    return _encode(facts).encode(errors="replace")


def sent_event(facts: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % to_json(facts)


def result(
    output: QueryOutput | CaptionOutput | PointOutput | DetectOutput, points: Points, grounding_points: Points
) -> dict[str, Any]:
    """What a skill has found. `grounding_points` is the format of the points in a reasoning."""
    if isinstance(output, QueryOutput):
        if output.reasoning is None:
            return {"answer": output.answer}
        reasoning = {"text": output.reasoning.text, **grounding(output.reasoning, grounding_points)}
        return {"answer": output.answer, "reasoning": reasoning}
    if isinstance(output, CaptionOutput):
        return {"caption": output.caption}
    if isinstance(output, PointOutput):
        return {"points": points(output.points)}
    return {"objects": [box(found) for found in output.boxes]}


def grounding(reasoning: Reasoning, points: Points) -> dict[str, Any]:
    """The points that parts of a reasoning speak of."""
    return {
        "grounding": [
            {"start_idx": item.start_char, "end_idx": item.end_char, "points": points(item.points)}
            for item in reasoning.groundings
        ]
    }


def objects(locations: Iterable[Location]) -> list[dict[str, float]]:
    """Points as objects."""
    return [{"x": location.x, "y": location.y} for location in locations]


def pairs(locations: Iterable[Location]) -> list[tuple[float, float]]:
    """Points as lists of two numbers."""
    return [(location.x, location.y) for location in locations]


def box(box: Box) -> dict[str, float]:
    """A box."""
    return {"x_min": box.x_min, "y_min": box.y_min, "x_max": box.x_max, "y_max": box.y_max}
