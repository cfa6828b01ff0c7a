import pytest
import torch

from kestrel_runtime.execution.cuda_stream import CudaStream, SideStream

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_beside_no_gpu_a_lane_has_nothing_to_wait_for():
    stream = CudaStream(torch.device("cpu"), is_urgent=True)
    with stream.entered():
        result = torch.ones(2) + 1
    assert stream.record_event() is None
    stream.wait_for(None)
    stream.synchronize()
    assert result.tolist() == [2, 2]


@needs_cuda
def test_a_lane_waits_for_a_mark_of_another_one():
    device = torch.device("cuda")
    slow, quick = CudaStream(device), CudaStream(device, is_urgent=True)
    number = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    with slow.entered():
        torch.cuda._sleep(50_000_000)
        number += 1
    quick.wait_for(slow.record_event())
    with quick.entered():
        number *= 3
    quick.synchronize()
    assert number.tolist() == [3]


@needs_cuda
def test_a_lane_is_entered_within_itself_and_left_after_an_error():
    device = torch.device("cuda")
    outer, inner, before = CudaStream(device), CudaStream(device), torch.cuda.current_stream()

    def current() -> int:
        return torch.cuda.current_stream().cuda_stream

    def fail() -> None:
        with inner.entered():
            raise KeyError

    for _ in range(2):
        with outer.entered(), inner.entered():
            with outer.entered():
                with pytest.raises(KeyError):
                    fail()
                assert current() == outer.handle
            assert current() == inner.handle
        assert torch.cuda.current_stream() == before


@needs_cuda
def test_lanes_work_beside_each_other():
    device = torch.device("cuda")
    slow, quick = CudaStream(device), CudaStream(device, is_urgent=True)
    with slow.entered():
        torch.cuda._sleep(500_000_000)
    end = slow.record_event()
    with quick.entered():
        torch.ones(1, device=device)
    quick.synchronize()
    assert end is not None
    assert not end.query()


def test_beside_no_gpu_a_side_runs_in_turn():
    side, number = SideStream(torch.device("cpu")), torch.ones(1)
    with side.forked():
        number += 1
    number *= 3
    side.join()
    assert number.tolist() == [6]


@needs_cuda
def test_a_side_begins_behind_the_fork_and_is_complete_behind_the_join():
    device = torch.device("cuda")
    stream, side = CudaStream(device), SideStream(device)
    numbers = torch.zeros(2, device=device)
    torch.cuda.synchronize()
    with stream.entered():
        torch.cuda._sleep(50_000_000)
        numbers += 1
        with side.forked():
            torch.cuda._sleep(50_000_000)
            numbers[0] *= 5
        numbers[1] *= 7
        side.join()
        numbers += 1
    stream.synchronize()
    assert numbers.tolist() == [6, 8]


@needs_cuda
def test_a_graph_captures_a_side():
    device = torch.device("cuda")
    side, numbers = SideStream(device), torch.zeros(2, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers += 1
        with side.forked():
            numbers[0] *= 5
        numbers[1] *= 7
        side.join()
        numbers += 1
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [6, 8]
