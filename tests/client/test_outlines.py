"""Outlines as polygons and masks."""

import cmath
import io
import itertools
import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pycocotools.mask as coco
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from kestrel_client import Box, Segment
from kestrel_client.outlines import MaskTooLarge, mask, polylines, run_length_counts


def _close(a: list[complex], b: list[complex]) -> bool:
    return len(a) == len(b) and all(abs(p - q) < 1e-9 for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("path", "corners"),
    [
        ("M 0 0 L 1 0 L 1 1 Z", [0, 1, 1 + 1j, 0]),
        ("M0,0 1,0 1,1z", [0, 1, 1 + 1j, 0]),
        ("m.5.5 1 0 0 1", [0.5 + 0.5j, 1.5 + 0.5j, 1.5 + 1.5j]),
        ("M1 1 H 3 V 4 h -2 v-3", [1 + 1j, 3 + 1j, 3 + 4j, 1 + 4j, 1 + 1j]),
        ("M 1e-1 -2E+1 L+0 0", [0.1 - 20j, 0]),
    ],
)
def test_straight_lines_keep_their_corners(path: str, corners: list[complex]):
    (line,) = polylines(path)
    assert _close(line, corners)


def test_each_move_starts_a_line_and_so_does_whatever_follows_a_close():
    first, second, third = polylines("M 0 0 L 1 0 Z L 0 2 M 5 5 l 1 1")
    assert first == [0, 1, 0]
    assert second == [0, 2j]
    assert third == [5 + 5j, 6 + 6j]


def test_a_cubic_curve_passes_where_its_formula_says():
    (line,) = polylines("M 0 0 C 0 4 4 4 4 0")
    assert len(line) == 49
    assert abs(line[24] - (2 + 3j)) < 1e-9
    assert line[-1] == 4


def test_a_quadratic_curve_passes_where_its_formula_says():
    (line,) = polylines("M 1 1 q 2 4 4 0")
    assert abs(line[24] - (3 + 3j)) < 1e-9
    assert line[-1] == 5 + 1j


@pytest.mark.parametrize(
    ("smooth", "spelt_out"),
    [
        ("M 0 0 C 0 1 2 1 2 0 S 4 -1 4 0", "M 0 0 C 0 1 2 1 2 0 C 2 -1 4 -1 4 0"),
        ("M 0 0 Q 1 2 2 0 T 4 0 T 6 0", "M 0 0 Q 1 2 2 0 Q 3 -2 4 0 Q 5 2 6 0"),
        ("M 0 0 S 1 1 2 0", "M 0 0 C 0 0 1 1 2 0"),
        ("M 0 0 C 0 1 2 1 2 0 T 4 0", "M 0 0 C 0 1 2 1 2 0 Q 2 0 4 0"),
    ],
)
def test_a_smooth_curve_mirrors_the_last_curve_of_its_kind_only(smooth: str, spelt_out: str):
    (got,), (wanted,) = polylines(smooth), polylines(spelt_out)
    assert _close(got, wanted)


@pytest.mark.parametrize(
    ("large", "sweep", "centre", "middle"),
    [
        (0, 1, 1j, 1j + cmath.rect(1, -math.pi / 4)),
        (1, 1, 1, 1 + cmath.rect(1, -math.pi / 4)),
        (0, 0, 1, 1 + cmath.rect(1, 3 * math.pi / 4)),
        (1, 0, 1j, 1j + cmath.rect(1, 3 * math.pi / 4)),
    ],
)
def test_the_flags_of_an_arc_choose_among_its_four_ways(large: int, sweep: int, centre: complex, middle: complex):
    """From the origin to 1+1j with radius 1 there are two centres, and two ways around each."""
    (line,) = polylines(f"M 0 0 A 1 1 0 {large} {sweep} 1 1")
    assert all(abs(abs(corner - centre) - 1) < 1e-9 for corner in line)
    assert abs(line[24] - middle) < 1e-9


def test_an_ellipse_may_be_turned_and_flags_need_no_spaces():
    (line,) = polylines("M 0 -2 a1 2 90 012 2")
    assert abs(line[-1] - 2) < 1e-9
    assert _close(line, polylines("M 0 -2 A 1 2 90 0 1 2 0")[0])
    (half,) = polylines("M -2 0 A 1 2 90 0 1 2 0")
    assert abs(half[24] - (-1j)) < 1e-9


def test_radii_too_small_for_their_ends_grow():
    (line,) = polylines("M 0 0 A 1 1 0 0 1 4 0")
    assert abs(line[24] - (2 - 2j)) < 1e-9


def test_an_arc_without_a_radius_is_a_line():
    (line,) = polylines("M 0 0 A 0 1 0 0 1 4 0")
    assert all(corner.imag == 0 for corner in line)


@pytest.mark.parametrize("path", ["", "M 0 0", "M", "nonsense", "L", "Z", "M 1 1 H", "M 1 1 1e999 0"])
def test_what_draws_nothing_gives_no_line(path: str):
    assert polylines(path) == []


