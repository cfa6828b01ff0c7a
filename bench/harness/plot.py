"""Line plots as SVG text for a page: drawn by matplotlib, in colours that the colour-blind tell apart."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.harness.output import number

WIDTH_IN, HEIGHT_IN = 4.9, 3.4
"""Inches of a plot; an inch is 72 units of its SVG."""
# Okabe and Ito's colours, without the yellow that white swallows.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib, which measures with it
    "font.size": 9,
    "grid.color": "#e3e3e3",
    "svg.fonttype": "none",  # text stays text, which can be searched and read aloud
    "svg.hashsalt": "kestrel",  # equal numbers make an equal file
}


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points (x, y) in rising x. `is_dashed` for a limit or a goal."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """What is counted, with its unit. With `log_base` 2 or 10 it is logarithmic and shows values above 0 only."""

    label: str
    log_base: int | None = None


def line_plot(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """An `<svg>` element; empty where there is nothing to show."""
    shown = [
        Series(line.name, points, line.is_dashed)
        for line in series
        if (points := tuple(point for point in line.points if _is_shown(point, x_axis, y_axis)))
    ]
    if not shown:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes: Axes = figure.add_subplot()
        for index, line in enumerate(shown):
            _draw(axes, line, COLORS[index % len(COLORS)])
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axes.set_xlabel(x_axis.label)
        axes.set_ylabel(y_axis.label)
        _scale(axes, "x", x_axis, sorted({x for line in shown for x, _ in line.points}))
        _scale(axes, "y", y_axis, [y for line in shown for _, y in line.points])
        # Below the axes it hides no line.
        columns = min(len(shown), 4 if max(len(line.name) for line in shown) < 16 else 2)
        figure.legend(loc="outside lower left", ncols=columns, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _draw(axes: Axes, line: Series, color: str) -> None:
    xs, ys = zip(*line.points, strict=True)
    if line.is_dashed:
        axes.plot(xs, ys, label=line.name, color=color, linestyle="--", linewidth=1.5)
        return
    # Two measurements say nothing of what is between them.
    style = "-" if len(xs) > 2 else "none"
    axes.plot(xs, ys, label=line.name, color=color, linestyle=style, linewidth=1.8, marker="o", markersize=4)


def _scale(axes: Axes, which: str, axis: Axis, values: Sequence[float]) -> None:
    own = axes.xaxis if which == "x" else axes.yaxis
    if axis.log_base is not None:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=axis.log_base)
        own.set_minor_locator(NullLocator())
        if axis.log_base == 2:
            own.set_major_locator(FixedLocator(values))
        else:
            own.set_major_locator(FixedLocator(_decimal_ticks(min(values), max(values))))
    elif which == "y":
        axes.set_ylim(bottom=0)
    own.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _decimal_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20 … around the values; powers of ten alone where those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [digit * 10.0**power for power in powers for digit in digits]


def _is_shown(point: tuple[float, float], x_axis: Axis, y_axis: Axis) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or axis.log_base is None)
        for value, axis in zip(point, (x_axis, y_axis), strict=True)
    )
