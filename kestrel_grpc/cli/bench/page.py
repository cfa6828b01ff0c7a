"""Renders the page of `kestrel-grpc bench --html`: tables and plots of a result in one HTML file that loads
nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kestrel_grpc.cli.bench.plot import Axis, Series, bar_plot, line_plot, number
from kestrel_grpc.cli.bench.report import (
    TIME_NAMES,
    Table,
    condition_table,
    load_of,
    notes,
    ramp_table,
    rate_table,
    steps_of,
    time_table,
)
from kestrel_grpc.cli.conditions import flat_facts

STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1120px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #8884; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.facts td:first-child { opacity: .75; white-space: nowrap; }
.plots { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 16px; margin: 16px 0; }
.plots svg { max-width: 100%; height: auto; }
p, dl { max-width: 85ch; } dt { font-weight: 600; } dd { margin: 0 0 6px 1.5em; }
"""
_MEANINGS = {
    "at once": "a closed loop: so many requests run at all times; each caller asks again as soon as it is answered",
    "sent/s": "an open loop: requests are sent at random moments, at a rate that does not depend on the answers",
    "first token": "from sending a request to the first piece of its answer",
    "per token": "the average time of the tokens after the first piece, one value for each request",
    "between pieces": "from one piece of an answer to the next",
    "whole answer": "from sending a request to the end of its answer",
    "in time": "requests whose times were all within the bounds of `slo`, per second",
    "p50, p90, p95, p99": "so many in 100 of the values are at most so large",
}


def page(result: Mapping[str, Any]) -> str:
    """Returns the whole page."""
    title = f"Load on {result['model_id'] or 'a server'}"
    steps = steps_of(result)
    options = {name: _fact(value) for name, value in result["options"].items() if value not in (None, [])}
    facts = {"date": result["date"], "version": result["version"], **options}
    conditions = {
        heading: flat_facts(result[part])
        for part, heading in (("asked", "Requests"), ("server", "Server"), ("client", "Machine of the load"))
        if result.get(part)
    }
    body = [f"<h1>{escape(title)}</h1>"]
    if len(steps) > 1:
        body += [html_table(ramp_table(result)), plots(ramp_plots(steps))]
    for step in steps:
        body.append(f"<h2>{escape(load_of(step))}</h2>")
        body += [f"<p>{escape(note)}</p>" for note in notes(step)]
        body += [facts_table(dict(rate_table(step))), html_table(time_table(step)), plots(step_plots(step))]
        body.append(html_table([["status", "requests"], *_counts(step["statusCodeDistribution"])]))
        if step["errorDistribution"]:
            body.append(html_table([["error", "requests"], *_counts(step["errorDistribution"])]))
    body += [
        "<h2>What was measured</h2>",
        facts_table({**facts, **dict(condition_table(result))}),
        *(f"<h3>{heading}</h3>{facts_table(rows)}" for heading, rows in conditions.items()),
        "<h2>What the numbers are</h2>",
        definitions(_MEANINGS),
    ]
    return html_page(title, body)


def html_page(title: str, body: Sequence[str]) -> str:
    """Returns a document that contains its style."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'


def html_table(table: Table) -> str:
    """Returns a table with a head."""
    head, *rows = table
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += [_row(row) for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def facts_table(facts: Mapping[str, str]) -> str:
    """Returns a table of names and values."""
    return f'<table class="facts">{"".join(_row(fact) for fact in facts.items())}</table>'


def definitions(meanings: Mapping[str, str]) -> str:
    """Returns a list of words and their meanings."""
    items = (f"<dt>{escape(name)}</dt><dd>{escape(meaning)}.</dd>" for name, meaning in meanings.items())
    return f"<dl>{''.join(items)}</dl>"


def plots(svgs: Iterator[str]) -> str:
    """Returns plots side by side."""
    return f'<div class="plots">{"".join(svgs)}</div>'


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return number(value) if isinstance(value, float) else str(value)


def _counts(counts: Mapping[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in counts.items()]


def step_plots(step: Mapping[str, Any]) -> Iterator[str]:
    """Yields plots of the times of answers, and of the course of the window."""
    buckets = step["histogram"]
    edges = [1e3 * bucket["mark"] for bucket in buckets]
    if len(set(edges)) > 1:
        counts = [bucket["count"] for bucket in buckets]
        # The first bucket holds the fastest request alone, and has no width.
        counts[1] += counts[0]
        bars = list(zip(edges, edges[1:], counts[1:], strict=False))
        yield bar_plot("Whole answers", Axis("ms"), Axis("requests"), bars)
    latencies = [(item["percentage"], item["latency"] / 1e6) for item in step["latencyDistribution"]]
    yield line_plot("Whole answer by percentile", Axis("percentile"), Axis("ms"), [Series("ms", tuple(latencies))])
    timeline = step["timeline"]
    moments = [timeline["interval_s"] * (index + 0.5) for index in range(len(timeline["request_throughput"]))]
    if len(moments) > 2:
        for title, unit, names in (
            ("Requests per second, over time", "requests/s", {"request_throughput": "answered"}),
            ("Tokens per second, over time", "tokens/s", {"output_throughput": "tokens"}),
            ("Medians, over time", "ms", {"median_ttft_ms": "first token", "median_e2el_ms": "whole answer"}),
        ):
            lines = [Series(name, _present(moments, timeline[field])) for field, name in names.items()]
            yield line_plot(title, Axis("s"), Axis(unit), lines)


def ramp_plots(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields plots of rates and times by load."""
    is_open = steps[0]["max_concurrency"] is None
    loads = [step["request_rate"] if is_open else step["max_concurrency"] for step in steps]
    load = Axis("requests sent per second" if is_open else "requests at once", 2)
    rates = [Series("answered", _present(loads, [step["request_throughput"] for step in steps]))]
    rates += [Series("in time", _present(loads, [step["request_goodput"] for step in steps]))]
    if is_open:
        rates.append(Series("sent", _present(loads, loads), is_dashed=True))
    yield line_plot("Requests per second", load, Axis("requests/s"), rates)
    tokens = Series("tokens", _present(loads, [step["output_throughput"] for step in steps]))
    yield line_plot("Tokens per second", load, Axis("tokens/s"), [tokens])
    for short, name in TIME_NAMES.items():
        ranks = (("p50", "median"), ("p90", "p90"), ("p99", "p99"))
        lines = [
            Series(rank, _present(loads, [step[f"{field}_{short}_ms"] for step in steps])) for rank, field in ranks
        ]
        yield line_plot(name.removesuffix(", ms").capitalize(), load, Axis("ms", 10), lines)


def _present(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in zip(xs, ys, strict=True) if y is not None)
