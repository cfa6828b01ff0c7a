"""The results of a run: as JSON, as tables of text, and as one HTML page that needs nothing but itself.

Beside the load's own rows it shows ours over the peer's, and the tables of other benches that have a size to plot
against. Knows no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.harness.plot import Axis, Series, line_plot, number
from bench.harness.summary import Objective, Row
from bench.harness.workload import WORKLOADS

Table = list[list[str]]

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
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1480px; margin: 24px auto; padding: 0 16px; color: #111; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table { font-size: 13px; } td { white-space: nowrap; }
th, td { padding: 3px 5px; text-align: right; border-bottom: 1px solid #e3e3e3; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 16px; } .plots svg { max-width: 100%; }
p.note { color: #555; max-width: 75ch; }
"""


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run found. `peer` and `parts` are what other commands wrote."""

    machine: Mapping[str, Any]
    server: Mapping[str, Any]
    objective: Objective
    rows: tuple[Row, ...]
    client: tuple[Row, ...]
    """The same load on a server without a model."""
    peer: Mapping[str, Any] | None
    parts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": dict(self.machine),
            "server": dict(self.server),
            "objective": asdict(self.objective),
            "rows": [row.as_json() for row in self.rows],
            "client": [row.as_json() for row in self.client],
            "over_peer": over_peer(self.rows, self.peer),
        }

    def as_text(self) -> str:
        """Tables for a terminal."""
        blocks = [_listed({**self.machine, **self.server})]
        blocks += [f"{title}\n\n{_markdown(table)}" for title, table in self.tables()]
        return "\n\n".join(blocks)

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Titles and tables, those without a row left out."""
        closed, open_ = ([row for row in self.rows if row.is_open is is_open] for is_open in (False, True))
        if closed:
            yield "Closed loop: so many requests kept running", _row_table(closed, "at once")
        if open_:
            yield "Open loop: so many requests sent per second", _row_table(open_, "sent/s")
        if ratios := over_peer(self.rows, self.peer):
            yield "Ours, the peer's, and ours over the peer's", _ratio_table(ratios)
        if self.client:
            yield "The client alone, on a server without a model", _row_table(self.client, "at once")


_COMPARED: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("requests/s", lambda row: row["requests_per_s"]),
    ("tokens/s", lambda row: row["tokens_per_s"]),
    ("total p50 ms", lambda row: row["total_ms"].get("p50")),
    ("first token p50 ms", lambda row: row["first_token_ms"].get("p50")),
    ("per token p50 ms", lambda row: row["per_token_ms"].get("p50")),
)


def over_peer(rows: Sequence[Row], peer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Every closed row that the peer has too, number by number. Above 1 we do more, or take longer."""
    theirs = {(row["workload"], row["load"]): row for row in (peer or {}).get("rows", ())}
    found: list[dict[str, Any]] = []
    for row in rows:
        other = None if row.is_open else theirs.get((row.workload, row.load))
        if other is None:
            continue
        ours = row.as_json()
        for what, value_of in _COMPARED:
            a, b = value_of(ours), value_of(other)
            if a and b:
                found.append(
                    {"workload": row.workload, "load": row.load, "what": what, "ours": a, "peer": b, "ratio": a / b}
                )
    return found


def write_report(file: Path, results: Results) -> None:
    """Write the page."""
    facts = {**results.machine, **{f"server {name}": value for name, value in results.server.items()}}
    sent = [WORKLOADS[name] for name in dict.fromkeys(row.workload for row in results.rows) if name in WORKLOADS]
    body = [f"<h1>Load on {escape(str(results.server.get('model', 'a server')))}</h1>"]
    body.append(f'<p class="note">{escape(_listed(facts))}</p>')
    body += [f'<p class="note"><b>{escape(item.name)}</b>: {escape(item.description)}.</p>' for item in sent]
    body.append(
        f'<p class="note">Goodput counts answers whose first token came within '
        f"{number(results.objective.first_token_ms)} ms and whose others took at most "
        f"{number(results.objective.per_token_ms)} ms each, on average.</p>"
    )
    body.append(f'<div class="plots">{"".join(load_plots(results))}</div>')
    for title, table in results.tables():
        body.append(f'<h2>{escape(title)}</h2><div class="wide">{_html(table)}</div>')
    for name, part in results.parts.items():
        plots = [plot for plot in part_plots(name, part) if plot]
        if plots:
            body.append(f'<h2>{escape(name)}</h2><div class="plots">{"".join(plots)}</div>')
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load</title><style>{_STYLE}</style>'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{page}<body>{''.join(body)}</body></html>\n", encoding="utf-8")


def _listed(facts: Mapping[str, Any]) -> str:
    """Names and values in one line, numbers with a fraction rounded."""
    rounded = ((name, number(value) if isinstance(value, float) else value) for name, value in facts.items())
    return ", ".join(f"{name} {value}" for name, value in rounded)


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


def _row_table(rows: Sequence[Row], load: str) -> Table:
    table = [
        [
            "workload",
            load,
            "requests/s",
            "tokens/s",
            "in time/s",
            "first token p50/p90/p99 ms",
            "between p50/p90/p99 ms",
            "per token p50/p90/p99 ms",
            "total p50/p90/p99 ms",
            "requests",
            "errors",
            "client cores",
            "client lag ms",
        ]
    ]
    for row in rows:
        errors = ", ".join(f"{count} {name}" for name, count in row.errors.items())
        if row.wrong_lengths:
            errors += f"{', ' if errors else ''}{row.wrong_lengths} of another length"
        spreads = (row.first_token_ms, row.inter_token_ms, row.per_token_ms, row.total_ms)
        table.append(
            [
                row.workload,
                number(row.load),
                *map(number, (row.requests_per_s, row.tokens_per_s, row.goodput_per_s)),
                *(" / ".join(map(number, spread.values())) or "–" for spread in spreads),
                str(row.num_requests),
                errors or "0",
                number(row.busiest_client),
                number(row.client_lag_ms),
            ]
        )
    return table


def _ratio_table(ratios: Sequence[Mapping[str, Any]]) -> Table:
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for item in ratios:
        cell = f"{number(item['ours'])} / {number(item['peer'])} = {item['ratio']:.2f}"
        lines.setdefault((item["workload"], item["load"]), {})[item["what"]] = cell
    whats = [what for what, _ in _COMPARED]
    rows = [
        [name, number(load), *(cells.get(what, "–") for what in whats)] for (name, load), cells in lines.items()
    ]
    return [["workload", "at once", *whats], *rows]


def _markdown(table: Table) -> str:
    head, *rows = table
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _html(table: Table) -> str:
    head, *rows = table
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"
