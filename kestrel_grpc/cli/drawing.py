"""Draws points, boxes and outlines onto their image. Knows no server."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageChops, ImageDraw, ImageOps

from kestrel_client import Box, Point, Segment
from kestrel_grpc.cli.svg_path import polylines

COLOURS = ((230, 25, 75), (0, 130, 200), (60, 180, 75), (245, 130, 48), (145, 30, 180), (0, 170, 170))
"""Used in turn for the first, second … result."""

_RIM = (255, 255, 255)
_FILL_OPACITY = 0.35


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
    """A copy of the image with everything found drawn on it."""
    canvas = image.convert("RGB")
    width_px = max(2, round(max(canvas.size) / 250))
    for index, segment in enumerate(segments):
        canvas = _draw_segment(canvas, segment, COLOURS[index % len(COLOURS)], width_px)
    pencil = ImageDraw.Draw(canvas)
    for index, box in enumerate(boxes):
        colour = COLOURS[index % len(COLOURS)]
        corners = [_pixel(canvas, box.x_min, box.y_min), _pixel(canvas, box.x_max, box.y_max)]
        pencil.rectangle(corners, outline=colour, width=width_px)
    for index, point in enumerate(points):
        colour = COLOURS[index % len(COLOURS)]
        centre = _pixel(canvas, point.x, point.y)
        pencil.circle(centre, 3 * width_px, fill=colour, outline=_RIM, width=max(1, width_px // 2))
    return canvas


def _draw_segment(
    canvas: Image.Image, segment: Segment, colour: tuple[int, int, int], width_px: int
) -> Image.Image:
    lines = [[_in_box(canvas, segment.box, corner) for corner in line] for line in polylines(segment.svg_path)]
    mask = Image.new("1", canvas.size)
    for line in lines:
        if len(line) > 2:
            shape = Image.new("1", canvas.size)
            ImageDraw.Draw(shape).polygon(line, fill=1)
            # A shape within a shape is a hole.
            mask = ImageChops.logical_xor(mask, shape)
    tinted = Image.blend(canvas, Image.new("RGB", canvas.size, colour), _FILL_OPACITY)
    canvas = Image.composite(tinted, canvas, mask)
    pencil = ImageDraw.Draw(canvas)
    for line in lines:
        pencil.line(line, fill=colour, width=width_px, joint="curve")
    return canvas


def _in_box(canvas: Image.Image, box: Box, corner: complex) -> tuple[float, float]:
    x = box.x_min + corner.real * (box.x_max - box.x_min)
    y = box.y_min + corner.imag * (box.y_max - box.y_min)
    return _pixel(canvas, x, y)


def _pixel(canvas: Image.Image, x: float, y: float) -> tuple[float, float]:
    """A point in pixels; the right and bottom edges belong to the last pixels."""
    return min(x * canvas.width, canvas.width - 1), min(y * canvas.height, canvas.height - 1)
