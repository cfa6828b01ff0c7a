"""The eight shapes as outlines over a unit box: dense polygons to draw, and short SVG path words to learn.

A shape has free proportions (a star's depth, a ring's width) and a rotation; both come from a seed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

UNITS_PER_SIDE = 960
STEP = 10
"""Path numbers are multiples of this, so that a small vocabulary spells them."""

# Control points of a quarter circle lie this far along its tangents.
_KAPPA = 0.5522847498


@dataclass(frozen=True, slots=True)
class Outline:
    """A shape's contours over its own box: x and y in [0, 1]. The first contour is solid, a second is a hole.

    `aspect` is the box's width over its height. `mark` is a place well inside the ink.
    """

    contours: tuple[tuple[Point, ...], ...]
    path: tuple[str, ...]
    aspect: float
    mark: Point


def outline(shape: str, rng: random.Random) -> Outline:
    """A shape of random proportions and rotation."""
    return _MAKERS[shape](rng)


def _circle(rng: random.Random) -> Outline:
    return Outline((_ellipse(1.0),), _circle_path(1.0, clockwise=True), 1.0, (0.5, 0.5))


def _ring(rng: random.Random) -> Outline:
    inner = rng.uniform(0.42, 0.86)
    path = _circle_path(1.0, clockwise=True) + _circle_path(inner, clockwise=False)
    return Outline((_ellipse(1.0), _ellipse(inner)), path, 1.0, (0.5, (1 - inner) / 4))


def _square(rng: random.Random) -> Outline:
    angle = 0.0 if rng.random() < 0.5 else rng.uniform(-20, 20)
    return _polygon([(-1, -1), (1, -1), (1, 1), (-1, 1)], angle, (0, 0), start=lambda p: p[0] + p[1])


def _triangle(rng: random.Random) -> Outline:
    height, lean = rng.uniform(0.75, 1.15), rng.choice((0.0, 0.0, 0.0, rng.uniform(-0.5, 0.5)))
    corners = [(lean, -height), (1.0, height), (-1.0, height)]
    angle = rng.uniform(-12, 12) if rng.random() < 0.7 else rng.uniform(-180, 180)
    return _polygon(corners, angle, (lean / 3, height / 3))


def _star(rng: random.Random) -> Outline:
    depth = rng.uniform(0.36, 0.52)
    points = rng.choice((5, 5, 5, 5, 6))
    angle = rng.uniform(-12, 12) if rng.random() < 0.7 else rng.uniform(-180, 180)
    corners = [_polar(1.0 if index % 2 == 0 else depth, -90 + 180 / points * index) for index in range(2 * points)]
    return _polygon(corners, angle, (0, 0))


def _cross(rng: random.Random) -> Outline:
    arm = rng.uniform(0.14, 0.4)
    angle = rng.uniform(-15, 15) if rng.random() < 0.8 else 45 + rng.uniform(-10, 10)
    corners = [
        (-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm),
        (arm, 1), (-arm, 1), (-arm, arm), (-1, arm), (-1, -arm), (-arm, -arm),
    ]  # fmt: skip
    return _polygon(corners, 0.0 if rng.random() < 0.3 else angle, (0, 0))


def _heart(rng: random.Random) -> Outline:
    # The classic curve, stretched a little.
    stretch, plump = rng.uniform(0.9, 1.1), rng.uniform(3.5, 6.0)

    def at(turn: float) -> Point:
        t = 2 * math.pi * turn
        return (
            16 * math.sin(t) ** 3 / 16 * stretch,
            -(13 * math.cos(t) - plump * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16,
        )

    dense = [at(index / 96) for index in range(96)]
    coarse = [at(index / 16) for index in range(16)]
    angle = rng.uniform(-12, 12) if rng.random() < 0.8 else rng.uniform(-60, 60)
    return _polygon(dense, angle, (0, -0.05), words=coarse, start=None)


def _crescent(rng: random.Random) -> Outline:
    # What a disc leaves of another: both arcs meet in the two tips.
    radius, thickness = rng.uniform(0.85, 1.0), rng.uniform(0.4, 0.72)
    shift = radius - 1 + thickness
    x = (1 - radius**2 + shift**2) / (2 * shift)
    tip = math.degrees(math.acos(x))
    inner_tip = math.degrees(math.atan2(math.sin(math.radians(tip)), x - shift))

    def along(outer: int, inner: int) -> list[Point]:
        far = [_polar(1.0, tip + (360 - 2 * tip) * index / outer) for index in range(outer + 1)]
        near = [
            (shift + radius * px, radius * py)
            for px, py in (
                _polar(1.0, 360 - inner_tip - (360 - 2 * inner_tip) * index / inner) for index in range(1, inner)
            )
        ]
        return far + near

    mark = ((-1 + shift - radius) / 2, 0.0)
    angle = rng.choice((0, 0, 180, 180, 90, -90)) + rng.uniform(-30, 30)
    return _polygon(along(60, 60), angle, mark, words=along(10, 8), start=None)


_MAKERS: dict[str, Callable[[random.Random], Outline]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
    "crescent": _crescent,
}
SHAPES = tuple(_MAKERS)
FULL_BOX_PATH = ("M", "0", "0", "L", "960", "0", "960", "960", "0", "960", "Z")


def _polygon(
    corners: Sequence[Point],
    angle: float,
    mark: Point,
    *,
    words: Sequence[Point] | None = None,
    start: Callable[[Point], float] | None = lambda p: 1000 * round(p[1], 2) + p[0],
) -> Outline:
    """Turn, put into the unit box, and spell; spelling begins at the corner with the smallest `start`."""
    turned = [_turn(corner, angle) for corner in corners]
    left, top = (min(p[axis] for p in turned) for axis in (0, 1))
    width, height = (max(p[axis] for p in turned) - low for axis, low in ((0, left), (1, top)))

    def boxed(point: Point) -> Point:
        return (point[0] - left) / width, (point[1] - top) / height

    spelled = [boxed(_turn(corner, angle)) for corner in words or corners]
    if start is not None:
        first = min(range(len(spelled)), key=lambda index: start(spelled[index]))
        spelled = spelled[first:] + spelled[:first]
    numbers = [word for point in spelled for word in map(_word, point)]
    path = ("M", *numbers[:2], "L", *numbers[2:], "Z")
    return Outline((tuple(map(boxed, turned)),), path, width / height, boxed(_turn(mark, angle)))


def _ellipse(radius: float) -> tuple[Point, ...]:
    return tuple((0.5 + x / 2, 0.5 + y / 2) for x, y in (_polar(radius, 360 * index / 72) for index in range(72)))


def _circle_path(radius: float, *, clockwise: bool) -> tuple[str, ...]:
    corners = [(1, 0), (0, 1), (-1, 0), (0, -1)] if clockwise else [(1, 0), (0, -1), (-1, 0), (0, 1)]
    numbers = [corners[0]]
    for here, there in zip(corners, corners[1:] + corners[:1], strict=True):
        numbers += [
            (here[0] + _KAPPA * there[0], here[1] + _KAPPA * there[1]),
            (there[0] + _KAPPA * here[0], there[1] + _KAPPA * here[1]),
            there,
        ]
    words = [_word(0.5 + radius * value / 2) for point in numbers for value in point]
    return ("M", *words[:2], "C", *words[2:], "Z")


def _word(value: float) -> str:
    return str(min(UNITS_PER_SIDE, max(0, round(value * UNITS_PER_SIDE / STEP) * STEP)))


def _polar(radius: float, degrees: float) -> Point:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


def _turn(point: Point, degrees: float) -> Point:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return point[0] * cosine - point[1] * sine, point[0] * sine + point[1] * cosine
