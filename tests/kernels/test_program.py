from ctypes import c_int, c_void_p

import pytest
import torch

from kestrel_ops.compilation.cuda_program import Program

SOURCE = 'extern "C" __global__ void count(int* to, int first) { to[threadIdx.x] = first + threadIdx.x; }'
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def architecture():
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


@needs_cuda
def test_a_kernel_runs_on_the_arguments_it_is_given():
    out = torch.zeros(4, dtype=torch.int32, device="cuda")  # and with it a context for programs
    program = Program(SOURCE, "count", architecture=architecture(), shared_bytes=0)
    program.launch(1, 3, c_void_p(out.data_ptr()), c_int(5))
    assert out.tolist() == [5, 6, 7, 0]


@needs_cuda
def test_what_the_compiler_complains_of_is_in_the_error():
    with pytest.raises(RuntimeError, match="frist"):
        Program(SOURCE.replace("= first", "= frist"), "count", architecture=architecture(), shared_bytes=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver")
def test_a_machine_without_a_driver_is_told_by_an_os_error():
    with pytest.raises(OSError, match=r"libcuda|nvrtc"):
        Program(SOURCE, "count", architecture="sm_90a", shared_bytes=0)
