"""Results as numbers, text and pages."""

import json
import re
from pathlib import Path

import pytest

from bench.harness.report import Results, over_peer
from bench.harness.summary import Row, summarise
from bench.page import write_page
from kestrel_grpc.cli.bench_loops import Sample, Window
from kestrel_grpc.cli.bench_numbers import Objective
from kestrel_grpc.cli.bench_processes import Recording

OBJECTIVE = Objective(1000.0, 50.0)


def row(workload: str, load: float, duration_s: float, *, is_open: bool = False) -> Row:
    recording = Recording(Window(0.0, 1.0), (Sample(0.0, duration_s, 3),), 0.1, 0.2)
    return summarise(workload, load, recording, 3, OBJECTIVE, is_open=is_open)


def results(*rows: Row) -> Results:
    return Results({"cores": 2}, {"model": "<nano>"}, OBJECTIVE, rows, ())


def test_ours_over_the_peers_pairs_rows_of_one_workload_and_batch():
    ours = (row("direct", 4, 0.1), row("direct", 16, 0.1), row("direct", 4.0, 0.1, is_open=True))
    theirs = {"rows": [row("direct", 4, 0.2).as_json(), row("cot", 16, 0.2).as_json()]}
    found = {item["what"]: item["ratio"] for item in over_peer(ours, theirs)}
    assert found["total p50 ms"] == pytest.approx(0.5)
    assert {item["load"] for item in over_peer(ours, theirs)} == {4}


def test_a_page_holds_every_table_and_needs_nothing_else(tmp_path: Path):
    found = results(row("direct", 1, 0.1), row("direct", 2.0, 0.1, is_open=True))
    write_page(tmp_path / "page.html", found)
    page = (tmp_path / "page.html").read_text()
    assert "&lt;nano&gt;" in page
    assert all(title in page for title, _ in found.tables())
    assert "src=" not in page
    assert not re.search(r"href=|url\(|@import", page)


def test_numbers_come_back_from_json_also_those_of_an_earlier_version():
    theirs = {"rows": [row("direct", 4, 0.25).as_json()]}
    rows = (row("direct", 4, 0.125), row("direct", 2.0, 0.5, is_open=True))
    found = Results({"cores": 2}, {"model": "m"}, OBJECTIVE, rows, rows[:1], over_peer(rows, theirs))
    data = json.loads(json.dumps(found.as_json()))
    assert Results.from_json(data) == found
    for each in data["rows"]:
        del each["hit_share"]
        each["of another version"] = 1
    assert Results.from_json(data) == found
