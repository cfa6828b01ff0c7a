"""Writes the results of a load as JSON and as tables of text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.harness.summary import Row
from kestrel_grpc.cli.bench.numbers import Objective
from kestrel_grpc.cli.bench.plot import number
from kestrel_grpc.cli.bench.report import Table


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run found."""

    machine: Mapping[str, Any]
    server: Mapping[str, Any]
    objective: Objective
    rows: tuple[Row, ...]
    client: tuple[Row, ...]
    """The same load on a server without a model."""
    over_peer: Sequence[Mapping[str, Any]] = ()
    """What `over_peer` found."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": dict(self.machine),
            "server": dict(self.server),
            "objective": asdict(self.objective),
            "rows": [row.as_json() for row in self.rows],
            "client": [row.as_json() for row in self.client],
            "over_peer": list(self.over_peer),
        }

    def as_text(self) -> str:
        """Tables for a terminal."""
        blocks = ["\n".join(f"{name}: {value}" for name, value in self.facts().items())]
        blocks += [f"{title}\n\n{_markdown(table)}" for title, table in self.tables()]
        return "\n\n".join(blocks)

    def facts(self) -> dict[str, str]:
        """The machine and the server in words, numbers with a fraction rounded."""
        values = {**self.machine, **self.server}
        return {name: number(value) if isinstance(value, float) else str(value) for name, value in values.items()}

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Titles and tables, those without a row left out. None is wider than a page."""
        closed, open_ = ([row for row in self.rows if row.is_open is is_open] for is_open in (False, True))
        if closed:
            yield "Closed loop, rates: so many requests kept running", _rate_table(closed, "at once")
            yield "Closed loop, times", _time_table(closed, "at once")
        if open_:
            yield "Open loop, rates: so many requests sent per second", _rate_table(open_, "sent/s")
            yield "Open loop, times", _time_table(open_, "sent/s")
        if self.over_peer:
            yield "Ours, the peer's, and ours over the peer's", _ratio_table(self.over_peer)
        if self.client:
            yield "The client alone, on a server without a model", _rate_table(self.client, "at once")


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


def _rate_table(rows: Sequence[Row], load: str) -> Table:
    head = ["requests/s", "tokens/s", "in time/s", "requests", "errors"]
    head += ["crops encoded a picture", "client cores", "client lag ms"]
    table = [["workload", load, *head]]
    for row in rows:
        errors = ", ".join(f"{count} {name}" for name, count in row.errors.items())
        if row.wrong_lengths:
            errors += f"{', ' if errors else ''}{row.wrong_lengths} of another length"
        rates = map(number, (row.requests_per_s, row.tokens_per_s, row.goodput_per_s))
        crops = "–" if row.encoded_crops is None else number(row.encoded_crops)
        client = map(number, (row.busiest_client, row.client_lag_ms))
        table.append([row.workload, number(row.load), *rates, str(row.num_requests), errors or "0", crops, *client])
    return table


def _time_table(rows: Sequence[Row], load: str) -> Table:
    names = ("first token", "between pieces", "per token", "whole answer")
    table = [["workload", load, *(f"{name} p50 / p90 / p99 ms" for name in names)]]
    for row in rows:
        spreads = (row.first_token_ms, row.inter_token_ms, row.per_token_ms, row.total_ms)
        times = (" / ".join(map(number, spread.values())) or "–" for spread in spreads)
        table.append([row.workload, number(row.load), *times])
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
