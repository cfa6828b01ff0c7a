"""When graphs are captured and dropped, and what runs where there is none. G1 to G4 are the module's invariants."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.graph_capture import StreamCapture
from tests.runtime.fake_cuda import FakeCuda, FakeStreamCapture

LOGGER = "kestrel_runtime.execution.captured_graphs"
FAILURES = [
    RuntimeError("CUDA error: operation failed due to a previous error during capture\nand a page of advice"),
    torch.OutOfMemoryError("CUDA out of memory"),
    AssertionError("of a library"),
]


class Counter:
    """Work that is not the same twice: each run, and each replay, adds one."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def __call__(self) -> Tensor:
        return self.count.add_(1).clone()


def new_graphs(
    stream_capture: FakeStreamCapture, budget: GraphBudget | None = None, kind: str = "works"
) -> CapturedGraphs:
    return CapturedGraphs(kind, stream_capture, budget or GraphBudget(max_bytes=1000))  # pyright: ignore[reportArgumentType]


def never() -> float:
    return time.monotonic() + 3600


def test_g2_work_that_comes_again_is_captured_and_replayed_from_then_on() -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    graphs = new_graphs(stream_capture)
    assert [graphs.run("a", work).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert (stream_capture.num_captures, stream_capture.num_releases, len(graphs)) == (1, 0, 1)


def test_g2_a_late_capture_neither_waits_for_the_device_nor_empties_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    graphs = CapturedGraphs("works", StreamCapture(CudaStream(torch.device("cpu"))), GraphBudget(max_bytes=2**40))
    for _ in range(4):
        graphs.run("a", lambda: torch.zeros(1))
    assert (cuda.num_captures, cuda.num_synchronised, cuda.num_emptied) == (2, 0, 0)  # one holds the pool
    graphs.capture_all(iter([("b", lambda: torch.zeros(1))]), until=never())  # at the start it may
    assert (cuda.num_captures, cuda.num_synchronised, cuda.num_emptied) == (3, 1, 1)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_g1_g4_what_cannot_be_captured_runs_once_each_time_and_is_logged_once(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stream_capture, work = FakeStreamCapture([failure]), Counter()
    graphs = new_graphs(stream_capture)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        assert [graphs.run("a", work).item() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert stream_capture.num_captures == 1
    (record,) = caplog.records
    assert record.message == f"works of a run without a CUDA graph: {str(failure).splitlines()[0]}"


def test_g1_a_first_replay_that_finds_no_memory_is_a_capture_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    graphs = new_graphs(stream_capture)
    record = stream_capture.capture

    def unlaunchable(run: Callable[[], Tensor]) -> object:
        def refuse() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        captured = record(run)
        captured.graph.replay = refuse
        return captured

    stream_capture.capture = unlaunchable  # pyright: ignore[reportAttributeAccessIssue]
    assert [graphs.run("a", work).item() for _ in range(4)] == [1, 2, 3, 4]
    assert (stream_capture.num_captures, len(graphs), len(caplog.records)) == (1, 0, 1)


def test_g1_what_the_work_itself_raises_comes_out() -> None:
    graphs = new_graphs(FakeStreamCapture())

    def broken() -> Tensor:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            graphs.run("a", broken)


def test_g4_a_kind_that_fails_again_and_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    stream_capture = FakeStreamCapture([RuntimeError("no")] * 100)
    graphs = new_graphs(stream_capture)
    works = [Counter() for _ in range(20)]
    for _ in range(3):
        for number, work in enumerate(works):
            graphs.run(number, work)
    assert [work.count.item() for work in works] == [3] * 20
    assert stream_capture.num_captures == len(caplog.records) == 8
    assert caplog.records[-1].message.endswith("no more of them are captured")


def test_g3_graphs_do_not_grow_in_number_without_end_and_the_oldest_go_first() -> None:
    stream_capture = FakeStreamCapture()
    budget = GraphBudget(max_bytes=1000, max_graphs=4)
    graphs, works = new_graphs(stream_capture, budget), [Counter() for _ in range(6)]
    for number in range(4):
        for _ in range(2):
            graphs.run(number, works[number])
    graphs.run(0, works[0])  # used last now
    for _ in range(2):
        graphs.run(4, works[4])
    assert (len(graphs), budget.num_graphs) == (4, 4)
    num_captures = stream_capture.num_captures
    for number in (0, 2, 3, 4):  # 1 was dropped
        graphs.run(number, works[number])
    assert stream_capture.num_captures == num_captures
    assert [graphs.run(1, works[1]).item() for _ in range(3)] == [3, 4, 5]  # and may come again
    assert stream_capture.num_captures == num_captures + 1


def test_g3_graphs_of_all_kinds_share_one_bound_in_bytes() -> None:
    stream_capture = FakeStreamCapture()
    stream_capture.graph_bytes, stream_capture.pool_bytes = 100, 250
    budget = GraphBudget(max_bytes=700)
    kinds = [new_graphs(stream_capture, budget, kind) for kind in ("decode steps", "prompts")]
    for key in range(10):
        for graphs in kinds:
            for _ in range(2):
                graphs.run(key, Counter())
            assert budget.num_bytes <= 700
    assert [len(graphs) for graphs in kinds] == [2, 2]  # beside the pool, which nothing gives back


def test_g3_once_the_pools_take_all_there_is_nothing_more_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    stream_capture = FakeStreamCapture()
    stream_capture.graph_bytes, stream_capture.pool_bytes = 10, 2000
    graphs, work = new_graphs(stream_capture), Counter()
    for key in range(10):
        for _ in range(3):
            graphs.run(key, work)
    assert work.count.item() == 30
    assert stream_capture.num_captures == 1
    assert [record.message for record in caplog.records] == [
        "the memory for CUDA graphs is used up: no more are captured"
    ]


def test_g3_a_dropped_graph_is_destroyed_when_its_last_replay_is_over() -> None:
    stream_capture = FakeStreamCapture()
    stream_capture.has_events = True
    graphs, work = new_graphs(stream_capture, GraphBudget(max_bytes=1000, max_graphs=1)), Counter()
    for key in ("a", "a", "b", "b"):
        graphs.run(key, work)
    (event,) = stream_capture.events  # behind the last replay of "a"
    graphs.run("b", work)
    assert len(graphs._dropped) == 1
    event.is_over = True
    graphs.run("b", work)
    assert graphs._dropped == []


def test_usual_works_are_captured_before_traffic_with_one_wait_for_the_device() -> None:
    stream_capture, works = FakeStreamCapture(), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)
    assert graphs.capture_all(iter(works.items()), until=never()) == 0
    assert (stream_capture.num_captures, stream_capture.num_releases, len(graphs)) == (3, 1, 3)
    assert graphs.run("a", works["a"]).item() == 2  # after the run before the capture


def test_what_is_not_captured_in_time_is_captured_in_traffic() -> None:
    stream_capture, works = FakeStreamCapture(), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)
    assert graphs.capture_all(iter(works.items()), until=time.monotonic()) == 3
    assert [graphs.run("a", works["a"]).item() for _ in range(3)] == [1, 2, 3]
    assert stream_capture.num_captures == 1


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_a_start_goes_on_past_what_cannot_be_captured(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    stream_capture, works = FakeStreamCapture([None, failure]), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)

    def too_large() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.capture_all(iter([("huge", too_large), *works.items()]), until=never())
    assert len(graphs) == 2
    assert len(caplog.records) == 2
    assert [graphs.run("b", works["b"]).item() for _ in range(3)] == [2, 3, 4]


def test_after_clear_everything_is_captured_anew() -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    budget = GraphBudget(max_bytes=1000)
    graphs = new_graphs(stream_capture, budget)
    for _ in range(2):
        graphs.run("a", work)
    graphs.clear()
    assert (len(graphs), budget.num_graphs, budget.num_bytes) == (0, 0, 0)
    assert [graphs.run("a", work).item() for _ in range(3)] == [3, 4, 5]
    assert stream_capture.num_captures == 2
