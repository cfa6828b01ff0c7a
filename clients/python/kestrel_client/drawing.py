"""Draws results onto their image, labelled with what was asked for. Needs Pillow."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel_client.images import ImageInput, image_bytes
from kestrel_client.results import Box, DetectResult, GazeResult, Point, PointResult, Segment, SegmentResult

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Pixel = tuple[float, float]
Drawable = PointResult | DetectResult | SegmentResult | GazeResult

COLOURS: tuple[Colour, ...] = (
    *((230, 25, 75), (0, 130, 200), (60, 180, 75), (245, 130, 48), (145, 30, 180), (0, 170, 170)),
    *((240, 50, 230), (128, 0, 0), (0, 0, 117), (128, 128, 0), (154, 99, 36), (70, 70, 70)),
)
"""Used in turn for the first, second … thing found, in the order of the results."""

_RIM = (255, 255, 255)
_INK = (0, 0, 0)
_MAX_LABEL_CHARS = 40


def draw(image: ImageInput, *results: Drawable) -> Image.Image:
    """Draws the points, boxes and outlines of results onto a copy of their image. Needs Pillow.

    Args:
        image: The image, in any form of `ImageInput` but an address or a stored image.
        *results: Of `point`, `detect`, `segment` or `gaze`.

    Returns:
        A PIL image in RGB, upright. Each thing found has a colour, and a label with what was asked for.

    Raises:
        InvalidRequest: For what is no image, or is on the server.
        OSError: For a file that cannot be read or decoded.
    """
    from PIL import ImageDraw

    canvas = _upright(image)
    width_px = max(2, round(max(canvas.size) / 250))
    pencil = ImageDraw.Draw(canvas)
    colours = itertools.cycle(COLOURS)
    labels: list[_Label] = []
    spots: list[tuple[Pixel, Colour]] = []
    for name, thing in _named(results):
        colour = next(colours)
        if isinstance(thing, Segment):
            lines = [[_pixel(canvas, x, y) for x, y in line] for line in thing.polygons()]
            if lines:
                corner = _pixel(canvas, thing.box.x_min, thing.box.y_max)
                labels.append(_Label(name, colour, corner, is_above=False))
            # On a rim, so that an outline is visible on its own colour too.
            for fill, line_px in ((_RIM, 2 * width_px), (colour, width_px)):
                for line in lines:
                    pencil.line(line, fill=fill, width=line_px, joint="curve")
        elif isinstance(thing, Box):
            corners = [_pixel(canvas, thing.x_min, thing.y_min), _pixel(canvas, thing.x_max, thing.y_max)]
            labels.append(_Label(name, colour, corners[0], is_above=True))
            pencil.rectangle(corners, outline=colour, width=width_px)
        else:
            x, y = _pixel(canvas, thing.x, thing.y)
            labels.append(_Label(name, colour, (x + 3 * width_px, y), is_above=False))
            spots.append(((x, y), colour))
    for label in labels:
        label.draw(pencil, width_px)
    for centre, colour in spots:
        pencil.circle(centre, 3 * width_px, fill=colour, outline=_RIM, width=max(1, width_px // 2))
    return canvas


def _named(results: Sequence[Drawable]) -> Iterator[tuple[str, Point | Box | Segment]]:
    """Each thing found with its label: what was asked for, with a number where several were found."""
    for result in results:
        if isinstance(result, GazeResult):
            name, things = "target", [result.target] * (result.target is not None)
        elif isinstance(result, DetectResult):
            name, things = result.object, [item.box for item in result.objects]
        else:
            name, things = result.object, result.points if isinstance(result, PointResult) else result.segments
        name = name if len(name) <= _MAX_LABEL_CHARS else f"{name[: _MAX_LABEL_CHARS - 1]}…"
        for number, thing in enumerate(things, 1):
            if thing is not None:
                yield f"{name} {number}" if len(things) > 1 else name, thing


def _upright(image: Any) -> Image.Image:
    """A copy of the image as the model sees it: rotated by its EXIF orientation, transparent pixels on white."""
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        image = Image.open(io.BytesIO(image_bytes(image)))
    image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


@dataclass(frozen=True, slots=True)
class _Label:
    """A text on a plate of the result's colour, at a corner of the result: above it or below."""

    text: str
    colour: Colour
    corner: Pixel
    is_above: bool

    def draw(self, pencil: ImageDraw.ImageDraw, width_px: int) -> None:
        """Draw it within the image."""
        from PIL import ImageFont

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
