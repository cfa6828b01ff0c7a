"""Turns SVG path data into polygons, and polygons into masks: images, which need Pillow, and COCO's run-lengths.

Takes the whole grammar of paths: M L H V C S Q T A Z, absolute and relative. The paths come from a model, so a
command that lacks arguments draws nothing rather than failing, and reading stops at the first thing that is no path
data.
"""

from __future__ import annotations

import io
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
_FAR = 1e9
_LEAST_RADIUS = 1e-9
"""The shortest radius of an arc: one with a shorter one is a straight line."""


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
            # Beyond, arithmetic would overflow: places are fractions of a box.
            yield command, [max(-_FAR, min(_FAR, value)) for value in values]
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
    turn = _rotation(math.radians(turn_deg))
    # On the plane where the ellipse is the unit circle and the start the origin, the centre lies on the bisector of
    # the two ends.
    turned = (end - start) / turn
    is_flat = min(rx, ry) < _LEAST_RADIUS
    to = 0j if is_flat else complex(turned.real / rx, turned.imag / ry)
    if is_flat or not abs(to):
        return _bezier_curve([start, end])
    half = abs(to) / 2
    radius = max(1.0, half)  # radii too small to reach both ends grow until they do
    height = math.sqrt(radius * radius - half * half)
    side = 1j * to / abs(to)
    centre = to / 2 + (side if large != sweep else -side) * height
    first, sweep_angle = _angle(-centre), _angle((to - centre) / -centre)
    if sweep and sweep_angle < 0:
        sweep_angle += 2 * math.pi
    elif not sweep and sweep_angle > 0:
        sweep_angle -= 2 * math.pi

    def at(t: float) -> complex:
        point = centre + radius * _rotation(first + sweep_angle * t)
        return start + complex(point.real * rx, point.imag * ry) * turn

    return at


# The functions of `cmath` raise errors for angles that are nearly 0.


def _rotation(angle: float) -> complex:
    return complex(math.cos(angle), math.sin(angle))


def _angle(place: complex) -> float:
    return math.atan2(place.imag, place.real)


Polygon = Sequence[tuple[float, float]]

MAX_MASK_PIXELS = 2**26
"""The largest image whose mask is made as an image."""
MAX_MASK_SIDE_PX = 65_536
"""The longest side of an image whose mask is made."""
_MAX_CROSSINGS = 2**20
"""The most places at which outlines may cross the columns of an image: beyond, masks take seconds and megabytes."""


class MaskTooLarge(ValueError):
    """The image, or the outline in it, is too large for a mask."""


def area(polygon: Polygon) -> float:
    """Returns the area, positive where the corners go clockwise on a screen."""
    pairs = itertools.pairwise([*polygon, *polygon[:1]])
    return sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairs) / 2


def polygons_in(
    path: str, sides: tuple[float, float, float, float], width: float, height: float
) -> list[list[tuple[float, float]]]:
    """Returns the corners of each line that a path draws in an image of this size.

    The coordinates of the path run from 0 to 1 over a box, whose `sides` are left, top, right and bottom, as
    fractions of the image.
    """
    left, top, right, bottom = sides
    return [
        [
            (width * (left + corner.real * (right - left)), height * (top + corner.imag * (bottom - top)))
            for corner in line
        ]
        for line in polylines(path)
    ]


def mask(polygons: Sequence[Polygon], width: int, height: int) -> Image:
    """Returns an image of mode "L": 255 inside the polygons, in pixels, and 0 outside.

    A pixel is inside if its centre is, by the rule `nonzero` of SVG: a polygon inside another that goes the other
    way round is a hole. Raises `MaskTooLarge`.
    """
    from PIL import Image

    if width * height > MAX_MASK_PIXELS:
        raise MaskTooLarge(f"masks of at most {MAX_MASK_PIXELS} pixels are made as images, not {width * height}")
    columns = bytearray(width * height)
    for start, end in _filled(polygons, width, height):
        columns[start:end] = b"\xff" * (end - start)
    return Image.frombytes("L", (height, width), bytes(columns)).transpose(Image.Transpose.TRANSPOSE)


def png(polygons: Sequence[Polygon], width: int, height: int) -> bytes:
    """Returns the mask as the file of a PNG of 8 bits. Raises `MaskTooLarge`."""
    file = io.BytesIO()
    mask(polygons, width, height).save(file, "PNG")
    return file.getvalue()


def run_length_counts(polygons: Sequence[Polygon], width: int, height: int) -> str:
    """Returns the mask in the compressed run-length encoding of COCO, as `pycocotools` encodes it.

    Runs go down the columns, from the left: pixels outside, pixels inside, and so on. Each is a number in base 32;
    all after the third are differences to the second last one. Raises `MaskTooLarge`.
    """
    runs: list[int] = []
    at = 0
    for start, end in _filled(polygons, width, height):
        if runs and start == at:
            runs[-1] += end - start
        else:
            runs += (start - at, end - start)
        at = end
    if at < width * height or not runs:
        runs.append(width * height - at)
    return "".join(_digits(run - runs[index - 2] if index > 2 else run) for index, run in enumerate(runs))


def _digits(number: int) -> str:
    """Returns a number in base 32, least digits first; the sign is that of the highest bit of the last digit."""
    digits = ""
    while True:
        digit, number = number & 0x1F, number >> 5
        is_last = number == (-1 if digit & 0x10 else 0)
        digits += chr(48 + digit + (0 if is_last else 0x20))
        if is_last:
            return digits


def _filled(polygons: Sequence[Polygon], width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of pixels inside the polygons, as places in the columns of the image one after the other."""
    if not (1 <= width <= MAX_MASK_SIDE_PX and 1 <= height <= MAX_MASK_SIDE_PX):
        raise MaskTooLarge(f"the sides of a mask are 1 to {MAX_MASK_SIDE_PX} pixels long, not {width} and {height}")
    crossings: list[list[tuple[float, int]]] = [[] for _ in range(width)]
    num_crossings = 0
    for polygon in polygons:
        corners = [(_bounded(x), _bounded(y)) for x, y in polygon]
        for (x, y), (next_x, next_y) in itertools.pairwise([*corners, *corners[:1]]):
            # An edge crosses the centres of columns from its left end on, up to its right end.
            first, end = (max(0, min(width, math.ceil(side - 0.5))) for side in sorted((x, next_x)))
            if first >= end:
                continue
            num_crossings += end - first
            if num_crossings > _MAX_CROSSINGS:
                raise MaskTooLarge("the outline has too many lines for a mask of this size")
            slope, turn = (next_y - y) / (next_x - x), 1 if next_x > x else -1
            for column in range(first, end):
                crossings[column].append((y + (column + 0.5 - x) * slope, turn))
    for column, found in enumerate(crossings):
        num_turns, start = 0, 0.0
        for y, turn in sorted(found):
            if not num_turns:
                start = y
            num_turns += turn
            if not num_turns:
                top, bottom = (max(0, min(height, math.ceil(side - 0.5))) for side in (start, y))
                if top < bottom:
                    yield column * height + top, column * height + bottom


def _bounded(side: float) -> float:
    return max(-_FAR, min(_FAR, side))
