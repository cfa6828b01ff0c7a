"""Results as numbers, text and pages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.harness.closed_loop import Sample, Window
from bench.harness.load import Recording
from bench.harness.page import part_plots, write_page
from bench.harness.report import Results, number, over_peer
from bench.harness.summary import Objective, Row, summarise

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


def test_without_a_peer_there_is_nothing_to_compare():
    assert over_peer((row("direct", 4, 0.1),), None) == []


def test_a_page_holds_every_table_and_needs_nothing_else(tmp_path: Path):
    parts = {"vision": {"results": {"Crops": [{"crops": 1, "eager ms": 2.0}, {"crops": 13, "eager ms": 9.0}]}}}
    found = results(row("direct", 1, 0.1), row("direct", 2.0, 0.1, is_open=True))
    write_page(tmp_path / "page.html", found, parts)
    page = (tmp_path / "page.html").read_text()
    assert "&lt;nano&gt;" in page
    assert all(title in page for title, _ in found.tables())
    assert ">eager<" in page
    assert "src=" not in page
    assert set(re.findall(r'href="(.)', page)) == {"#"}, "marks of a plot refer to shapes within it"


def test_a_page_says_what_each_workload_sends_and_rounds_its_facts(tmp_path: Path):
    found = Results({"cores": 2}, {"ready_s": 1.23456789}, OBJECTIVE, (row("cot", 1, 0.1),), ())
    write_page(tmp_path / "page.html", found, {})
    page = (tmp_path / "page.html").read_text()
    assert "<dt>cot</dt><dd>a question about a picture that no other request shows, answered with 33 tokens" in page
    assert "<td>ready_s</td><td>1.23</td>" in page
    assert found.as_text().startswith("cores: 2\nready_s: 1.23\n")


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


def test_rows_have_six_digits_that_count():
    values = row("direct", 1, 1 / 3).as_json()
    spread = values["total_ms"]
    assert isinstance(spread, dict)
    assert set(spread.values()) == {333.333}


def test_text_lists_rows_with_their_errors():
    failed = Recording(Window(0.0, 1.0), (Sample(0.0, 0.5, error="UNAVAILABLE"),), 0.1, 0.2)
    text = results(summarise("direct", 1, failed, 3, OBJECTIVE, is_open=False)).as_text()
    assert "1 UNAVAILABLE" in text


@pytest.mark.parametrize(
    "part",
    [
        {"results": {"Names": [{"name": "a", "x ms": 1.0}, {"name": "b", "x ms": 2.0}]}},
        {"results": {"Single": [{"batch": 1, "x ms": 1.0}]}},
        {"results": [{"batch": 1}, {"batch": 2}]},
        {"results": "none"},
    ],
)
def test_what_has_no_size_or_no_times_is_not_plotted(part: dict[str, Any]):
    assert not any(part_plots("part", part))


def test_keys_that_end_in_a_size_are_plotted_by_kind():
    whole = {
        "bf16 36": {"encode_us": 41_000.0, "us": 45_000.0, "images": 4},
        "bf16 9": {"encode_us": 11_000.0, "us": 12_000.0, "images": 1},
    }
    (svg,) = filter(None, part_plots("vision", {"whole": whole, "limits": {"copy": 4e12}, "seconds": 3.0}))
    assert ">bf16 encode<" in svg
    assert ">bf16<" in svg
    assert "images" not in svg


def test_rows_of_several_kinds_are_plotted_one_by_one_beside_their_limits():
    steps = [
        {"precision": kind, "contexts": [13, 313], "batch": batch, "us": 700.0 * batch, "limit_us": 600.0}
        for kind in ("bf16", "float8")
        for batch in (1, 128)
    ]
    first, second = part_plots("decode_step", {"steps": steps})
    assert "decode_step: steps, bf16 13 to 313" in first
    assert "decode_step: steps, float8 13 to 313" in second
    assert ">time<" in first
    assert ">limit<" in first


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str):
    assert number(value) == text
