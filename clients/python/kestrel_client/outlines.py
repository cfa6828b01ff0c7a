"""Turns SVG path data into polylines, and polygons into masks. A mask needs Pillow.

Takes the whole grammar of paths: M L H V C S Q T A Z, absolute and relative. The paths come from a model, so a
command that lacks arguments draws nothing rather than failing, and reading stops at the first thing that is no path
data.
"""

from __future__ import annotations

import cmath
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Polyline = list[complex]
"""Corners in order, as x + yj; at least two. A closed one ends where it starts."""


def polylines(path: str) -> list[Polyline]:
    """Returns the lines that the path draws."""
    pen = _Pen()
    for command, values in _commands(path):
        pen.follow(command, values)
    return [line for line in pen.lines if len(line) > 1]


_ARGUMENTS = {
    "M": "nn",
    "L": "nn",
    "H": "n",
    "V": "n",
    "C": "nnnnnn",
    "S": "nnnn",
    "Q": "nnnn",
    "T": "nn",
    "A": "nnnffnn",
    "Z": "",
}
_COMMAND = re.compile(r"[\s,]*([MLHVCSQTAZ])", re.IGNORECASE)
# A flag is a single digit and needs no separator behind it.
_ARGUMENT = {
    "n": re.compile(r"[\s,]*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"),
    "f": re.compile(r"[\s,]*([01])"),
}
_STEPS_PER_CURVE = 48


def _commands(path: str) -> Iterator[tuple[str, list[float]]]:
    """Yields each command with one set of its arguments; a repeated set repeats the command."""
    position = 0
    while found := _COMMAND.match(path, position):
        command, position = found[1], found.end()
        kinds = _ARGUMENTS[command.upper()]
        if not kinds:
            yield command, []
            continue
        while True:
            values: list[float] = []
            for kind in kinds:
                argument = _ARGUMENT[kind].match(path, position)
                if argument is None:
                    break
                values.append(float(argument[1]))
                position = argument.end()
            if len(values) < len(kinds) or not all(map(math.isfinite, values)):
                break
            yield command, values
            command = {"M": "L", "m": "l"}.get(command, command)


class _Pen:
    """The current point and the polylines drawn up to it."""

    def __init__(self) -> None:
        self.lines: list[Polyline] = []
        self._at = 0j
        self._start = 0j
        self._down = False
        # The next smooth curve of the same family leaves in the direction in which the last curve arrived.
        self._family = ""
        self._control = 0j

    def follow(self, command: str, values: list[float]) -> None:
        kind = command.upper()
        origin = self._at if command.islower() else 0j
        if kind == "M":
            self._at = self._start = origin + complex(*values)
            self._down = False
        elif kind == "Z":
            if self._down:
                self._line_to(self._start)
            self._down = False
        elif kind == "H":
            self._line_to(complex(origin.real + values[0], self._at.imag))
        elif kind == "V":
            self._line_to(complex(self._at.real, origin.imag + values[0]))
        elif kind == "A":
            radii, (turn_deg, large, sweep) = complex(*values[:2]), values[2:5]
            end = origin + complex(*values[5:])
            self._curve_to(end, _elliptic_arc(self._at, end, radii, turn_deg, large != 0, sweep != 0))
        else:
            points = [origin + complex(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
            self._through(kind, points)
            return
        self._family = ""

    def _through(self, kind: str, points: list[complex]) -> None:
        """Adds a line, or a curve of second or third order; `points` end where it ends."""
        family = {"C": "cubic", "S": "cubic", "Q": "quadratic", "T": "quadratic"}.get(kind, "")
        if kind in "ST":
            mirrored = 2 * self._at - self._control if self._family == family else self._at
            points = [mirrored, *points]
        if family:
            self._curve_to(points[-1], _bezier_curve([self._at, *points]))
            self._control = points[-2]
        else:
            self._line_to(points[-1])
        self._family = family

    def _curve_to(self, end: complex, at: Callable[[float], complex]) -> None:
        for step in range(1, _STEPS_PER_CURVE):
            self._line_to(at(step / _STEPS_PER_CURVE))
        self._line_to(end)

    def _line_to(self, end: complex) -> None:
        if not self._down:
            self.lines.append([self._at])
            self._down = True
        self.lines[-1].append(end)
        self._at = end


def _bezier_curve(controls: list[complex]) -> Callable[[float], complex]:
    def at(t: float) -> complex:
        points = controls
        while len(points) > 1:
            points = [a + (b - a) * t for a, b in itertools.pairwise(points)]
        return points[0]

    return at


def _elliptic_arc(
    start: complex, end: complex, radii: complex, turn_deg: float, large: bool, sweep: bool
) -> Callable[[float], complex]:
    rx, ry = abs(radii.real), abs(radii.imag)
    if start == end or rx == 0 or ry == 0:
        return _bezier_curve([start, end])
    turn = cmath.rect(1, math.radians(turn_deg))

    def to_circle(point: complex) -> complex:
        turned = point / turn
        return complex(turned.real / rx, turned.imag / ry)

    # On the plane where the ellipse is the unit circle, the centre lies on the bisector of the two ends.
    a, b = to_circle(start), to_circle(end)
    half = abs(b - a) / 2
    radius = max(1.0, half)  # radii too small to reach both ends grow until they do
    height = math.sqrt(radius * radius - half * half)
    side = 1j * (b - a) / abs(b - a)
    centre = (a + b) / 2 + (side if large != sweep else -side) * height
    first, sweep_angle = cmath.phase(a - centre), cmath.phase((b - centre) / (a - centre))
    if sweep and sweep_angle < 0:
        sweep_angle += 2 * math.pi
    elif not sweep and sweep_angle > 0:
        sweep_angle -= 2 * math.pi

    def at(t: float) -> complex:
        point = centre + cmath.rect(radius, first + sweep_angle * t)
        return complex(point.real * rx, point.imag * ry) * turn

    return at


Polygon = Sequence[tuple[float, float]]

_NEUTRAL = 128


def area(polygon: Polygon) -> float:
    """Returns the area, positive where the corners go clockwise on a screen."""
    pairs = itertools.pairwise([*polygon, *polygon[:1]])
    return sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairs) / 2


def mask(polygons: Sequence[Polygon], width: int, height: int) -> Image:
    """Returns an image of mode "L": 255 inside the polygons, in pixels, and 0 outside.

    A polygon inside another that goes the other way round is a hole, as by the rule `nonzero` of SVG.
    """
    from PIL import Image, ImageChops, ImageDraw

    # How often the outlines go around each pixel, as a difference from the neutral value.
    turns = Image.new("L", (width, height), _NEUTRAL)
    for polygon in polygons:
        filled = Image.new("L", (width, height), 0)
        # Pillow's coordinates are those of the centres of pixels.
        ImageDraw.Draw(filled).polygon([(x - 0.5, y - 0.5) for x, y in polygon], fill=1)
        turns = ImageChops.add(turns, filled) if area(polygon) > 0 else ImageChops.subtract(turns, filled)
    return turns.point(lambda value: 255 if value != _NEUTRAL else 0)
