"""Draws results onto their image, labelled with what was asked for. Needs Pillow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel_client import pil_images
from kestrel_client.images import ImageInput, image_bytes
from kestrel_client.label_fonts import LabelFonts
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
"""The colours of the first, second … thing found, in the order of the results."""

_RIM = (255, 255, 255)
_INK = (0, 0, 0)
_MAX_LABEL_CHARS = 40


def draw(image: ImageInput, *results: Drawable) -> Image.Image:
    """Draws the points, boxes and outlines of results onto a copy of their image. Needs Pillow.

    Args:
        image: The image, in any form of `ImageInput` but an address or a stored image.
        *results: Of `point`, `detect`, `segment` or `gaze`.

    Returns:
        A PIL image in RGB, upright. Each thing found has a colour, and a label with what was asked for; of several
        objects in one call each object has a colour. For letters that Pillow's own font has not, `fc-match` of
        fontconfig finds an installed font; a character that no font has is written without its accents, or as its
        code point, such as "U+661F".

    Raises:
        InvalidRequest: For what is no image, or is on the server.
        OSError: For a file that cannot be read or decoded.
    """
    from PIL import ImageDraw

    canvas = _shown(image)
    width_px = max(2, round(max(canvas.size) / 250))
    pencil = ImageDraw.Draw(canvas)
    fonts = LabelFonts(4.0 * width_px)
    colours = itertools.cycle(COLOURS)
    labels: list[_Label] = []
    spots: list[tuple[Pixel, Colour]] = []
    colour = _RIM
    for name, thing, is_new_colour in _named(results):
        colour = next(colours) if is_new_colour else colour
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
        label.draw(pencil, width_px, fonts)
    for centre, colour in spots:
        pencil.circle(centre, 3 * width_px, fill=colour, outline=_RIM, width=max(1, width_px // 2))
    return canvas


def _named(results: Sequence[Drawable]) -> Iterator[tuple[str, Point | Box | Segment, bool]]:
    """Yields each thing found with its label, and True if a new colour begins.

    The label is what was asked for, with a number where several were found. Each thing has a colour of its own, but
    the things of a group have one.
    """
    for result in results:
        for name, things, is_group in _parts(result):
            name = " ".join(name.split())
            name = name if len(name) <= _MAX_LABEL_CHARS else f"{name[: _MAX_LABEL_CHARS - 1]}…"
            for number, thing in enumerate(things, 1):
                yield f"{name} {number}" if len(things) > 1 else name, thing, number == 1 or not is_group


def _parts(result: Drawable) -> Iterator[tuple[str, Sequence[Point | Box | Segment], bool]]:
    """Yields what was asked for, what was found, and whether that is one of several groups."""
    if isinstance(result, GazeResult):
        yield "target", [] if result.target is None else [result.target], False
    elif isinstance(result, SegmentResult):
        yield result.object, result.segments, False
    elif isinstance(result, DetectResult):
        yield result.object, [item.box for item in result.objects], False
        yield from ((group.object, [item.box for item in group.objects], True) for group in result.groups)
    else:
        yield result.object, result.points, False
        yield from ((group.object, group.points, True) for group in result.groups)


def _shown(image: Any) -> Image.Image:
    """Returns a copy of the image as the model sees it."""
    from PIL import Image

    return pil_images.shown(image if isinstance(image, Image.Image) else pil_images.open_file(image_bytes(image)))


@dataclass(frozen=True, slots=True)
class _Label:
    """A text on a plate of the result's colour, at a corner of the result: above it or below."""

    text: str
    colour: Colour
    corner: Pixel
    is_above: bool

    def draw(self, pencil: ImageDraw.ImageDraw, width_px: int, fonts: LabelFonts) -> None:
        """Draws it within the image."""
        line = fonts.line(self.text)
        plate = (line.width + 2 * width_px, line.height + 2 * width_px)
        width, height = pencil.im.size
        x = min(max(self.corner[0], 0), max(width - plate[0], 0))
        y = min(max(self.corner[1] - (plate[1] if self.is_above else 0), 0), max(height - plate[1], 0))
        pencil.rectangle((x, y, x + plate[0], y + plate[1]), fill=self.colour)
        # The weights of red, green and blue in brightness.
        brightness = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), self.colour, strict=True))
        ink = _INK if brightness > 140 else _RIM
        line.draw(pencil, (x + width_px, y + width_px), ink)


def _pixel(canvas: Image.Image, x: float, y: float) -> Pixel:
    """Returns a point in pixels; the right and bottom edges belong to the last pixels."""
    return min(x * canvas.width, canvas.width - 1), min(y * canvas.height, canvas.height - 1)
