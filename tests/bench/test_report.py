"""Results as numbers and text."""

import pytest

from bench.harness.report import over_peer
from bench.harness.summary import Row, summarise
from kestrel_grpc.cli.bench.loops import Sample, Window
from kestrel_grpc.cli.bench.numbers import Objective
from kestrel_grpc.cli.bench.processes import Recording

OBJECTIVE = Objective(1000.0, 50.0)


def row(workload: str, load: float, duration_s: float, *, is_open: bool = False) -> Row:
    recording = Recording(Window(0.0, 1.0), (Sample(0.0, duration_s, 3),), 0.1, 0.2)
    return summarise(workload, load, recording, 3, OBJECTIVE, is_open=is_open)


def test_ours_over_the_peers_pairs_rows_of_one_workload_and_batch():
    ours = (row("direct", 4, 0.1), row("direct", 16, 0.1), row("direct", 4.0, 0.1, is_open=True))
    theirs = {"rows": [row("direct", 4, 0.2).as_json(), row("cot", 16, 0.2).as_json()]}
    found = {item["what"]: item["ratio"] for item in over_peer(ours, theirs)}
    assert found["total p50 ms"] == pytest.approx(0.5)
    assert {item["load"] for item in over_peer(ours, theirs)} == {4}
