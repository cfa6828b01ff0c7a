"""Pictures with answers on them."""

from __future__ import annotations

import io

from PIL import Image

from kestrel_client import Box, Point, Segment
from kestrel_grpc.cli.drawing import COLOURS, draw, open_upright

WHITE = (255, 255, 255)


def _canvas(width: int = 200, height: int = 100) -> Image.Image:
    return Image.new("RGB", (width, height), WHITE)


def _reddish(pixel: object) -> bool:
    """Tinted with the first colour, though not filled with it."""
    assert isinstance(pixel, tuple)
    return pixel not in (WHITE, COLOURS[0]) and pixel[0] > pixel[1]


def test_the_original_stays_as_it_was() -> None:
    image = _canvas()
    drawn = draw(image, points=(Point(0.5, 0.5),))
    assert image.getcolors() == [(200 * 100, WHITE)]
    assert drawn.size == image.size


def test_a_point_is_a_spot_in_its_place() -> None:
    drawn = draw(_canvas(), points=(Point(0.25, 0.5),))
    assert drawn.getpixel((50, 50)) == COLOURS[0]
    assert drawn.getpixel((150, 50)) == WHITE


def test_a_box_is_a_frame_around_what_stays_visible() -> None:
    drawn = draw(_canvas(), boxes=(Box(0.1, 0.2, 0.6, 0.8),))
    for corner in ((20, 20), (120, 20), (20, 80), (120, 80)):
        assert drawn.getpixel(corner) == COLOURS[0]
    assert drawn.getpixel((70, 50)) == WHITE
    assert drawn.getpixel((130, 50)) == WHITE


def test_a_box_of_the_whole_image_stays_inside_it() -> None:
    drawn = draw(_canvas(), boxes=(Box(0, 0, 1, 1),))
    assert drawn.getpixel((199, 99)) == COLOURS[0]
    assert drawn.getpixel((0, 0)) == COLOURS[0]


def test_a_segment_is_tinted_and_outlined_within_its_box() -> None:
    segment = Segment("M 0 0 L 1 0 L 1 1 L 0 1 Z", Box(0.5, 0.2, 0.9, 0.8))
    drawn = draw(_canvas(), segments=(segment,))
    assert drawn.getpixel((100, 50)) == COLOURS[0]
    assert _reddish(drawn.getpixel((140, 50)))
    assert drawn.getpixel((50, 50)) == WHITE


def test_a_shape_within_a_shape_is_a_hole() -> None:
    ring = "M 0 0 H 1 V 1 H 0 Z M 0.3 0.3 H 0.7 V 0.7 H 0.3 Z"
    drawn = draw(_canvas(), segments=(Segment(ring, Box(0, 0, 1, 1)),))
    assert _reddish(drawn.getpixel((20, 50)))
    assert drawn.getpixel((100, 50)) == WHITE


def test_a_path_that_makes_no_sense_draws_nothing() -> None:
    drawn = draw(_canvas(), segments=(Segment("A B", Box(0, 0, 1, 1)), Segment("", Box(0, 0, 1, 1))))
    assert drawn.getcolors() == [(200 * 100, WHITE)]


def test_things_found_differ_in_colour_and_any_number_of_them_is_drawn() -> None:
    points = tuple(Point((index + 0.5) / 20, 0.5) for index in range(20))
    drawn = draw(_canvas(800, 100), points=points)
    assert [drawn.getpixel((20 + 40 * index, 50)) for index in range(7)] == [*COLOURS, COLOURS[0]]


def test_pictures_are_opened_as_the_model_sees_them() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(file, format="JPEG", exif=exif)
    assert open_upright(file.getvalue()).size == (20, 30)
    file = io.BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(file, format="PNG")
    assert open_upright(file.getvalue()).getcolors() == [(4, WHITE)]
