"""A line plot as SVG text: axes from the data, linear or logarithmic, a legend, and each value as a tooltip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 310
"""Pixels of a plot whose legend has one line."""
_LEFT, _RIGHT, _BOTTOM = 62, 14, 46
_LEGEND_TOP, _LINE_HEIGHT = 40, 18
# Okabe and Ito's colours, which the colour-blind tell apart, without the yellow that white swallows.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LETTER_WIDTH = 6.2


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

    def range_of(self, values: Sequence[float]) -> tuple[float, float]:
        """The least and the greatest value shown."""
        if self.log_base is None:
            return 0.0, max(values) * 1.05 or 1.0
        low, high = min(values), max(values)
        if self.log_base == 2:
            return (low, high) if high > low else (low / 2, high * 2)
        marks = self._decimal_marks(low / 10, high * 10)
        bottom = max(mark for mark in marks if mark <= low * 1.001)
        return bottom, min(mark for mark in marks if mark >= high and mark > bottom)

    def ticks(self, low: float, high: float) -> list[float]:
        """Round values from `low` to `high`."""
        if self.log_base == 2:
            first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
            return [2.0**power for power in range(first, last + 1)]
        if self.log_base is not None:
            marks = self._decimal_marks(low, high)
            return marks if len(marks) <= 9 else [mark for mark in marks if f"{mark:e}".startswith("1")]
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 5)
        return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]

    @staticmethod
    def _decimal_marks(low: float, high: float) -> list[float]:
        """1, 2, 5, 10, 20 … from `low` to `high`."""
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        marks = (digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5))
        return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]

    def place(self, value: float, low: float, high: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.log_base is not None:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def line_plot(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """An `<svg>` element; empty where there is nothing to show."""
    shown = [
        Series(line.name, points, line.is_dashed)
        for line in series
        if (points := tuple(point for point in line.points if _is_shown(point, x_axis, y_axis)))
    ]
    if not shown:
        return ""
    x_low, x_high = x_axis.range_of([x for line in shown for x, _ in line.points])
    y_low, y_high = y_axis.range_of([y for line in shown for _, y in line.points])
    places = _legend_places([line.name for line in shown])
    top = places[-1][1] + _LINE_HEIGHT
    bottom = top + HEIGHT - _BOTTOM - _LEGEND_TOP - _LINE_HEIGHT
    height = bottom + _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * x_axis.place(x, x_low, x_high)

    def down(y: float) -> float:
        return bottom - (bottom - top) * y_axis.place(y, y_low, y_high)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600" fill="#111111">{escape(title)}</text>',
    ]
    for tick in y_axis.ticks(y_low, y_high):
        y = down(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(_text(_LEFT - 6, y + 4, number(tick), "end"))
    for tick in x_axis.ticks(x_low, x_high):
        x = across(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#f0f0f0"/>')
        parts.append(_text(x, bottom + 15, number(tick), "middle"))
    middle = (top + bottom) / 2
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, height - 10, x_axis.label, "middle"))
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle" fill="#444444">'
        f"{escape(y_axis.label)}</text>"
    )
    for index, (line, (legend_x, legend_y)) in enumerate(zip(shown, places, strict=True)):
        color = COLORS[index % len(COLORS)]
        dashes = "5 4" if line.is_dashed else "none"
        stroke = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        # Two measurements say nothing of what is between them.
        if line.is_dashed or len(line.points) > 2:
            parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        for x, y in () if line.is_dashed else line.points:
            parts.append(
                f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{color}">'
                f"<title>{escape(line.name)}: {number(y)} at {number(x)}</title></circle>"
            )
        y = legend_y - 4
        parts.append(f'<line x1="{legend_x:.0f}" x2="{legend_x + 16:.0f}" y1="{y}" y2="{y}" {stroke}/>')
        parts.append(_text(legend_x + 20, legend_y, line.name, "start"))
    parts.append("</svg>")
    return "\n".join(parts)


def number(value: float) -> str:
    """For people: three digits that count."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each name stands, one after another, on as many lines as they need."""
    places: list[tuple[float, int]] = []
    x, y = float(_LEFT), _LEGEND_TOP
    for name in names:
        width = 34 + _LETTER_WIDTH * len(name)
        if x > _LEFT and x + width > WIDTH:
            x, y = float(_LEFT), y + _LINE_HEIGHT
        places.append((x, y))
        x += width
    return places


def _is_shown(point: tuple[float, float], x_axis: Axis, y_axis: Axis) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or axis.log_base is None)
        for value, axis in zip(point, (x_axis, y_axis), strict=True)
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444444">{escape(text)}</text>'
