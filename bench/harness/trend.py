"""Whether a curve rises: by a straight line, and how far its slope is to be trusted, or by the median of slopes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median

MIN_POINTS = 3
"""Through fewer a line tells nothing of its own error."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope, in units of y per unit of x, and its standard error."""

    slope: float
    standard_error: float

    @staticmethod
    def of(points: Sequence[tuple[float, float]]) -> Trend | None:
        """The trend of points (x, y) whose errors are independent; None for fewer than `MIN_POINTS`."""
        if len(points) < MIN_POINTS:
            return None
        xs, ys = zip(*points, strict=True)
        slope, intercept = linear_regression(xs, ys)
        middle = fmean(xs)
        spread = sum((x - middle) ** 2 for x in xs)
        rest = sum((y - intercept - slope * x) ** 2 for x, y in points)
        return Trend(slope, math.sqrt(rest / (len(points) - 2) / spread))


def median_slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The median of the slopes between any two points (Theil and Sen), which a single step does not move.

    None for fewer than `MIN_POINTS`. No two points may have the same x.
    """
    if len(points) < MIN_POINTS:
        return None
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))


def means(points: Sequence[tuple[float, float]], width: float) -> list[tuple[float, float]]:
    """One mean point for each stretch of `width` along x: neighbours in time err alike, such means less so."""
    stretches: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        stretches.setdefault(math.floor(x / width), []).append((x, y))
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in stretches.values()]
