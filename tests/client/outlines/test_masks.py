"""Outlines in pixels, and as images."""

from __future__ import annotations

import pytest

from kestrel_client import Box, Segment

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
