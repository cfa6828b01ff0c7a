import contextlib
import gc
import threading

import pytest
import torch

from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.graph_capture import StreamCapture
from kestrel_runtime.execution.graph_policy import CapturedGraphs, GraphBudget
from tests.runtime.fake_cuda import MIB, FakeCuda

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def zeros():
    return torch.zeros(3)


def test_a_capture_neither_waits_for_the_device_nor_empties_the_cache(cuda):
    stream_capture = StreamCapture(CudaStream(CPU))
    for _ in range(3):
        assert stream_capture.capture(zeros).result.tolist() == [0, 0, 0]
    assert (cuda.num_captures, cuda.num_synchronised, cuda.num_emptied) == (4, 0, 0)  # one holds the pool
    assert cuda.is_clean


@pytest.mark.parametrize("closes_books_itself", [False, True], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize("fails_at", ["begin", "work", "waits", "memory", "interrupt", "end", "instantiate"])
def test_after_a_capture_that_failed_the_next_one_succeeds(cuda, fails_at, closes_books_itself):
    cuda.closes_books_itself = closes_books_itself
    stream_capture = StreamCapture(CudaStream(CPU))

    def work():
        if fails_at == "work":
            raise ValueError("of the work itself")
        if fails_at == "waits":
            cuda.break_capture()
        if fails_at == "memory":
            cuda.is_invalid = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        if fails_at == "interrupt":
            raise KeyboardInterrupt
        return torch.zeros(3)

    cuda.fails_at = fails_at if fails_at in ("begin", "end", "instantiate") else None
    with pytest.raises((RuntimeError, ValueError, KeyboardInterrupt)):
        stream_capture.capture(work)
    assert cuda.is_clean
    cuda.fails_at = None
    assert stream_capture.capture(zeros).result.tolist() == [0, 0, 0]
    assert cuda.is_clean
    assert (cuda.num_synchronised, cuda.num_emptied) == (0, 0)


def test_when_all_graphs_are_gone_others_are_captured(cuda):
    stream_capture = StreamCapture(CudaStream(CPU))
    for _ in range(2):
        graphs = [stream_capture.capture(zeros) for _ in range(2)]
        graphs.clear()
    stream_capture.capture(zeros).graph.replay()


def test_garbage_is_not_collected_in_the_middle_of_a_capture(cuda):
    stream_capture, was_enabled = StreamCapture(CudaStream(CPU)), []

    def work():
        was_enabled.append(gc.isenabled())
        return torch.zeros(3)

    stream_capture.capture(work)
    assert was_enabled == [False]
    assert gc.isenabled()


def test_what_a_graph_and_its_pool_take_is_measured(cuda):
    stream_capture = StreamCapture(CudaStream(CPU))
    stream_capture.capture(zeros)  # and the graph that holds the pool
    cuda.bytes_per_graph, cuda.bytes_of_pool = 3 * MIB, 20 * MIB
    first, second = stream_capture.capture(zeros), stream_capture.capture(zeros)
    assert (first.graph_bytes, first.pool_bytes) == (3 * MIB, 20 * MIB)
    assert (second.graph_bytes, second.pool_bytes) == (3 * MIB, 0)


def test_the_last_free_memory_is_left_to_steps(cuda):
    cuda.free_bytes = 255 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="only 255 MiB"):
        StreamCapture(CudaStream(CPU)).capture(zeros)
    assert cuda.num_captures == 0


class Work:
    """Doubles what stands in `source`, and counts how often it was really run."""

    def __init__(self):
        self.source = torch.zeros(3, device="cuda")
        self.num_runs = 0

    def __call__(self):
        self.num_runs += 1
        return self.source * 2


def new_stream_capture():
    return StreamCapture(CudaStream(torch.device("cuda")))


def new_graphs(stream_capture=None):
    return CapturedGraphs("works", stream_capture or new_stream_capture(), GraphBudget(max_bytes=2**30))


@needs_cuda
def test_a_replay_does_the_work_again_on_what_stands_there_now():
    stream_capture, work = new_stream_capture(), Work()
    torch.cuda.synchronize()
    with stream_capture.entered():
        work()
        captured = stream_capture.capture(work)
        work.source += 4
        captured.graph.replay()
        assert captured.result.tolist() == [8, 8, 8]


@needs_cuda
def test_rare_work_is_run_and_work_that_comes_again_is_replayed():
    stream_capture, rare, frequent = new_stream_capture(), Work(), Work()
    graphs = new_graphs(stream_capture)
    torch.cuda.synchronize()
    with stream_capture.entered():
        for number in range(5):
            frequent.source.fill_(number)
            assert graphs.run("frequent", frequent).tolist() == [2.0 * number] * 3
            while number == 2 and graphs.capture_wanted():
                pass
        graphs.run("rare", rare)
        assert not graphs.capture_wanted()
    assert frequent.num_runs == 4  # the last time for the capture
    assert rare.num_runs == 1


def waits(work):
    def run():
        result = work()
        return result * (1 + result.sum().item() * 0)

    return run


def takes_too_much(work):
    def run():
        result = work()
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, device="cuda")
        return result

    return run


def breaks_unseen(work):
    """As a destructor does that breaks the capture and swallows its error."""

    def run():
        if torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        return work()

    return run


@needs_cuda
@pytest.mark.parametrize("breaks", [waits, takes_too_much, breaks_unseen])
def test_work_that_cannot_be_captured_runs_as_it_is_and_leaves_torch_as_it_was(breaks):
    stream_capture, work, healthy = new_stream_capture(), Work(), Work()
    graphs = new_graphs(stream_capture)
    torch.cuda.synchronize()
    with stream_capture.entered():
        for number in range(4):
            work.source.fill_(number)
            assert graphs.run("broken", breaks(work)).tolist() == [2.0 * number] * 3
            graphs.capture_wanted()
        for number in range(4):
            healthy.source.fill_(number)
            assert graphs.run("healthy", healthy).tolist() == [2.0 * number] * 3
            graphs.capture_wanted()
    assert len(graphs) == 1
    # Memory that another stream has used comes back only where torch knows of no capture under way.
    aside = torch.cuda.Stream()
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(2**20, device="cuda")  # looks for what earlier tests have left
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    block = torch.empty(2**22, device="cuda")
    block.record_stream(aside)
    del block
    torch.cuda.synchronize()
    torch.empty(2**20, device="cuda")  # looks for what is over
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before
    assert torch.rand(3, device="cuda").isfinite().all()
    assert torch.empty(2**20, pin_memory=True).is_pinned()


@needs_cuda
def test_what_others_launch_meanwhile_is_not_recorded():
    stream_capture, work, others = new_stream_capture(), Work(), torch.zeros(1, device="cuda")
    graphs = new_graphs(stream_capture)
    aside = torch.cuda.Stream()

    def launch_aside():
        with torch.cuda.stream(aside):
            others.add_(1)

    def disturbed():
        thread = threading.Thread(target=launch_aside)
        thread.start()
        thread.join()
        return work()

    torch.cuda.synchronize()
    with stream_capture.entered():
        for _ in range(4):
            graphs.run("disturbed", disturbed)
            graphs.capture_wanted()
    torch.cuda.synchronize()
    assert others.item() == work.num_runs == 3  # the last time for the capture
