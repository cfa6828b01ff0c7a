"""Fills polygons, as SVG fills paths. A mask needs Pillow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Polygon = Sequence[tuple[float, float]]

_NEUTRAL = 128


def area(polygon: Polygon) -> float:
    """The area, positive where the corners go clockwise on a screen."""
    pairs = itertools.pairwise([*polygon, *polygon[:1]])
    return sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairs) / 2


def mask(polygons: Sequence[Polygon], width: int, height: int) -> Image:
    """An image of mode "L": 255 inside the polygons, in pixels, and 0 outside.

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
