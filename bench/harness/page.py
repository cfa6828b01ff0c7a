"""The page of a run: what was measured and how, plots, and tables; one HTML file that needs nothing but itself.

Beside the load's own rows it plots the tables of other benches that have a size to plot against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.harness.plot import Axis, Series, line_plot
from bench.harness.report import Results, Table, number
from bench.harness.summary import Row
from bench.harness.workload import WORKLOADS

# Columns of other benches that a cost is plotted against, by what they are called there.
SIZES: Mapping[str, str] = {
    "batch": "requests in a batch",
    "crops": "crops of an image",
    "context": "tokens of context",
    "prompt tokens": "tokens of a prompt",
    "prompts": "prompts in a batch",
    "tokens": "tokens",
}
# What the numbers in the keys of other benches' tables count.
SIZES_OF_PARTS: Mapping[str, str] = {"vision": "crops", "decode_step": "requests in a batch", "prefill": "prompts"}
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1120px; margin: 24px auto; padding: 0 16px; color: #111; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #e3e3e3; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; overflow-wrap: anywhere; } .facts td:first-child { color: #555; white-space: nowrap; }
.plots { display: flex; flex-wrap: wrap; gap: 16px; } .plots svg { max-width: 100%; height: auto; }
p, dl { max-width: 85ch; } dt { font-weight: 600; } dd { margin: 0 0 6px 1.5em; }
"""
_MEASURES = {
    "closed loop": "so many requests run at all times: each caller asks again as soon as it is answered",
    "open loop": "requests are sent at random moments, at a rate that does not depend on the answers",
    "first token": "from sending a request to the first piece of its answer",
    "between pieces": "from one piece of an answer to the next",
    "per token": "the average time of the tokens after the first piece, one value for each request",
    "p50, p90, p99": "half, nine tenths and 99 in 100 of the values are at most so large",
    "client cores, client lag": "what the load itself cost: the cores that its busiest process used, and how "
    "late it was. Near 1 core a row measures the client",
}


def write_page(file: Path, results: Results, parts: Mapping[str, Any]) -> None:
    """Write the page. `parts`: results of other benches by name, to plot as well."""
    names = dict.fromkeys(row.workload for row in results.rows)
    sent = {name: WORKLOADS[name].description for name in names if name in WORKLOADS}
    objective = results.objective
    goodput = (
        f"answers whose first token came within {number(objective.first_token_ms)} ms and whose others took "
        f"at most {number(objective.per_token_ms)} ms each, on average"
    )
    body = [f"<h1>Load on {escape(str(results.server.get('model', 'a server')))}</h1>"]
    body.append("<h2>What was measured</h2>")
    body.append(f'<table class="facts">{"".join(_row(fact) for fact in results.facts().items())}</table>')
    body.append(f"<h2>What the requests are</h2>{_definitions(sent)}")
    body.append(f"<h2>What the numbers are</h2>{_definitions(_MEASURES | {'answered in time': goodput})}")
    body.append(f'<h2>Plots</h2><div class="plots">{"".join(load_plots(results))}</div>')
    for title, table in results.tables():
        body.append(f"<h2>{escape(title)}</h2>{_html(table)}")
    for name, part in parts.items():
        plots = [plot for plot in part_plots(name, part) if plot]
        if plots:
            body.append(f'<h2>{escape(name)}</h2><div class="plots">{"".join(plots)}</div>')
    head = f'<meta charset="utf-8"><title>Load</title><style>{_STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{page}\n", encoding="utf-8")


