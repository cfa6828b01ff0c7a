"""Renders the page of `kestrel-grpc accept`: an HTML file with verdict, comparisons, pictures, speed and
machine."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from PIL import Image

from kestrel_client import (
    Box,
    DetectedObject,
    DetectResult,
    FinishReason,
    Point,
    PointResult,
    Segment,
    SegmentResult,
    Timing,
    Usage,
    draw,
)
from kestrel_runtime.verify.acceptance import TIMED_TOKENS, PrecisionResult, Speed, Verdict
from kestrel_runtime.verify.reference_fixture import AnsweredCall

_LARGEST_SIDE_PX = 380
"""The largest side of a picture on the page, in pixels."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --line: #d8dee4; --plate: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9aa5b1; --line: #30363d;
  --plate: #161b22; --good: #3fb950; --bad: #ff7b72; --warn: #d29922; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 24px auto; padding: 0 16px;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 24px; } h2 { font-size: 19px; margin-top: 36px; } h3 { font-size: 16px; margin-top: 28px; }
p, li { max-width: 90ch; } .soft { color: var(--soft); }
.verdict { border-left: 8px solid; border-radius: 4px; padding: 10px 16px; background: var(--plate); }
.verdict strong { font-size: 20px; } .passed { border-color: var(--good); } .failed { border-color: var(--bad); }
.incomplete { border-color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 4em; } th { color: var(--soft); font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.pictures { display: flex; flex-wrap: wrap; gap: 12px; } figure { margin: 0; }
figure img { max-width: 100%; height: auto; border: 1px solid var(--line); }
figcaption { font-size: 13px; color: var(--soft); } summary { cursor: pointer; }
code { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """Describes the source of the expected answers."""

    is_independent: bool
    """True if the answers are those of another implementation, not of this project's own plain backend."""
    summary: str
    notes: Sequence[str] = ()
    """The changes made to the reference, and the questions that it did not answer."""


def verdict_line(verdict: Verdict, reference: ReferenceFacts) -> str:
    """Returns the verdict as a sentence."""
    return str(verdict) + ("" if reference.is_independent else ", without an independent reference")


def page(
    model: str,
    results: Sequence[PrecisionResult],
    reference: ReferenceFacts,
    facts: Mapping[str, str],
    pictures: Mapping[str, bytes],
) -> str:
    """Returns the whole page. `facts` are shown as a table; `pictures` are the image files by name."""
    verdict = Verdict.of(results)
    body = [
        f"<h1>Acceptance of {escape(model)}</h1>",
        f'<div class="verdict {verdict}"><strong>{escape(verdict_line(verdict, reference).capitalize())}</strong>',
        "".join(f"<p>{escape(line)}</p>" for line in _summary(results, reference)),
        "</div>",
        *_what_differs(results),
        "<h2>Precisions</h2>",
        _precisions(results),
        '<p class="soft">Tensors are checked in each precision. Answers are checked in float32 and counted in '
        "shorter formats, where one rounding may change a greedy answer. The distance is the mean from each of the "
        "reference’s points to the nearest found, in shares of the image’s sides. The overlap is the mean "
        "intersection over union of each of the reference’s boxes with the best found.</p>",
        "<h2>Speed</h2>",
        _speeds(results),
        '<p class="soft">In this process, without a network. Each caller asks a question about one of '
        f"{_sizes(pictures)}, again as soon as it is answered, with at most {TIMED_TOKENS} tokens; no picture and "
        "no prompt comes from a cache.</p>",
        "<h2>Answers</h2>",
        *_answers(results, reference, pictures),
        "<h2>Tensors</h2>",
        *_tensors(results),
        "<h2>Machine and versions</h2>",
        _table((), [(_cell(name), _cell(value)) for name, value in facts.items()]),
        "<h2>Options of the engine</h2>",
        _settings(results),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>Acceptance of {escape(model)}: {verdict}</title><style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'


def _summary(results: Sequence[PrecisionResult], reference: ReferenceFacts) -> Iterator[str]:
    yield reference.summary
    names = ", ".join(result.name for result in results)
    num_failures = sum(len(result.failures) for result in results)
    yield f"Compared in {names}: {num_failures or 'no'} difference{'' if num_failures == 1 else 's'} beyond bounds."


def _what_differs(results: Sequence[PrecisionResult]) -> Iterator[str]:
    lines = [(result.name, "bad", line) for result in results for line in result.failures]
    lines += [(result.name, "warn", line) for result in results for line in result.problems]
    if lines:
        yield "<h2>What differs or is missing</h2><ul>"
        yield from (
            f'<li><span class="{kind}">{escape(name)}</span>: {escape(line)}</li>' for name, kind, line in lines
        )
        yield "</ul>"


def _precisions(results: Iterable[PrecisionResult]) -> str:
    rows: list[tuple[str, ...]] = []
    for result in results:
        num_passed = sum(case.complaint is None for case in result.cases)
        shares = [case.comparison.share for case in result.cases if case.comparison is not None]
        near = result.agreement
        rows.append(
            (
                _cell(result.name),
                _cell(result.setup),
                _cell(f"{num_passed} of {len(result.cases)}", "good" if num_passed == len(result.cases) else "bad"),
                _cell(f"{max(shares):.3f}" if shares else "–"),
                _cell(f"{near.num_equal} of {near.num_answers}", _class_of_answers(result)),
                _cell("–" if near.point_distance is None else f"{near.point_distance:.4f}"),
                _cell("–" if near.box_overlap is None else f"{near.box_overlap:.3f}"),
            )
        )
    headings = ("precision", "setup", "tensors within bounds", "largest error / bound", "equal answers")
    return _table((*headings, "distance of points", "overlap of boxes"), rows)


def _class_of_answers(result: PrecisionResult) -> str:
    near = result.agreement
    if not result.is_exact:
        return ""
    return "good" if near.num_equal + len(result.uncertain) >= near.num_answers else "bad"


def _speeds(results: Iterable[PrecisionResult]) -> str:
    def cells(name: str, speed: Speed) -> tuple[str, ...]:
        numbers = (f"{speed.requests_per_s:.2f}", f"{speed.tokens_per_s:.1f}", f"{1000 * speed.p50_s:.0f}")
        return tuple(map(_cell, (name, str(speed.num_callers), *numbers, str(speed.num_requests))))

    rows = [cells(result.name, speed) for result in results for speed in result.speeds]
    headings = ("precision", "callers", "requests/s", "tokens/s", "median ms", "requests measured")
    return _table(headings, rows) if rows else "<p>Not measured.</p>"


def _sizes(pictures: Mapping[str, bytes]) -> str:
    """Returns the number of the pictures, and their sizes in pixels."""
    sizes: Counter[str] = Counter()
    for data in pictures.values():
        with Image.open(io.BytesIO(data)) as image:
            sizes["{} × {}".format(*image.size)] += 1
    listed = ", ".join(f"{count} of {size} px" for size, count in sizes.items())
    return f"{len(pictures)} picture{'' if len(pictures) == 1 else 's'} ({listed})"


def _settings(results: Sequence[PrecisionResult]) -> str:
    """Returns a row for each option of the engine, with its value in each precision."""
    rows = [
        (_cell(name), *(_cell(result.settings.get(name, "–")) for result in results))
        for name in dict.fromkeys(name for result in results for name in result.settings)
    ]
    return _table(("option", *(result.name for result in results)), rows)


def _answers(
    results: Sequence[PrecisionResult], reference: ReferenceFacts, pictures: Mapping[str, bytes]
) -> Iterator[str]:
    if reference.notes:
        yield "<p>About the reference:</p><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in reference.notes)
        yield "</ul>"
    of_reference = "reference" if reference.is_independent else "plain float32"
    for name in (*pictures, None):
        # Results have the same calls in the same order, unless an engine could not start.
        columns = [
            (result, [(place, call) for place, call in enumerate(result.answers) if call.image == name])
            for result in results
            if result.answers
        ]
        calls = [call for _, call in columns[0][1]] if columns else []
        if name is not None:
            yield f"<h3>{escape(name)}</h3>"
            yield from _pictures(pictures[name], of_reference, calls, columns)
        elif calls:
            yield "<h3>Without an image</h3>"
        rows: list[tuple[str, ...]] = []
        for place, call in enumerate(calls):
            expected = call.call.get("expect")
            row = [_cell(_asked(call)), _cell("no answer" if expected is None else _answer_text(expected))]
            for result, own in columns:
                row.append(_answer_cell(result, *own[place]))
            rows.append(tuple(row))
        if rows:
            yield _table(("call", of_reference, *(result.name for result, _ in columns)), rows)


def _asked(call: AnsweredCall) -> str:
    words: list[str] = []
    for name, value in call.call["args"].items():
        if name in ("question", "object"):
            words.append(value)
        elif value is True:
            words.append(f"with {name}")
        elif value not in (None, False):
            words.append(f"{name} {value}")
    return f"{call.call['skill']}: {', '.join(words)}"


def _answer_cell(result: PrecisionResult, place: int, call: AnsweredCall) -> str:
    text = call.refused if call.answer is None else _answer_text(call.answer)
    if not call.complaint:
        return _cell(text)
    if call.answer is not None and place in result.uncertain:
        return _cell(f"{text} (differs; changes with the last bits of the weights, so not checked)", "warn")
    is_wrong = result.is_exact or call.answer is None
    return _cell(f"{text} (differs)" if call.answer is not None else text, "bad" if is_wrong else "warn")


def _answer_text(answer: Mapping[str, Any]) -> str:
    if "points" in answer:
        places = [f"({point['x']:.3f}, {point['y']:.3f})" for point in answer["points"]]
        return " ".join(places) or "none"
    if "objects" in answer:
        return " ".join(map(_box_text, answer["objects"])) or "none"
    if "segments" in answer:
        outlines = [f"{_box_text(item['bbox'])}, path of {len(item['svg_path'])}" for item in answer["segments"]]
        return "; ".join(outlines) or "none"
    text = answer.get("caption", answer.get("answer", ""))
    if "reasoning" in answer:
        return f"[{answer['reasoning']['text']}] {text}"
    return text


def _box_text(sides: Mapping[str, float]) -> str:
    return "({x_min:.3f}, {y_min:.3f}, {x_max:.3f}, {y_max:.3f})".format(**sides)


def _pictures(
    data: bytes,
    of_reference: str,
    calls: Sequence[AnsweredCall],
    columns: Sequence[tuple[PrecisionResult, Sequence[tuple[int, AnsweredCall]]]],
) -> Iterator[str]:
    found = {of_reference: [(call, call.call["expect"]) for call in calls if "expect" in call.call]}
    for result, own in columns:
        found[result.name] = [(call, call.answer) for _, call in own if call.answer is not None]
    image = draw(data)
    image.thumbnail((_LARGEST_SIDE_PX, _LARGEST_SIDE_PX))
    yield '<div class="pictures">'
    for name, answers in found.items():
        if not answers:
            continue
        yield f'<figure><img alt="what {escape(name)} found" src="{_drawn(image, answers)}">'
        yield f"<figcaption>{escape(name)}</figcaption></figure>"
    yield "</div>"


def _drawn(image: Image.Image, answers: Iterable[tuple[AnsweredCall, Mapping[str, Any]]]) -> str:
    """Returns the picture with all points, boxes and outlines, as a data URI."""
    results = [result for call, answer in answers for result in _drawable(call, answer)]
    buffer = io.BytesIO()
    draw(image, *results).save(buffer, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _drawable(
    call: AnsweredCall, answer: Mapping[str, Any]
) -> Iterator[PointResult | DetectResult | SegmentResult]:
    """Yields the results of an answer as the client would return them."""
    common: dict[str, Any] = {
        "request_id": "",
        "model": "",
        "finish_reason": FinishReason.STOP,
        "usage": Usage(0, 0, 0),
        "timing": Timing(0.0, 0.0, 0.0, 0.0, 0.0),
        "object": f"{call.call['skill']}: {call.call['args'].get('object', '')}",
    }
    if "points" in answer:
        yield PointResult(points=tuple(Point(**place) for place in answer["points"]), **common)
    if "objects" in answer:
        yield DetectResult(objects=tuple(DetectedObject(_box(sides)) for sides in answer["objects"]), **common)
    if "segments" in answer:
        outlines = tuple(Segment(item["svg_path"], _box(item["bbox"])) for item in answer["segments"])
        yield SegmentResult(segments=outlines, **common)


def _box(sides: Mapping[str, float]) -> Box:
    return Box(**{name: min(max(side, 0.0), 1.0) for name, side in sides.items()})


def _tensors(results: Iterable[PrecisionResult]) -> Iterator[str]:
    for result in results:
        rows: list[tuple[str, ...]] = []
        for case in result.cases:
            measured, comparison = ("", "", ""), case.comparison
            if comparison is not None:
                measured = comparison.measure, f"{comparison.error:.2e}", f"{comparison.tolerance:.2e}"
            state = _cell("ok", "good") if case.complaint is None else _cell(case.complaint, "bad")
            rows.append((*map(_cell, (case.name, *measured)), state))
        title = f"{result.name}: {len(rows)} comparisons"
        if rows:
            table = _table(("image and tensor", "measure", "error", "bound", "result"), rows)
            yield f"<details><summary>{escape(title)}</summary>{table}</details>"
        else:
            yield f"<p>{escape(result.name)}: no tensors were compared.</p>"


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table of cells; without headings if there are none."""
    head = f"<thead><tr>{''.join(f'<th>{escape(text)}</th>' for text in headings)}</tr></thead>" if headings else ""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'
