"""A page with plots of the numbers that `bench.serve` has written.

python -m bench.page bench/out/serve.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from bench.harness.report import Results
from bench.harness.summary import Row
from bench.harness.workload import WORKLOADS
from kestrel_grpc.cli.bench_page import definitions, facts_table, html_page, html_table, plots
from kestrel_grpc.cli.bench_plot import Axis, Series, line_plot

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


def write_page(file: Path, results: Results) -> None:
    """Write the page."""
    names = dict.fromkeys(row.workload for row in results.rows)
    sent = {name: WORKLOADS[name].description for name in names if name in WORKLOADS}
    title = f"Load on {results.server.get('model', 'a server')}"
    measures = _MEASURES | {"answered in time": f"answers that met the objective: {results.objective}"}
    body = [f"<h1>{escape(title)}</h1><h2>What was measured</h2>", facts_table(results.facts())]
    body += ["<h2>What the requests are</h2>", definitions(sent)]
    body += ["<h2>What the numbers are</h2>", definitions(measures)]
    body += ["<h2>Plots</h2>", plots(load_plots(results))]
    for heading, table in results.tables():
        body += [f"<h2>{escape(heading)}</h2>", html_table(table)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(html_page(title, body), encoding="utf-8")


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


def _series(rows: Sequence[Row], value_of: Callable[[Row], float | None]) -> list[Series]:
    names = dict.fromkeys(row.workload for row in rows)
    return [Series(name, _points([row for row in rows if row.workload == name], value_of)) for name in names]


def _points(rows: Sequence[Row], value_of: Callable[[Row], float | None]) -> tuple[tuple[float, float], ...]:
    pairs = ((row.load, value_of(row)) for row in rows)
    return tuple(sorted((load, value) for load, value in pairs if value is not None))


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, metavar="JSON", help="what bench.serve has written")
    parser.add_argument("--html", type=Path, help="the page (default: beside the JSON)")
    arguments = parser.parse_args()
    results = Results.from_json(json.loads(arguments.json.read_text()))
    html = arguments.html or arguments.json.with_suffix(".html")
    write_page(html, results)
    print(html)
    return 0


if __name__ == "__main__":
    sys.exit(main())
