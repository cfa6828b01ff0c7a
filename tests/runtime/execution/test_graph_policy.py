"""When graphs are captured and dropped, and what runs where there is none. G1 to G4 are the module's invariants."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.graph_capture import CapturedGraph, StreamCapture
from kestrel_runtime.execution.graph_policy import CapturedGraphs, GraphBudget
from tests.runtime.fake_cuda import FakeCuda, FakeStreamCapture

LOGGER = "kestrel_runtime.execution.graph_policy"
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
    return CapturedGraphs(kind, stream_capture, budget or GraphBudget(max_bytes=1000))  # pyrefly: ignore[bad-argument-type]


def run_and_capture(graphs: CapturedGraphs, key: object, work: Callable[[], Tensor]) -> None:
    """Run a work until it is wanted, and capture all that is."""
    for _ in range(2):
        graphs.run(key, work)
    capture_wanted(graphs)


def capture_wanted(graphs: CapturedGraphs) -> None:
    while graphs.capture_wanted():
        pass


def test_g2_work_that_comes_again_is_captured_in_a_quiet_time_and_replayed_from_then_on() -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    graphs = new_graphs(stream_capture)
    assert graphs.run("a", work).item() == 1
    assert not graphs.capture_wanted()  # it may never come again
    assert [graphs.run("a", work).item() for _ in range(3)] == [2, 3, 4]
    assert (stream_capture.num_captures, len(graphs)) == (0, 0)
    assert graphs.capture_wanted()
    assert not graphs.capture_wanted()
    assert work.count.item() == 4  # a capture runs nothing
    assert [graphs.run("a", work).item() for _ in range(2)] == [5, 6]
    assert (stream_capture.num_captures, stream_capture.num_releases, len(graphs)) == (1, 0, 1)


def test_g2_a_late_capture_neither_waits_for_the_device_nor_empties_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    graphs = CapturedGraphs("works", StreamCapture(CudaStream(torch.device("cpu"))), GraphBudget(max_bytes=2**40))
    run_and_capture(graphs, "a", lambda: torch.zeros(1))
    assert (cuda.num_captures, cuda.num_synchronised, cuda.num_emptied) == (2, 0, 0)  # one holds the pool
    graphs.capture_all(iter([("b", lambda: torch.zeros(1))]))  # at the start it may
    assert (cuda.num_captures, cuda.num_synchronised, cuda.num_emptied) == (3, 1, 1)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_g1_g4_what_cannot_be_captured_runs_once_each_time_and_is_logged_once(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stream_capture, work = FakeStreamCapture([failure]), Counter()
    graphs = new_graphs(stream_capture)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for expected in range(1, 7):
            assert graphs.run("a", work).item() == expected
            capture_wanted(graphs)
    assert stream_capture.num_captures == 1
    (record,) = caplog.records
    assert record.message == f"works of a run without a CUDA graph: {str(failure).splitlines()[0]}"


def test_g1_a_first_replay_that_finds_no_memory_is_a_capture_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    graphs = new_graphs(stream_capture)
    record = stream_capture.capture

    def unlaunchable(run: Callable[[], Tensor]) -> CapturedGraph:
        def refuse() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        captured = record(run)
        captured.graph.replay = refuse
        return captured

    stream_capture.capture = unlaunchable
    run_and_capture(graphs, "a", work)
    assert len(graphs) == 1
    for expected in range(3, 6):
        assert graphs.run("a", work).item() == expected
        capture_wanted(graphs)
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
        capture_wanted(graphs)
    assert [work.count.item() for work in works] == [3] * 20
    assert stream_capture.num_captures == len(caplog.records) == 8
    assert caplog.records[-1].message.endswith("no more of them are captured")


def test_g3_graphs_do_not_grow_in_number_without_end_and_the_oldest_go_first() -> None:
    stream_capture = FakeStreamCapture()
    budget = GraphBudget(max_bytes=1000, max_graphs=4)
    graphs, works = new_graphs(stream_capture, budget), [Counter() for _ in range(6)]
    for number in range(4):
        run_and_capture(graphs, number, works[number])
    graphs.run(0, works[0])  # used last now
    run_and_capture(graphs, 4, works[4])
    assert (len(graphs), budget.num_graphs) == (4, 4)
    num_captures = stream_capture.num_captures
    for number in (0, 2, 3, 4):  # 1 was dropped
        graphs.run(number, works[number])
    assert stream_capture.num_captures == num_captures
    run_and_capture(graphs, 1, works[1])  # and may come again
    assert graphs.run(1, works[1]).item() == 5
    assert stream_capture.num_captures == num_captures + 1


def test_g3_graphs_of_all_kinds_share_one_bound_in_bytes() -> None:
    stream_capture = FakeStreamCapture()
    stream_capture.graph_bytes, stream_capture.pool_bytes = 100, 250
    budget = GraphBudget(max_bytes=700)
    kinds = [new_graphs(stream_capture, budget, kind) for kind in ("decode steps", "prompts")]
    for key in range(10):
        for graphs in kinds:
            run_and_capture(graphs, key, Counter())
            assert budget.num_bytes <= 700
    assert [len(graphs) for graphs in kinds] == [2, 2]  # beside the pool, which nothing gives back


def test_g3_once_the_pools_take_all_there_is_nothing_more_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    stream_capture = FakeStreamCapture()
    stream_capture.graph_bytes, stream_capture.pool_bytes = 10, 2000
    graphs, work = new_graphs(stream_capture), Counter()
    for key in range(10):
        run_and_capture(graphs, key, work)
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
    for key in ("a", "b"):
        run_and_capture(graphs, key, work)
    (event,) = stream_capture.events  # behind the last replay of "a"
    graphs.run("b", work)
    assert len(graphs._dropped) == 1
    event.is_over = True
    graphs.run("b", work)
    assert graphs._dropped == []


def test_usual_works_are_captured_before_traffic_of_which_the_first_runs_before() -> None:
    stream_capture, works = FakeStreamCapture(), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)
    graphs.capture_all(iter(works.items()))
    assert (stream_capture.num_captures, stream_capture.num_releases, len(graphs)) == (3, 1, 3)
    assert [work.count.item() for work in works.values()] == [1, 0, 0]
    assert graphs.run("a", works["a"]).item() == 2


def test_all_works_can_be_asked_to_run_before_their_capture() -> None:
    stream_capture, works = FakeStreamCapture(), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)
    graphs.capture_all(iter(works.items()), each_runs_before=True)
    assert [work.count.item() for work in works.values()] == [1, 1, 1]
    assert (stream_capture.num_captures, stream_capture.num_releases) == (3, 1)


def test_what_a_library_does_at_its_first_run_is_done_before_a_second_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream_capture, works = FakeStreamCapture([None, OSError("not while capturing")]), {k: Counter() for k in "abc"}
    graphs = new_graphs(stream_capture)
    graphs.capture_all(iter(works.items()))
    assert [work.count.item() for work in works.values()] == [1, 1, 0]
    assert (stream_capture.num_captures, len(graphs)) == (4, 3)
    assert caplog.records == []


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_a_start_goes_on_past_what_cannot_be_captured(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    # The second one fails without and with a run before it.
    stream_capture, works = FakeStreamCapture([None, failure, failure]), {key: Counter() for key in "abc"}
    graphs = new_graphs(stream_capture)

    def too_large() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.capture_all(iter([("huge", too_large), *works.items()]))
    assert len(graphs) == 2
    assert len(caplog.records) == 2
    assert [graphs.run("b", works["b"]).item() for _ in range(3)] == [2, 3, 4]


def test_after_clear_everything_is_captured_anew() -> None:
    stream_capture, work = FakeStreamCapture(), Counter()
    budget = GraphBudget(max_bytes=1000)
    graphs = new_graphs(stream_capture, budget)
    run_and_capture(graphs, "a", work)
    for _ in range(2):
        graphs.run("b", work)
    graphs.clear()
    assert (len(graphs), budget.num_graphs, budget.num_bytes) == (0, 0, 0)
    assert not graphs.capture_wanted()  # what was wanted reads what is no longer there
    run_and_capture(graphs, "a", work)
    assert graphs.run("a", work).item() == 7
    assert stream_capture.num_captures == 2


def test_what_the_start_has_left_is_captured_in_quiet_times_after_what_has_come() -> None:
    stream_capture, works = FakeStreamCapture(), {key: Counter() for key in "abcd"}
    graphs = new_graphs(stream_capture)
    graphs.capture_all(iter([("a", works["a"])]))
    graphs.leave(iter([(key, works[key]) for key in "abc"]))
    for _ in range(2):
        graphs.run("d", works["d"])
    captured: list[set[object]] = []
    while graphs.capture_wanted():
        captured.append(set(graphs))
    assert captured == [{"a", "d"}, {"a", "d", "b"}, {"a", "d", "b", "c"}]
    assert [work.count.item() for work in works.values()] == [1, 0, 0, 2]  # captures run nothing


def test_g1_what_was_left_and_cannot_be_captured_runs_once_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream_capture, works = FakeStreamCapture([OSError("not while capturing")]), {key: Counter() for key in "ab"}
    graphs = new_graphs(stream_capture)
    graphs.leave(iter(works.items()))
    capture_wanted(graphs)
    assert set(graphs) == {"a", "b"}
    assert [work.count.item() for work in works.values()] == [1, 0]
    assert caplog.records == []


def test_g2_a_size_that_ran_as_a_larger_one_is_wanted_when_it_comes_again() -> None:
    stream_capture, work, laid_out = FakeStreamCapture(), Counter(), list[str]()

    def new_work() -> Callable[[], Tensor]:
        laid_out.append("inputs")
        return work

    graphs = new_graphs(stream_capture)
    graphs.note_missing("a", new_work)
    assert not graphs.capture_wanted()
    graphs.note_missing("a", new_work)
    assert laid_out == []  # there may be traffic
    assert graphs.capture_wanted()
    assert (laid_out, "a" in graphs, work.count.item()) == (["inputs"], True, 0)
