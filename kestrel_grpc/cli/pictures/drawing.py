"""Draws points, boxes and outlines onto their image, each with a label such as "box 1"."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont, ImageOps

from kestrel_client import Box, Point, Segment

Colour = tuple[int, int, int]
Pixel = tuple[float, float]

COLOURS: tuple[Colour, ...] = (
    *((230, 25, 75), (0, 130, 200), (60, 180, 75), (245, 130, 48), (145, 30, 180), (0, 170, 170)),
    *((240, 50, 230), (128, 0, 0), (0, 0, 117), (128, 128, 0), (154, 99, 36), (70, 70, 70)),
)
"""Used in turn for the first, second … result: outlines, then boxes, then points."""

_RIM = (255, 255, 255)
_INK = (0, 0, 0)


def open_upright(image_bytes: bytes) -> Image.Image:
    """The image as the model sees it: rotated by its EXIF orientation, transparent pixels on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(image_bytes)))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def draw(
    image: Image.Image,
    *,
    points: Sequence[Point] = (),
    boxes: Sequence[Box] = (),
    segments: Sequence[Segment] = (),
) -> Image.Image:
    """A copy of the image with everything found drawn on it. The colours of the image stay visible."""
    canvas = image.convert("RGB")
    width_px = max(2, round(max(canvas.size) / 250))
    pencil = ImageDraw.Draw(canvas)
    colours = itertools.cycle(COLOURS)
    labels: list[_Label] = []
    spots: list[tuple[Pixel, Colour]] = []
    for number, segment in enumerate(segments, 1):
        colour = next(colours)
        lines = [[_pixel(canvas, x, y) for x, y in line] for line in segment.polygons()]
        if lines:
            corner = _pixel(canvas, segment.box.x_min, segment.box.y_max)
            labels.append(_Label(f"outline {number}", colour, corner, is_above=False))
        # On a rim, so that an outline is visible on its own colour too.
        for fill, line_px in ((_RIM, 2 * width_px), (colour, width_px)):
            for line in lines:
                pencil.line(line, fill=fill, width=line_px, joint="curve")
    for number, box in enumerate(boxes, 1):
        colour = next(colours)
        corners = [_pixel(canvas, box.x_min, box.y_min), _pixel(canvas, box.x_max, box.y_max)]
        labels.append(_Label(f"box {number}", colour, corners[0], is_above=True))
        pencil.rectangle(corners, outline=colour, width=width_px)
    for number, point in enumerate(points, 1):
        colour = next(colours)
        x, y = _pixel(canvas, point.x, point.y)
        labels.append(_Label(f"point {number}", colour, (x + 3 * width_px, y), is_above=False))
        spots.append(((x, y), colour))
    for label in labels:
        label.draw(pencil, width_px)
    for centre, colour in spots:
        pencil.circle(centre, 3 * width_px, fill=colour, outline=_RIM, width=max(1, width_px // 2))
    return canvas


@dataclass(frozen=True, slots=True)
class _Label:
    """A word on a plate of the result's colour, at a corner of the result: above it or below."""

    text: str
    colour: Colour
    corner: Pixel
    is_above: bool

    def draw(self, pencil: ImageDraw.ImageDraw, width_px: int) -> None:
        """Draw it within the image."""
        font = ImageFont.load_default(4.0 * width_px)
        left, top, right, bottom = font.getbbox(self.text)
        plate = (right - left + 2 * width_px, bottom - top + 2 * width_px)
        width, height = pencil.im.size
        x = min(max(self.corner[0], 0), max(width - plate[0], 0))
        y = min(max(self.corner[1] - (plate[1] if self.is_above else 0), 0), max(height - plate[1], 0))
        pencil.rectangle((x, y, x + plate[0], y + plate[1]), fill=self.colour)
        # The weights of red, green and blue in brightness.
        brightness = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), self.colour, strict=True))
        ink = _INK if brightness > 140 else _RIM
        pencil.text((x + width_px - left, y + width_px - top), self.text, ink, font)


def _pixel(canvas: Image.Image, x: float, y: float) -> Pixel:
    """A point in pixels; the right and bottom edges belong to the last pixels."""
    return min(x * canvas.width, canvas.width - 1), min(y * canvas.height, canvas.height - 1)
