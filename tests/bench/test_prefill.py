"""The timing of the prefill: it runs anywhere, and what it measures is what it says."""

import json
import sys

import torch

from bench import prefill

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
