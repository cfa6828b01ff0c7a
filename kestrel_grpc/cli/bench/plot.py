"""Draws plots as SVG text for a page, in colours that the colour-blind can distinguish, without libraries or
files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 352, 248
"""The size of a plot in units, which a page may scale."""
# Okabe and Ito's colours, without the yellow, which is hard to see on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 26, 36
_LEGEND_ROW = 15
_CHARACTER = 5.6
"""The approximate width of a character of the legend."""
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """Represents a line: points (x, y) in rising x. `is_dashed` marks a limit or a goal."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Describes a quantity with its unit. With `log_base` 2 or 10 the axis is logarithmic and shows values above 0
    only."""

    label: str
    log_base: int | None = None


def number(value: float) -> str:
    """Formats a number for people, with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def line_plot(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """Returns an `<svg>` element; empty if there are no values."""
    shown = [
        Series(line.name, points, line.is_dashed)
        for line in series
        if (points := tuple(point for point in line.points if _is_shown(point, x_axis, y_axis)))
    ]
    if not shown:
        return ""
    x = _Scale.of(x_axis, [x for line in shown for x, _ in line.points], _LEFT, WIDTH - _RIGHT, from_zero=False)
    y = _Scale.of(y_axis, [y for line in shown for _, y in line.points], HEIGHT - _BOTTOM, _TOP, from_zero=True)
    parts = [*_axes(x_axis, y_axis, x, y)]
    for index, line in enumerate(shown):
        parts += _line(line, COLORS[index % len(COLORS)], x, y)
    legend, height = _legend(shown) if len(shown) > 1 else ([], 0)
    return _svg(title, [*parts, *legend], HEIGHT + height)


def bar_plot(title: str, x_axis: Axis, y_axis: Axis, bars: Sequence[tuple[float, float, float]]) -> str:
    """Returns an `<svg>` element of bars: from, to, and height of each. Empty if there are none."""
    if not bars:
        return ""
    x = _Scale.of(x_axis, [edge for bar in bars for edge in bar[:2]], _LEFT, WIDTH - _RIGHT, from_zero=False)
    y = _Scale.of(y_axis, [height for _, _, height in bars], HEIGHT - _BOTTOM, _TOP, from_zero=True)
    parts = [*_axes(x_axis, y_axis, x, y)]
    for start, end, height in bars:
        width = max(x.place(end) - x.place(start) - 1, 1)
        top, bottom = y.place(height), HEIGHT - _BOTTOM
        label = f"{number(start)} to {number(end)}: {number(height)}"
        parts.append(
            f'<rect x="{x.place(start):.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
            f'fill="{COLORS[0]}"><title>{escape(label)}</title></rect>'
        )
    return _svg(title, parts, HEIGHT)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to positions on an axis: `place` returns units of the SVG."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], first: float, last: float, *, from_zero: bool) -> _Scale:
        """Returns an axis from `first` to `last`, in units, that covers all values."""
        if axis.log_base is None:
            ticks = _ticks(0.0 if from_zero else min(values), max(values))
            low, high = (ticks[0], ticks[-1]) if from_zero else (min(values), max(values))
        else:
            ticks = tuple(sorted(set(values))) if axis.log_base == 2 else _decimal_ticks(min(values), max(values))
            low, high = math.log(min(*values, *ticks)), math.log(max(*values, *ticks))
        if high <= low:
            low, high = low - 1.0, high + 1.0

        def place(value: float) -> float:
            share = ((value if axis.log_base is None else math.log(value)) - low) / (high - low)
            return first + share * (last - first)

        inside = tuple(tick for tick in ticks if min(first, last) - 0.5 <= place(tick) <= max(first, last) + 0.5)
        return cls(place, inside[:: max(1, math.ceil(len(inside) / (2 * _MOST_TICKS)))])


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Returns round numbers around the values."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= rough * 0.999)
    return tuple(step * index for index in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1))


def _decimal_ticks(low: float, high: float) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20 … around the values; powers of ten alone if those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 3 else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    below, above = (tick for tick in ticks if tick <= low), (tick for tick in ticks if tick >= high)
    first, last = max(below, default=ticks[0]), min(above, default=ticks[-1])
    return tuple(tick for tick in ticks if first <= tick <= last)


def _axes(x_axis: Axis, y_axis: Axis, x: _Scale, y: _Scale) -> Iterator[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in y.ticks:
        place = y.place(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>'
        yield f'<text x="{_LEFT - 5}" y="{place + 3:.1f}" text-anchor="end">{number(tick)}</text>'
    for tick in x.ticks:
        place = x.place(tick)
        yield f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{place:.1f}" y="{bottom + 12}" text-anchor="middle">{number(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{bottom + 27}" text-anchor="middle">{escape(x_axis.label)}</text>'
    middle = (_TOP + bottom) / 2
    yield (
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(y_axis.label)}</text>'
    )


def _line(line: Series, color: str, x: _Scale, y: _Scale) -> Iterator[str]:
    places = [(x.place(px), y.place(py)) for px, py in line.points]
    # Two points alone get no line: nothing was measured between them.
    if len(places) > 2 or line.is_dashed:
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        dashes = ' stroke-dasharray="5 3"' if line.is_dashed else ""
        yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>'
    if not line.is_dashed:
        for (px, py), (value_x, value_y) in zip(places, line.points, strict=True):
            label = escape(f"{line.name}: {number(value_y)} at {number(value_x)}")
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{color}"><title>{label}</title></circle>'


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Returns the legend, and its height. Below the axes it hides no line."""
    parts: list[str] = []
    x, y = float(_LEFT), HEIGHT + 4
    for index, line in enumerate(series):
        width = 24 + _CHARACTER * len(line.name)
        if x > _LEFT and x + width > WIDTH:
            x, y = float(_LEFT), y + _LEGEND_ROW
        color, dashes = COLORS[index % len(COLORS)], ' stroke-dasharray="4 2"' if line.is_dashed else ""
        parts.append(f'<path d="M{x:.0f} {y - 3}h14" stroke="{color}" stroke-width="2.5"{dashes}/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y}">{escape(line.name)}</text>')
        x += width
    return parts, y + _LEGEND_ROW - HEIGHT


_STYLE = (
    ".plot text{font:9px system-ui,sans-serif;fill:currentColor}.plot .title{font-size:11px;font-weight:600}"
    ".plot .grid{stroke:currentColor;stroke-opacity:.14}"
    ".plot .axis{fill:none;stroke:currentColor;stroke-opacity:.6}"
)


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"><style>{_STYLE}</style>'
        f'<text class="title" x="4" y="14">{escape(title)}</text>{"".join(parts)}</svg>'
    )


def _is_shown(point: tuple[float, float], x_axis: Axis, y_axis: Axis) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or axis.log_base is None)
        for value, axis in zip(point, (x_axis, y_axis), strict=True)
    )