def test_a_command_that_lacks_arguments_is_passed_over():
    assert polylines("M 0 0 H L 1 0 C 1 2 3 L 1 1") == [[0, 1, 1 + 1j]]


def test_reading_stops_at_what_is_no_path_data():
    assert polylines("M 0 0 L 1 0 oops L 1 1") == [[0, 1]]


@given(st.text("MmLlHhVvCcSsQqTtAaZz0123456789.- ,e", max_size=60))
def test_any_text_gives_lines_of_finite_corners(path: str):
    for line in polylines(path):
        assert len(line) > 1


BOX = Box(0.25, 0.5, 0.75, 1.0)


def test_a_polygon_is_placed_in_its_box_and_scaled_to_the_image():
    segment = Segment("M 0 0 L 1 0 L 1 1 Z", BOX)
    assert segment.polygon(200, 100) == [(50, 50), (150, 50), (150, 100), (50, 50)]
    assert segment.polygon() == [(0.25, 0.5), (0.75, 0.5), (0.75, 1.0), (0.25, 0.5)]


def test_the_polygon_is_the_largest_of_the_polygons():
    segment = Segment("M 0 0 h .1 v .1 z M .2 .2 v .8 h .8 v -.8 z", BOX)
    small, large = segment.polygons(100, 100)
    assert segment.polygon(100, 100) == large
    assert (len(small), len(large)) == (4, 5)


def test_an_outline_that_draws_nothing_has_no_polygon_and_an_empty_mask():
    segment = Segment("M 0 0", BOX)
    assert (segment.polygons(9, 9), segment.polygon(9, 9)) == ([], [])
    assert segment.to_pil_mask(4, 3).getbbox() is None


def test_a_mask_is_filled_inside_the_outline():
    mask = Segment("M 0 0 H 1 V 1 H 0 Z", BOX).to_pil_mask(40, 20)
    assert (mask.mode, mask.size) == ("L", (40, 20))
    assert mask.getpixel((20, 15)) == 255
    assert mask.getpixel((5, 15)) == mask.getpixel((35, 15)) == mask.getpixel((20, 5)) == 0
    # Within a pixel at each side.
    left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)
    assert (left, top, right, bottom) == pytest.approx((10, 10, 30, 20), abs=1)


def test_a_polygon_that_goes_the_other_way_round_is_a_hole():
    whole = Box(0, 0, 1, 1)
    ring = Segment("M 0 0 H 1 V 1 H 0 Z M .25 .25 V .75 H .75 V .25 Z", whole).to_pil_mask(40, 40)
    assert (ring.getpixel((2, 20)), ring.getpixel((20, 20))) == (255, 0)
    disc = Segment("M 0 0 H 1 V 1 H 0 Z M .25 .25 H .75 V .75 H .25 Z", whole).to_pil_mask(40, 40)
    assert (disc.getpixel((2, 20)), disc.getpixel((20, 20))) == (255, 255)


OLD_NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation")
"""`pycocotools.mask.decode` is older than a keyword of NumPy."""


def some_outlines(count: int) -> list[tuple[Segment, int, int]]:
    """Outlines of lines, curves, arcs and holes in boxes of all sizes, with sizes of images."""
    chance, found = random.Random(48), []
    for number in range(count):
        width, height = chance.randint(60, 700), chance.randint(60, 700)
        left, top = chance.uniform(0, 0.5), chance.uniform(0, 0.5)
        box = Box(left, top, left + chance.uniform(0.3, 0.5), top + chance.uniform(0.3, 0.5))
        num_corners = chance.randint(3, 12)
        corners = [
            0.5 + 0.5j + cmath.rect(chance.uniform(0.25, 0.6), 2 * math.pi * place / num_corners)
            for place in range(num_corners)
        ]
        path = f"M {corners[0].real:.3f} {corners[0].imag:.3f}"
        for before, corner in itertools.pairwise([*corners, corners[0]]):
            bend = (before + corner) / 2 * chance.uniform(0.9, 1.1)
            to = f"{corner.real:.3f} {corner.imag:.3f}"
            kind = chance.choice("LLQCA") if number % 3 else "L"
            mid = f"{bend.real:.3f} {bend.imag:.3f}"
            path += {"L": f" L {to}", "Q": f" Q {mid} {to}", "C": f" C {mid} {mid} {to}"}.get(
                kind, f" A .6 .6 0 0 1 {to}"
            )
        path += " Z"
        if number % 4 == 0:  # a hole: it goes the other way round
            path += " M .45 .45 L .45 .55 L .55 .55 L .55 .45 Z"
        if number % 5 == 0:  # a second part, beyond the box and maybe the image
            path += " M .9 .9 H 1.4 V 1.2 H .9 Z"
        found.append((Segment(path, box), width, height))
    return found


