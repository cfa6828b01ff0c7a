"""Plots."""

from xml.etree import ElementTree

import pytest

from bench.harness.plot import Axis, Series, line_plot

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_plot_is_well_formed_and_names_its_axes_its_lines_and_the_sizes():
    lines = [Series("a & b", ((1, 2.0), (128, 300.0))), Series("limit", ((1, 1.0), (128, 1.0)), is_dashed=True)]
    svg = line_plot("Cost <&>", Axis("batch", 2), Axis("ms"), lines)
    assert ElementTree.fromstring(svg).get("aria-label") == "Cost <&>"
    assert {"Cost <&>", "batch", "ms", "a & b", "limit", "1", "128"} <= set(texts(svg))


def test_equal_numbers_make_an_equal_plot():
    first, second = (
        line_plot("t", Axis("x"), Axis("y"), [Series("s", ((1.0, 1.0), (2.0, 3.0)))]) for _ in range(2)
    )
    assert first == second


def test_two_points_are_joined_by_no_line():
    def num_lines(num_points: int) -> int:
        svg = line_plot("t", Axis("x"), Axis("y"), [Series("s", tuple((x, x) for x in range(1, num_points + 1)))])
        return svg.count("stroke: #0072b2; stroke-width: 1.8")

    assert num_lines(2) < num_lines(3)


@pytest.mark.parametrize("log_base", [None, 2, 10])
def test_every_point_lies_within_the_plot(log_base: int | None):
    points = ((1.0, 0.3), (3.0, 47.0), (64.0, 8123.0))
    axis = Axis("x", log_base)
    root = ElementTree.fromstring(line_plot("t", axis, axis, [Series("s", points)]))
    _, _, width, height = map(float, root.get("viewBox", "").split())
    # The marks of a line are uses of one shape; ticks have shapes of their own.
    group = next(item for item in root.iter(f"{SVG}g") if len(item.findall(f"{SVG}use")) == len(points))
    marks = group.findall(f"{SVG}use")
    across, down = ([float(mark.get(name, "nan")) for mark in marks] for name in "xy")
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert 0 < min(across) <= max(across) < width
    assert 0 < min(down) <= max(down) < height


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((1.0, float("nan")),)])
def test_nothing_to_show_is_no_plot(points: tuple[tuple[float, float], ...]):
    assert line_plot("t", Axis("x"), Axis("y", 10), [Series("s", points)]) == ""
