"""Plots."""

from xml.etree import ElementTree

import pytest

from bench.harness.plot import Axis, Series, line_plot, number

SVG = "{http://www.w3.org/2000/svg}"


def test_a_plot_is_well_formed_and_names_every_value():
    svg = line_plot("Cost <&>", Axis("batch", 2), Axis("ms"), [Series("a & b", ((1, 2.0), (128, 300.0)))])
    root = ElementTree.fromstring(svg)
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a & b: 2 at 1", "a & b: 300 at 128"]


def test_two_points_are_joined_by_no_line():
    drawn = {
        num: line_plot("t", Axis("x"), Axis("y"), [Series("s", tuple((x, x) for x in range(1, num + 1)))])
        for num in (2, 3)
    }
    assert "<polyline" not in drawn[2]
    assert "<polyline" in drawn[3]


@pytest.mark.parametrize("log_base", [None, 2, 10])
def test_every_point_lies_between_the_axes(log_base: int | None):
    points = ((1.0, 0.3), (3.0, 47.0), (64.0, 8123.0))
    axis = Axis("x", log_base)
    svg = line_plot("t", axis, axis, [Series("s", points)])
    circles = list(ElementTree.fromstring(svg).iter(f"{SVG}circle"))
    assert len(circles) == 3
    across = [float(circle.get("cx", "nan")) for circle in circles]
    down = [float(circle.get("cy", "nan")) for circle in circles]
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert min(across) >= 62
    assert max(across) <= 466
    assert min(down) >= 58
    assert max(down) <= 264


def test_ticks_are_round():
    assert Axis("x", 2).ticks(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert Axis("x", 10).ticks(1, 20) == pytest.approx([1, 2, 5, 10, 20])
    assert Axis("x").ticks(0, 105) == [0, 25, 50, 75, 100]


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((1.0, float("nan")),)])
def test_nothing_to_show_is_no_plot(points: tuple[tuple[float, float], ...]):
    assert line_plot("t", Axis("x"), Axis("y", 10), [Series("s", points)]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str):
    assert number(value) == text
