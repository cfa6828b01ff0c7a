"""Outlines as polygons and masks."""

from __future__ import annotations

import cmath
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_client import Box, Segment
from kestrel_client.outlines import polylines


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
def test_straight_lines_keep_their_corners(path: str, corners: list[complex]) -> None:
    (line,) = polylines(path)
    assert _close(line, corners)


def test_each_move_starts_a_line_and_so_does_whatever_follows_a_close() -> None:
    first, second, third = polylines("M 0 0 L 1 0 Z L 0 2 M 5 5 l 1 1")
    assert first == [0, 1, 0]
    assert second == [0, 2j]
    assert third == [5 + 5j, 6 + 6j]


def test_a_cubic_curve_passes_where_its_formula_says() -> None:
    (line,) = polylines("M 0 0 C 0 4 4 4 4 0")
    assert len(line) == 49
    assert abs(line[24] - (2 + 3j)) < 1e-9
    assert line[-1] == 4


def test_a_quadratic_curve_passes_where_its_formula_says() -> None:
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
def test_a_smooth_curve_mirrors_the_last_curve_of_its_kind_only(smooth: str, spelt_out: str) -> None:
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
def test_the_flags_of_an_arc_choose_among_its_four_ways(
    large: int, sweep: int, centre: complex, middle: complex
) -> None:
    """From the origin to 1+1j with radius 1 there are two centres, and two ways around each."""
    (line,) = polylines(f"M 0 0 A 1 1 0 {large} {sweep} 1 1")
    assert all(abs(abs(corner - centre) - 1) < 1e-9 for corner in line)
    assert abs(line[24] - middle) < 1e-9


def test_an_ellipse_may_be_turned_and_flags_need_no_spaces() -> None:
    (line,) = polylines("M 0 -2 a1 2 90 012 2")
    assert abs(line[-1] - 2) < 1e-9
    assert _close(line, polylines("M 0 -2 A 1 2 90 0 1 2 0")[0])
    (half,) = polylines("M -2 0 A 1 2 90 0 1 2 0")
    assert abs(half[24] - (-1j)) < 1e-9


def test_radii_too_small_for_their_ends_grow() -> None:
    (line,) = polylines("M 0 0 A 1 1 0 0 1 4 0")
    assert abs(line[24] - (2 - 2j)) < 1e-9


def test_an_arc_without_a_radius_is_a_line() -> None:
    (line,) = polylines("M 0 0 A 0 1 0 0 1 4 0")
    assert all(corner.imag == 0 for corner in line)


@pytest.mark.parametrize("path", ["", "M 0 0", "M", "nonsense", "L", "Z", "M 1 1 H", "M 1 1 1e999 0"])
def test_what_draws_nothing_gives_no_line(path: str) -> None:
    assert polylines(path) == []


def test_a_command_that_lacks_arguments_is_passed_over() -> None:
    assert polylines("M 0 0 H L 1 0 C 1 2 3 L 1 1") == [[0, 1, 1 + 1j]]


def test_reading_stops_at_what_is_no_path_data() -> None:
    assert polylines("M 0 0 L 1 0 oops L 1 1") == [[0, 1]]


@given(st.text("MmLlHhVvCcSsQqTtAaZz0123456789.- ,e", max_size=60))
def test_any_text_gives_lines_of_finite_corners(path: str) -> None:
    for line in polylines(path):
        assert len(line) > 1


BOX = Box(0.25, 0.5, 0.75, 1.0)


def test_a_polygon_is_placed_in_its_box_and_scaled_to_the_image() -> None:
    segment = Segment("M 0 0 L 1 0 L 1 1 Z", BOX)
    assert segment.polygon(200, 100) == [(50, 50), (150, 50), (150, 100), (50, 50)]
    assert segment.polygon() == [(0.25, 0.5), (0.75, 0.5), (0.75, 1.0), (0.25, 0.5)]


def test_the_polygon_is_the_largest_of_the_polygons() -> None:
    segment = Segment("M 0 0 h .1 v .1 z M .2 .2 v .8 h .8 v -.8 z", BOX)
    small, large = segment.polygons(100, 100)
    assert segment.polygon(100, 100) == large
    assert (len(small), len(large)) == (4, 5)


def test_an_outline_that_draws_nothing_has_no_polygon_and_an_empty_mask() -> None:
    segment = Segment("M 0 0", BOX)
    assert (segment.polygons(9, 9), segment.polygon(9, 9)) == ([], [])
    assert segment.to_pil_mask(4, 3).getbbox() is None


def test_a_mask_is_filled_inside_the_outline() -> None:
    mask = Segment("M 0 0 H 1 V 1 H 0 Z", BOX).to_pil_mask(40, 20)
    assert (mask.mode, mask.size) == ("L", (40, 20))
    assert mask.getpixel((20, 15)) == 255
    assert mask.getpixel((5, 15)) == mask.getpixel((35, 15)) == mask.getpixel((20, 5)) == 0
    # Within a pixel at each side.
    left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)
    assert (left, top, right, bottom) == pytest.approx((10, 10, 30, 20), abs=1)


def test_a_polygon_that_goes_the_other_way_round_is_a_hole() -> None:
    whole = Box(0, 0, 1, 1)
    ring = Segment("M 0 0 H 1 V 1 H 0 Z M .25 .25 V .75 H .75 V .25 Z", whole).to_pil_mask(40, 40)
    assert (ring.getpixel((2, 20)), ring.getpixel((20, 20))) == (255, 0)
    disc = Segment("M 0 0 H 1 V 1 H 0 Z M .25 .25 H .75 V .75 H .25 Z", whole).to_pil_mask(40, 40)
    assert (disc.getpixel((2, 20)), disc.getpixel((20, 20))) == (255, 255)
