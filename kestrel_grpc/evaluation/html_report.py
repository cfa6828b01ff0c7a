"""Makes the report of `kestrel-grpc evaluate` as one HTML file.

It shows scores, failures, and the worst cases with pictures. The pictures are in the file as `data:` URLs; the file
loads nothing and runs no script.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

from PIL import Image, ImageDraw

from kestrel_grpc.evaluation.tasks import Case, Label, Position, Report, Score

_LARGEST_SIDE_PX = 560
_TRUTH, _FOUND, _RIM = (26, 127, 55), (207, 34, 46), (255, 255, 255)
# An answer is drawn over a truth, which is wider: where both coincide, the truth shows on both sides.
_TRUTH_PX, _FOUND_PX = 6, 2
_MAX_FAILURES = 100
"""The most failed cases that are listed."""
_SPOT_PX = 6
TEXT_PX = 12
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --line: #d8dee4; --plate: #f6f8fa;
  --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9aa5b1; --line: #30363d;
  --plate: #161b22; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 24px auto; padding: 0 16px;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 24px; } h2 { font-size: 19px; margin-top: 36px; }
p { max-width: 90ch; } .soft { color: var(--soft); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } p, dd, td + td { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.cases { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 20px; }
article { background: var(--plate); border: 1px solid var(--line); border-radius: 6px; padding: 12px; }
article h3 { font-size: 14px; margin: 0 0 8px; overflow-wrap: anywhere; }
article img { max-width: 100%; height: auto; display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 8px 0 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; white-space: pre-wrap; }
"""
_LEGEND = (
    '<p><span style="color: rgb{truth}">■</span> truth &nbsp; <span style="color: rgb{found}">■</span> answer</p>'
)


class LabelLine(Protocol):
    """Represents a line of text that is laid out."""

    @property
    def width(self) -> float:
        """The width in pixels."""

    @property
    def height(self) -> float:
        """The height in pixels."""

    def draw(self, pencil: ImageDraw.ImageDraw, corner: Position, ink: tuple[int, int, int]) -> None:
        """Draws the line with its upper left corner at `corner`."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws pictures and the texts on them, in any script."""

    open_picture: Callable[[Path | bytes], Image.Image]
    """Returns a copy of a file in RGB, as the model sees it. Raises `OSError` or `ValueError` if it is no
    picture."""
    lay_out: Callable[[str], LabelLine]
    """Lays out a text in the size `TEXT_PX`."""


def html_page(
    title: str,
    report: Report,
    facts: Mapping[str, str],
    settings: Mapping[str, str],
    num_worst: int,
    drawing: Drawing,
) -> str:
    """Returns the whole report as HTML.

    `facts` are lines about the run, such as the server and the set, and `settings` the options of the server. At
    most `num_worst` cases are shown.
    """
    worst = report.worst(num_worst)
    failed = [case for case in report.cases if case.error]
    failure_line = f"Cases with a failed call, which counts as a wrong answer: {len(failed)}."
    num_right = sum(case.score >= 1.0 for case in report.cases)
    body = [
        f"<h1>{escape(title)}</h1>",
        _table(("score", "value", "95 % interval", "of"), map(score_cells, report.scores)),
        f"<p>Fully right: {num_right} of {len(report.cases)} cases.",
        f' <span class="bad">{failure_line}</span></p>' if failed else "</p>",
        *(f'<p class="bad">{escape(warning)}.</p>' for warning in report.warnings),
        "<h2>Run</h2>",
        _table((), facts.items()),
    ]
    if settings:
        body += ["<h2>Options of the server</h2>", _table((), settings.items())]
    if failed:
        listed = [(case.name, case.error) for case in failed[:_MAX_FAILURES]]
        body += ["<h2>Failed calls</h2>", _table(("case", "error"), listed)]
    if worst:
        body += [f"<h2>Worst cases ({len(worst)})</h2>"]
        if any(case.truth or case.found for case in worst):
            body.append(_LEGEND.format(truth=_TRUTH, found=_FOUND))
        body += ['<div class="cases">', *(_article(case, drawing) for case in worst), "</div>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    head += f"style-src 'unsafe-inline'\"><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'


def score_cells(score: Score) -> tuple[str, str, str, str]:
    """Returns name, value, interval and count as texts."""
    interval = "–" if score.interval is None else "{:.3f} to {:.3f}".format(*score.interval)
    return score.name, f"{score.value:.3f}", interval, str(score.count)


def _article(case: Case, drawing: Drawing) -> str:
    rows = {"asked": case.asked, "expected": case.expected, "answered": case.answered, "score": f"{case.score:.3f}"}
    if case.error:
        rows["error"] = case.error
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows.items())
    return f"<article><h3>{escape(case.name)}</h3>{_picture(case, drawing)}<dl>{lines}</dl></article>"


