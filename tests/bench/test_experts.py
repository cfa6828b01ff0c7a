"""The timing of the experts: it runs anywhere, and what it measures is what it says."""

import json
import sys

import pytest
import torch

from bench import experts

CPU = torch.device("cpu")
SIZES = experts.Sizes(*experts.SMALL)


def test_it_measures_every_routing_and_checks_it(tmp_path, monkeypatch, capsys):
    switches = ["--device", "cpu", "--small", "--check", "--tokens", "1", "5", "--layers", "2"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["experts", *switches, "--implementations", "library", "--json", str(tmp_path / "experts.json")],
    )
    assert experts.main() == 0
    assert "failed" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "experts.json").read_text())["rows"]
    assert {(row["precision"], row["tokens"], row["routing"]) for row in rows} == {
        (precision, count, routing)
        for precision in experts.PRECISIONS
        for count in (1, 5)
        for routing in experts.ROUTINGS
    }
    assert all(0 < row["library"]["error"] < 0.02 and row["library"]["same_bits"] for row in rows)
    assert all(row["limit_us"] > 0 and row["library"]["us"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in the interpreter")
@pytest.mark.parametrize("precision", experts.PRECISIONS)
def test_the_kernels_are_timed_stage_by_stage(precision):
    stacks, tokens = SIZES.stacks(precision, 1, CPU), [SIZES.tokens(3, "random", CPU)]
    found = experts.parts(SIZES, "triton", [], stacks, tokens, precision)
    assert list(found) == ["route", "expand", "contract", "combine"]
    assert min(found.values()) > 0