def winding(polygons: Iterable[Iterable[tuple[float, float]]], width: int, height: int) -> NDArray[np.bool_]:
    """The mask by its definition: how often the polygons go around the centre of each pixel, as a sum of angles."""
    y, x = np.mgrid[0:height, 0:width] + 0.5
    turns = np.zeros((height, width))
    for polygon in polygons:
        corners = [complex(*corner) for corner in polygon]
        for one, other in itertools.pairwise([*corners, corners[0]]):
            a, b = one - (x + 1j * y), other - (x + 1j * y)
            turns += np.angle(b * a.conj())
    return np.abs(turns) > math.pi


def overlap(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float((one & other).sum() / max(1, (one | other).sum()))


@OLD_NUMPY
def test_run_lengths_of_200_outlines_are_those_of_pycocotools_and_all_forms_agree():
    for segment, width, height in some_outlines(200):
        encoded = segment.to_rle(width, height)
        with Image.open(io.BytesIO(segment.to_png(width, height))) as image:
            assert (image.mode, image.size) == ("L", (width, height))
            pixels = np.asarray(image)
        assert set(np.unique(pixels)) <= {0, 255}
        theirs: Any = coco.encode(np.asfortranarray(pixels == 255))
        assert encoded == {"size": theirs["size"], "counts": theirs["counts"].decode()}
        decoded = coco.decode({"size": encoded["size"], "counts": encoded["counts"].encode()})
        assert (decoded == (pixels == 255)).all()


@OLD_NUMPY
def test_masks_are_filled_where_the_path_goes_around_the_centres_of_pixels():
    for segment, width, height in some_outlines(20):
        pixels = np.asarray(segment.to_pil_mask(width, height)) == 255
        assert overlap(pixels, winding(segment.polygons(width, height), width, height)) >= 0.999
        # COCO's own way from a polygon to a mask knows no holes, and draws the lines themselves, too.
        whole = Segment(segment.svg_path.partition(" Z")[0], segment.box)
        flat: Any = [number for corner in whole.polygon(width, height) for number in corner]
        theirs = coco.decode(coco.frPyObjects([flat], height, width))[:, :, 0] == 1
        assert overlap(np.asarray(whole.to_pil_mask(width, height)) == 255, theirs) >= 0.95


@pytest.mark.parametrize("polygons", [[], [[(0, 0), (5, 0)]], [[(-9, -9), (99, -9), (99, 99), (-9, 99)]]])
def test_empty_and_full_masks_have_one_run_or_two(polygons: list[list[tuple[float, float]]]):
    pixels = np.asarray(mask(polygons, 7, 5))
    assert len(np.unique(pixels)) == 1
    theirs: Any = coco.encode(np.asfortranarray(pixels == 255))
    assert run_length_counts(polygons, 7, 5) == theirs["counts"].decode()


def test_masks_of_hostile_sizes_and_outlines_are_refused_or_cheap():
    square = Segment("M 0 0 H 1 V 1 H 0 Z", Box(0, 0, 1, 1))
    assert len(square.to_rle(20_000, 20_000)["counts"]) < 10
    for make in (square.to_pil_mask, square.to_png):
        with pytest.raises(MaskTooLarge, match="at most 67108864 pixels"):
            make(20_000, 20_000)
    for size in ((0, 5), (5, -1), (70_000, 5)):
        with pytest.raises(MaskTooLarge, match="sides"):
            square.to_rle(*size)
    zigzag = Segment("M 0 0" + " L 1 .5 L 0 .6" * 200, Box(0, 0, 1, 1))
    with pytest.raises(MaskTooLarge, match="too many lines"):
        zigzag.to_rle(20_000, 20_000)
    far = Segment("M -1e300 -1e300 L 1e300 -1e300 L 1e308 1e308 L -1e308 1e308 Z", Box(0, 0, 1, 1))
    assert far.to_rle(9, 4) == square.to_rle(9, 4)


@pytest.mark.parametrize(
    "path",
    [
        "M0 0 l1e308 0 l1e308 1 l1e308 1 z",
        "M0 0 c 1e308 1e308 -1e308 1e308 0 1 z",
        "M0 0 A1e308 1e308 0 0 1 1e-30 0 L 1 1 z",
        "M0 0 l 1 0 A 1e-30 1e308 .5 1 1 1e-308 .5",
        "M0 0 a .5 .5 1e300 1 0 -1e308 -2",
        "M0 0 A 3 1 1e-320 1 0 0 1",
        "M0 0 C 1e-30 1e-30 1e20 .5 1e154 3 c .5 1e300 -1e308 .5 1e-30 -2 A 3 1e300 1e-320 1 0 0 1",
        "M 1e20 1e20 a 1e-3 1e-3 0 1 1 1e-3 1e-3",
    ],
)
def test_numbers_of_any_size_make_finite_corners_and_a_mask(path: str):
    segment = Segment(path, Box(0.25, 0.25, 0.75, 0.75))
    corners = [corner for line in segment.polygons(40, 30) for corner in line]
    assert corners
    assert all(map(math.isfinite, (side for corner in corners for side in corner)))
    assert segment.to_rle(40, 30)["size"] == [30, 40]
