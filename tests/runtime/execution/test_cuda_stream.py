import pytest
import torch

from kestrel_runtime.execution.cuda_stream import CudaStream

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
