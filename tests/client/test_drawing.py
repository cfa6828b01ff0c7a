"""Pictures with answers on them."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from kestrel_client import (
    Box,
    DetectedObject,
    DetectGroup,
    DetectResult,
    FinishReason,
    GazeResult,
    InvalidRequest,
    Point,
    PointResult,
    Segment,
    SegmentResult,
    Timing,
    Usage,
    draw,
)
from kestrel_client.drawing import COLOURS
from kestrel_client.images import image_bytes

WHITE = (255, 255, 255)
FACTS = {
    "request_id": "r",
    "model": "tiny",
    "finish_reason": FinishReason.STOP,
    "usage": Usage(1, 1, 1),
    "timing": Timing(0, 0, 0, 0, 0),
}


def pointed(*points: Point, object: str = "kite") -> PointResult:
    return PointResult(points=points, object=object, **FACTS)


def detected(*boxes: Box, object: str = "kite") -> DetectResult:
    return DetectResult(objects=tuple(map(DetectedObject, boxes)), object=object, **FACTS)


def outlined(*segments: Segment) -> SegmentResult:
    return SegmentResult(segments=segments, object="kite", **FACTS)


def _canvas(width: int = 200, height: int = 100) -> Image.Image:
    return Image.new("RGB", (width, height), WHITE)


def test_the_original_stays_as_it_was():
    image = _canvas()
    drawn = draw(image, pointed(Point(0.5, 0.5)))
    assert image.getcolors() == [(200 * 100, WHITE)]
    assert drawn.size == image.size


def test_a_point_is_a_spot_in_its_place():
    drawn = draw(_canvas(), pointed(Point(0.25, 0.5)))
    assert drawn.getpixel((50, 50)) == COLOURS[0]
    assert drawn.getpixel((150, 50)) == WHITE


def test_a_box_is_a_frame_around_what_stays_visible():
    drawn = draw(_canvas(), detected(Box(0.1, 0.2, 0.6, 0.8)))
    for corner in ((20, 20), (120, 20), (20, 80), (120, 80)):
        assert drawn.getpixel(corner) == COLOURS[0]
    assert drawn.getpixel((70, 50)) == WHITE
    assert drawn.getpixel((130, 50)) == WHITE


def test_a_box_of_the_whole_image_stays_inside_it():
    drawn = draw(_canvas(), detected(Box(0, 0, 1, 1)))
    assert drawn.getpixel((199, 99)) == COLOURS[0]
    assert drawn.getpixel((0, 0)) == COLOURS[0]


def test_a_segment_is_outlined_within_its_box_and_keeps_its_own_colour():
    segment = Segment("M 0 0 L 1 0 L 1 1 L 0 1 Z", Box(0.5, 0.2, 0.9, 0.8))
    drawn = draw(_canvas(), outlined(segment))
    assert drawn.getpixel((100, 40)) == COLOURS[0]
    assert drawn.getpixel((140, 50)) == WHITE
    assert drawn.getpixel((50, 50)) == WHITE


def test_a_shape_within_a_shape_is_outlined_too():
    ring = "M 0 0 H 1 V 1 H 0 Z M 0.3 0.3 H 0.7 V 0.7 H 0.3 Z"
    drawn = draw(_canvas(), outlined(Segment(ring, Box(0, 0, 1, 1))))
    assert drawn.getpixel((60, 50)) == COLOURS[0]
    assert drawn.getpixel((20, 50)) == drawn.getpixel((100, 50)) == WHITE


def test_an_outline_is_visible_on_its_own_colour():
    segment = Segment("M 0 0 L 1 0 L 1 1 L 0 1 Z", Box(0.5, 0.2, 0.9, 0.8))
    drawn = draw(Image.new("RGB", (200, 100), COLOURS[0]), outlined(segment))
    assert WHITE in [drawn.getpixel((x, 40)) for x in range(95, 106)]


def test_every_result_has_a_label_of_its_colour_inside_the_image():
    segment = Segment("M 0 0 L 1 0 L 1 1 L 0 1 Z", Box(0.1, 0.1, 0.3, 0.3))
    found = draw(_canvas(800, 400), outlined(segment), detected(Box(0.5, 0, 1, 1)), pointed(Point(0.999, 0.999)))
    counted = {colour: number for number, colour in found.getcolors(1 << 20) or ()}
    plain = draw(_canvas(800, 400), detected(Box(0.5, 0, 1, 1)))
    plain_counted = {colour: number for number, colour in plain.getcolors(1 << 20) or ()}
    frame = 2 * 3 * (400 + 400)
    assert plain_counted[COLOURS[0]] > frame
    assert {*COLOURS[:3]} <= counted.keys()
    assert counted[COLOURS[2]] > 3.14 * 9**2 / 4 * 2  # more than the visible quarter of the spot


def test_a_path_that_makes_no_sense_draws_nothing():
    drawn = draw(_canvas(), outlined(Segment("A B", Box(0, 0, 1, 1)), Segment("", Box(0, 0, 1, 1))))
    assert drawn.getcolors() == [(200 * 100, WHITE)]


def test_things_found_differ_in_colour_and_any_number_of_them_is_drawn():
    points = tuple(Point((index + 0.5) / 20, 0.5) for index in range(20))
    drawn = draw(_canvas(800, 100), pointed(*points))
    shown = [drawn.getpixel((20 + 40 * index, 50)) for index in range(len(COLOURS) + 1)]
    assert shown == [*COLOURS, COLOURS[0]]
    assert len(set(COLOURS)) == len(COLOURS)


def test_several_results_share_no_colour():
    drawn = draw(_canvas(), detected(Box(0.5, 0.3, 0.9, 0.8)), pointed(Point(0.25, 0.5)))
    assert drawn.getpixel((100, 30)) == COLOURS[0]
    assert drawn.getpixel((50, 50)) == COLOURS[1]


def test_pictures_are_drawn_on_as_the_model_sees_them():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(file, format="JPEG", exif=exif)
    assert draw(file.getvalue()).size == (20, 30)
    file = io.BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(file, format="PNG")
    assert draw(file.getvalue()).getcolors() == [(4, WHITE)]


def test_labels_say_what_was_asked_for_and_count_several(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    text = ImageDraw.ImageDraw.text

    def noted(pencil: ImageDraw.ImageDraw, xy: Any, content: str, *others: Any, **options: Any) -> None:
        written.append(content)
        text(pencil, xy, content, *others, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    gaze = GazeResult(target=Point(0.1, 0.1), **FACTS)
    found = pointed(Point(0.2, 0.2), Point(0.3, 0.3), object="dog"), detected(Box(0, 0, 1, 1), object="two\n words")
    draw(_canvas(), *found, gaze, detected(Box(0, 0, 1, 1), object="x" * 100))
    assert written == ["dog 1", "dog 2", "two words", "target", "x" * 39 + "…"]


def test_an_image_that_only_the_server_has_is_refused():
    with pytest.raises(InvalidRequest, match="is no file"):
        draw("https://example.com/a.png", pointed())


def grey_file(image_format: str, numbers: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(numbers).save(file, image_format, **options)
    return file.getvalue()


RAMP = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (3, 1))


@pytest.mark.parametrize(
    "file",
    [
        grey_file("PNG", RAMP),
        grey_file("TIFF", RAMP),
        grey_file("TIFF", RAMP, compression="tiff_lzw"),
        grey_file("TIFF", 65535 - RAMP, tiffinfo={262: 0}),  # white is zero
        grey_file("TIFF", RAMP >> 4, tiffinfo={281: 4095}),  # 12 bits
    ],
)
def test_a_grey_file_of_16_bits_is_drawn_and_sent_in_all_its_shades(file: bytes):
    opened = Image.open(io.BytesIO(file))
    for drawn in (draw(file), draw(opened), draw(image_bytes(opened))):
        np.testing.assert_allclose(np.asarray(drawn)[1, :, 0], np.arange(256), atol=1)


def test_the_transparent_colour_of_a_grey_image_of_any_depth_is_drawn_white():
    drawn = np.asarray(draw(grey_file("PNG", RAMP, transparency=int(RAMP[0, 100]))))[1, :, 0]
    assert drawn.tolist() == [255 if place == 100 else place for place in range(256)]


def test_an_orientation_in_xmp_alone_turns_nothing_that_is_drawn():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    for image_format in ("JPEG", "WEBP", "TIFF"):
        file = io.BytesIO()
        options = {"tiffinfo": {700: xmp}} if image_format == "TIFF" else {"xmp": xmp}
        Image.new("RGB", (30, 20)).save(file, image_format, **options)
        assert draw(file.getvalue()).size == (30, 20)
        if image_format != "TIFF":  # which Pillow turns itself
            assert draw(Image.open(file)).size == (30, 20)


def test_each_of_several_objects_has_one_colour_and_its_own_label():
    def boxes(*lefts: float) -> tuple[DetectedObject, ...]:
        return tuple(DetectedObject(Box(left, 0.3, left + 0.125, 0.9)) for left in lefts)

    groups = (
        DetectGroup("car", boxes(0.05, 0.3), FinishReason.STOP),
        DetectGroup("dog", (), FinishReason.STOP),
        DetectGroup("cat", boxes(0.6), FinishReason.STOP),
    )
    result = DetectResult(objects=(), groups=groups, **FACTS)
    drawn = draw(_canvas(), result)
    first, second, third = (
        drawn.getpixel((round(left * drawn.width), drawn.height // 2)) for left in (0.05, 0.3, 0.6)
    )
    assert first == second == COLOURS[0]
    assert third == COLOURS[1]
