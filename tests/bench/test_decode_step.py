"""The timing of a decode step: it runs anywhere, and what it measures is what it says."""

import json
import sys

import pytest
import torch

from bench import decode_step

CPU = torch.device("cpu")
CHOICE = "mixture_of_experts=library"


def test_it_measures_steps_and_operations_and_checks_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    switches = ["--device", "cpu", "--tiny", "--check", "--batches", "1", "3", "--precision", "float8"]
    monkeypatch.setattr(sys, "argv", ["decode_step", *switches])
    assert decode_step.main() == 0
    assert "failed" not in capsys.readouterr().out
    result = json.loads((tmp_path / "decode_step.json").read_text())
    assert {(row["cache"], row["batch"]) for row in result["steps"]} == {
        (cache, batch) for cache in ("bfloat16", "float8_e4m3fn") for batch in (1, 3)
    }
    assert {(row["at_once"], row["context"]) for row in result["contexts"]} == {
        (batch, context) for batch in ("batch 1", "batch 3") for context in (15, 31, 63, 95, 127)
    }
    assert {row["name"].split()[0] for row in result["operations"]} == {"expand", "contract", "attention"}
    assert max(result["kernel_errors"].values()) == 0  # without a device, what runs are the definitions
    for errors in result["layer_errors"].values():
        assert 0 < errors["logits"] < 0.05


@pytest.mark.parametrize("expert_dtype", ["float8", "int4"])
def test_steps_with_experts_are_timed_beside_what_they_read(expert_dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("decode_step", "--device", "cpu", "--tiny", "--experts", "--expert-dtype", expert_dtype),
            *("--batches", "1", "3", "--choose", CHOICE),
        ],
    )
    assert decode_step.main() == 0
    assert "failed" not in capsys.readouterr().out
    result = json.loads((tmp_path / f"decode_step_experts_{expert_dtype}.json").read_text())
    assert result["kernels"]["mixture_of_experts"] == "kestrel_ops.experts.library_mixture_of_experts"
    few, more = result["steps"][:2]
    assert 0 < few["limit_us"] < more["limit_us"]
