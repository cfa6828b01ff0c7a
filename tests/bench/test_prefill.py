"""The timing of the prefill: it runs anywhere, and what it measures is what it says."""

import json
import sys

import pytest
import torch

from bench import prefill
from bench.harness.prefill_inputs import Prompts

CPU = torch.device("cpu")


def test_it_measures_parts_and_the_whole_and_checks_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    switches = ["--device", "cpu", "--tiny", "--check", "--prompts", "1", "--parts", "1", "--precision", "float8"]
    monkeypatch.setattr(sys, "argv", ["prefill", *switches])
    assert prefill.main() == 0
    assert "failed" not in capsys.readouterr().out
    result = json.loads((tmp_path / "prefill.json").read_text())
    assert {part["name"] for part in result["parts"]["float8 1"]} >= {"product up", "attention", "concat_gelu"}
    assert set(result["whole"]) == {"float8 1", "float8, fp8 cache 1"}
    assert max(result["kernel_errors"].values()) == 0  # without a device, what runs are the definitions
    for errors in result["layer_errors"].values():
        assert 0 < max(errors) < 0.05


def test_a_plan_holds_every_position_of_every_prompt_once():
    plan = Prompts(3, 40, 26).plan(CPU)
    assert len(set(plan.slots.tolist())) == len(plan.positions) == 120
    assert plan.positions.tolist() == list(range(40)) * 3
    assert plan.query_starts.tolist() == [0, 40, 80, 120]


def test_a_plan_may_begin_behind_the_prefix():
    plan = Prompts(2, 40, 26).plan(CPU, start=38)
    assert plan.positions.tolist() == [38, 39, 38, 39]
    assert plan.lengths.tolist() == [40, 40]
    assert plan.max_chunk == 2


@pytest.mark.parametrize(("prefix_length", "num_scores"), [(0, 1 + 2 + 3 + 4), (3, 3 * 3 + 4), (4, 16)])
def test_pairs_that_see_each_other_are_counted(prefix_length, num_scores):
    assert Prompts(2, 4, prefix_length).num_scores() == 2 * num_scores