def _picture(case: Case, drawing: Drawing) -> str:
    try:
        canvas = drawing.open_picture(case.image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return '<p class="bad">The picture cannot be read.</p>'
    canvas.thumbnail((_LARGEST_SIDE_PX, _LARGEST_SIDE_PX))
    pencil = ImageDraw.Draw(canvas)
    for label in case.truth:
        _draw(pencil, label, _TRUTH, _TRUTH_PX, drawing)
    for label in case.found:
        _draw(pencil, label, _FOUND, _FOUND_PX, drawing)
    buffer = io.BytesIO()
    canvas.save(buffer, format="JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    text = escape(
        f"{case.picture}, with truth and answer" if case.truth or case.found else case.picture, quote=True
    )
    return f'<img alt="{text}" loading="lazy" src="data:image/jpeg;base64,{data}">'


def _draw(
    pencil: ImageDraw.ImageDraw, label: Label, colour: tuple[int, int, int], line_px: int, drawing: Drawing
) -> None:
    size = pencil.im.size
    for outline in label.outlines:
        corners = [_pixel(size, place) for place in outline]
        pencil.line([*corners, *corners[:1]], fill=colour, width=line_px)
    if label.box is not None:
        left, top, right, bottom = label.box
        first, last = _pixel(size, (left, top)), _pixel(size, (right, bottom))
        corner, opposite = _ordered(first, last)
        pencil.rectangle((*corner, *opposite), outline=colour, width=line_px)
        # Truths are named below their boxes and answers above, so that neither hides the other.
        corner = (corner[0], opposite[1]) if colour == _TRUTH else corner
        _write(pencil, drawing.lay_out(" ".join(label.name.split())), corner, colour)
    if label.point is not None:
        pencil.circle(_pixel(size, label.point), _SPOT_PX, fill=colour, outline=_RIM, width=2)


def _ordered(first: Position, last: Position) -> tuple[Position, Position]:
    xs, ys = sorted((first[0], last[0])), sorted((first[1], last[1]))
    return (xs[0], ys[0]), (xs[1], ys[1])


def _write(pencil: ImageDraw.ImageDraw, line: LabelLine, corner: Position, colour: tuple[int, int, int]) -> None:
    size = pencil.im.size
    width, height = line.width + 4, line.height + 4
    x = max(0.0, min(corner[0], size[0] - width))
    y = max(0.0, min(corner[1] - (0 if colour == _TRUTH else height), size[1] - height))
    pencil.rectangle((x, y, x + width, y + height), fill=colour)
    line.draw(pencil, (x + 2, y + 2), _RIM)


def _pixel(size: tuple[int, int], place: Position) -> Position:
    """Returns a position in pixels. Positions outside the picture are moved to its edge."""
    x, y = (0.0 if math.isnan(number) else min(max(number, 0.0), 1.0) for number in place)
    return x * (size[0] - 1), y * (size[1] - 1)


def _table(headings: Sequence[str], rows: Iterable[Iterable[str | None]]) -> str:
    head = f"<thead><tr>{''.join(f'<th>{escape(text)}</th>' for text in headings)}</tr></thead>" if headings else ""
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _cells(row: Iterable[str | None]) -> Iterator[str]:
    return (f"<td>{escape(text or '')}</td>" for text in row)
