"""The profile of a loaded engine: it runs anywhere, and its tables are what the trace says."""

import gzip
import json
import sys

import pytest

from bench import profile
from bench.harness.trace import Cost, PhaseCost, Span, Trace

PHASES = ("encode", "decode")


def span(name: str, kind: str, start_us: float, end_us: float, correlation: int | None = None, thread: int = 1):
    return Span(name, kind, (0, thread), start_us, end_us, correlation)


def traced(*spans: Span) -> Trace:
    return Trace(spans, PHASES, "load")


def test_a_loaded_engine_leaves_a_trace_and_tables(tmp_path, monkeypatch, capsys):
    switches = ["--device", "cpu", "--requests", "3", "--at-once", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(
        sys, "argv", ["profile", *switches, "--set", "max-batch-size=2", "--set", "text-path=fused"]
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


def test_an_option_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile", "--set", "text-pass=fused"])
    with pytest.raises(SystemExit):
        profile.main()
    assert "--text-pass: is no option" in capsys.readouterr().err


def test_the_device_is_idle_where_nothing_runs_on_it():
    trace = traced(
        span("load", "user_annotation", 0, 100),
        span("before", "kernel", -20, -10),
        span("a", "kernel", 10, 30),
        span("b", "kernel", 20, 40),
        span("copy", "gpu_memcpy", 60, 80),
    )
    assert trace.idle_share() == pytest.approx(0.5)
    assert trace.device_costs() == [Cost("a", 20, 1), Cost("b", 20, 1), Cost("copy", 20, 1)]


def test_without_a_device_the_thread_is_idle_outside_of_phases():
    trace = traced(span("load", "user_annotation", 0, 100), span("decode", "user_annotation", 10, 40))
    assert trace.idle_share() == pytest.approx(0.7)


def test_a_call_does_not_count_what_it_calls():
    trace = traced(
        span("decode", "user_annotation", 0, 100),
        span("linear", "cpu_op", 10, 60),
        span("addmm", "cpu_op", 20, 50),
        span("linear", "cpu_op", 60, 70),
        span("elsewhere", "cpu_op", 0, 100, thread=2),
    )
    assert trace.host_costs() == [
        Cost("elsewhere", 100, 1),
        Cost("decode, Python", 40, 1),
        Cost("linear", 30, 2),
        Cost("addmm", 30, 1),
    ]


def test_work_on_the_device_belongs_to_the_phase_that_launched_it():
    trace = traced(
        span("encode", "user_annotation", 0, 10),
        span("launch", "cuda_runtime", 5, 6, correlation=1),
        span("decode", "user_annotation", 10, 20),
        span("launch", "cuda_driver", 15, 16, correlation=2),
        span("launch", "cuda_runtime", 30, 31, correlation=3),
        span("launch", "cuda_runtime", 15, 16, correlation=4, thread=2),
        span("late", "kernel", 50, 57, correlation=1),
        span("graph", "kernel", 60, 63, correlation=2),
        span("graph", "kernel", 63, 64, correlation=2),
        span("alone", "kernel", 70, 72, correlation=3),
        span("another thread's", "kernel", 72, 73, correlation=4),
    )
    assert trace.phase_costs() == [
        PhaseCost("encode", 1, 10, 7),
        PhaseCost("decode", 1, 10, 4),
        PhaseCost("other", 0, 0, 3),
    ]
