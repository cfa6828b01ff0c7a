"""The profile of a loaded engine: it runs anywhere, and its tables are what the trace says."""

import gzip
import json
import sys

import pytest

from bench import profile
from bench.profile import Span, Trace

PHASES = ("encode", "decode")


def span(name: str, kind: str, start_us: float, end_us: float, correlation: int | None = None, thread: int = 1):
    return Span(name, kind, (0, thread), start_us, end_us, correlation)


def traced(*spans: Span) -> Trace:
    return Trace(spans, PHASES, "load")


def test_a_loaded_engine_leaves_a_trace_and_tables(tmp_path, monkeypatch, capsys):
    switches = ["--device", "cpu", "--requests", "3", "--at-once", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(
        sys, "argv", ["profile", *switches, "--set", "max-batch-size=2", "--set", "text-backend=fused"]
    )
    assert profile.main() == 0
    assert "the engine's thread was idle for" in capsys.readouterr().out
    result = json.loads((tmp_path / "profile.json").read_text())
    calls = {phase["name"]: phase["calls"] for phase in result["phases"]}
    assert calls["encode"] == calls["prefill"] == 3
    assert calls["decode"] >= 3  # of two requests that may share their two steps, and of a third
    assert 0 < result["idle_share"] < 1
    assert any(cost["name"] == "aten::addmm" for cost in result["host"])
    with gzip.open(tmp_path / "profile.trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"load", "encode", "decode", "aten::addmm"} <= names


def test_marks_for_other_profilers_are_refused_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(profile.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["profile", "--nvtx"])
    with pytest.raises(SystemExit):
        profile.main()
    assert "--nvtx needs a CUDA device" in capsys.readouterr().err