def _definitions(meanings: Mapping[str, str]) -> str:
    items = (f"<dt>{escape(name)}</dt><dd>{escape(meaning)}.</dd>" for name, meaning in meanings.items())
    return f"<dl>{''.join(items)}</dl>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def load_plots(results: Results) -> Iterator[str]:
    """Rates and times of both loops."""
    at_once = Axis("requests at once", log_base=2)
    closed = [row for row in results.rows if not row.is_open]
    for title, label, value_of, log_base in (
        ("Requests per second", "requests/s", lambda row: row.requests_per_s, None),
        ("Tokens per second", "tokens/s", lambda row: row.tokens_per_s, None),
        ("Time to first token, median", "ms", lambda row: row.first_token_ms.get("p50"), 10),
        ("Time to first token, 99th percentile", "ms", lambda row: row.first_token_ms.get("p99"), 10),
        ("Time per output token, median", "ms", lambda row: row.per_token_ms.get("p50"), None),
        ("Between two pieces, 99th percentile", "ms", lambda row: row.inter_token_ms.get("p99"), 10),
        ("Whole answer, median", "ms", lambda row: row.total_ms.get("p50"), 10),
    ):
        yield line_plot(title, at_once, Axis(label, log_base), _series(closed, value_of))
    opened = [row for row in results.rows if row.is_open]
    sent = Axis("requests sent per second")
    rates = [
        Series("answered", _points(opened, lambda row: row.requests_per_s)),
        Series("answered in time", _points(opened, lambda row: row.goodput_per_s)),
        Series("sent", _points(opened, lambda row: row.load), is_dashed=True),
    ]
    yield line_plot("Open loop: answered", sent, Axis("requests/s"), rates if opened else [])
    for title, name in (("first token", "first_token_ms"), ("whole answer", "total_ms")):
        lines = [
            Series(rank, _points(opened, lambda row, rank=rank, name=name: getattr(row, name).get(rank)))
            for rank in ("p50", "p90", "p99")
        ]
        yield line_plot(f"Open loop: {title}", sent, Axis("ms", log_base=10), lines)


def part_plots(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    """Plots for every table of another bench that has a size and times: rows under the names of their columns, one
    plot for each combination of words in them, or mappings whose keys end in a size, such as `float8 36`."""
    results = part.get("results", part)
    for title, table in results.items() if isinstance(results, Mapping) else [("", results)]:
        heading = f"{name}: {title}" if title else name
        if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
            kinds = dict.fromkeys(_kind(row) for row in table)
            for kind in kinds:
                size, lines = _lines_of_rows([row for row in table if _kind(row) == kind])
                yield _part_plot(f"{heading}, {kind}" if kind else heading, size, lines)
        elif isinstance(table, Mapping):
            yield _part_plot(heading, SIZES_OF_PARTS.get(name, "size"), _lines_of_sizes(table))


def _part_plot(title: str, size: str, lines: Sequence[Series]) -> str:
    """A plot, or nothing where there is no line that goes anywhere."""
    if not any(len(line.points) > 1 for line in lines):
        return ""
    return line_plot(title, Axis(size), Axis("ms"), lines)


def _kind(row: Mapping[str, Any]) -> str:
    """What a row says in words, or in ranges of numbers."""
    words = (value for value in row.values() if isinstance(value, str | list))
    return " ".join(value if isinstance(value, str) else " to ".join(map(str, value)) for value in words)


def _lines_of_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[Series]]:
    size = next((size for size in SIZES if all(_is_number(row.get(size)) for row in rows)), None)
    if size is None:
        return "", []
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _in_ms(name) and _is_number(value))
    lines = [
        Series(
            _without_unit(name) or "time",
            tuple(sorted((row[size], row[name] * _in_ms(name)) for row in rows if _is_number(row.get(name)))),
            is_dashed=name.startswith("limit"),
        )
        for name in names
    ]
    return SIZES[size], lines


def _lines_of_sizes(table: Mapping[str, Any]) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for key, row in table.items():
        kind, _, size = key.rpartition(" ")
        if size.isdecimal() and isinstance(row, Mapping):
            for name, value in row.items():
                # What the host spends on launching is hidden by a graph, and dwarfs the rest.
                if _in_ms(name) and _is_number(value) and "launch" not in name:
                    line = f"{kind} {_without_unit(name)}".strip()
                    points.setdefault(line, []).append((float(size), value * _in_ms(name)))
    return [Series(name, tuple(sorted(found))) for name, found in points.items()]


def _in_ms(name: str) -> float:
    """What a value of this name is to be multiplied by to be milliseconds; 0 where it is no time."""
    unit = name.replace("_", " ").rpartition(" ")[2]
    return {"ms": 1.0, "us": 1e-3, "µs": 1e-3}.get(unit, 0.0)


def _without_unit(name: str) -> str:
    return name.replace("_", " ").rpartition(" ")[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _series(rows: Sequence[Row], value_of: Callable[[Row], float | None]) -> list[Series]:
    names = dict.fromkeys(row.workload for row in rows)
    return [Series(name, _points([row for row in rows if row.workload == name], value_of)) for name in names]


def _points(rows: Sequence[Row], value_of: Callable[[Row], float | None]) -> tuple[tuple[float, float], ...]:
    pairs = ((row.load, value_of(row)) for row in rows)
    return tuple(sorted((load, value) for load, value in pairs if value is not None))


def _html(table: Table) -> str:
    head, *rows = table
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += [_row(row) for row in rows]
    return f"<table>{''.join(lines)}</table>"
