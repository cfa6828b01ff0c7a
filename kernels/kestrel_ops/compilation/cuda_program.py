"""Compiles a CUDA kernel by NVRTC, which is part of torch, and launches it through the driver."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch

_MOST_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_UINT8, _NO_INTERLEAVE, _SWIZZLE_128_BYTES, _L2_256_BYTES, _FILL_ZEROS = 0, 0, 3, 3, 0  # of cuTensorMapEncodeTiled


TensorMap = ctypes.Array[c_ubyte]
"""A parameter that says how the bulk copy engine finds blocks of a tensor, of the type CUtensorMap."""


class _Attribute(ctypes.Structure):
    """Mirrors CUlaunchAttribute, whose value is an integer."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("unused", c_int * 15)]


class _Configuration(ctypes.Structure):
    """Mirrors CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


class Program:
    """Describes one compiled kernel, loaded onto the current device."""

    def __init__(self, source: str, kernel: str, *, architecture: str, shared_bytes: int) -> None:
        """`kernel` is its name in the source, declared extern "C"; `architecture` is one such as "sm_90a".

        Every program of a launch has `shared_bytes` of dynamic shared memory. Raises OSError if NVRTC or the driver
        cannot be found, and RuntimeError if one of them reports an error.
        """
        # A launch takes less time than releasing and acquiring the interpreter's lock.
        self._driver = ctypes.PyDLL("libcuda.so.1")
        binary = _kept(source, architecture)
        module, self._function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), binary)
        self._call("cuModuleGetFunction", byref(self._function), module, kernel.encode())
        self._call("cuFuncSetAttribute", self._function, c_int(_MOST_DYNAMIC_SHARED_BYTES), c_int(shared_bytes))
        self._shared_bytes = shared_bytes

    def launch(
        self,
        num_programs: int,
        num_threads: int,
        *arguments: ctypes._SimpleCData[Any] | TensorMap,
        is_dependent: bool = False,
    ) -> None:
        """Launches on the current stream. Arguments have the types and the order of the kernel's parameters. One
        that `is_dependent` starts before the previous kernel has ended and waits for it itself."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        configuration = _Configuration(
            (num_programs, 1, 1),
            (num_threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            int(is_dependent),
        )
        self._call("cuLaunchKernelEx", byref(configuration), self._function, pointers, None)

    def _call(self, name: str, *arguments: object) -> None:
        _call(self._driver, name, *arguments)


def compile_together(sources: Sequence[str], architecture: str) -> None:
    """Compiles what has not been compiled before, in as many threads. Raises as `Program` does."""
    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        list(pool.map(partial(_kept, architecture=architecture), sources))


def tensor_map(
    address: int,  # a multiple of 16
    sizes: Sequence[int],  # of each dimension, the contiguous one first; elements are bytes
    strides: Sequence[int],  # of each dimension but the first, multiples of 16
    box: Sequence[int],  # of a block: the first at most 128, others at most 256
) -> TensorMap:
    """Blocks of a tensor of bytes, whose rows lie in shared memory in the hardware's swizzle of 128 bytes. Raises
    OSError or RuntimeError as `Program` does."""
    memory = (c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
    result = (c_ubyte * _MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT)
    rank = len(sizes)
    _call(
        ctypes.PyDLL("libcuda.so.1"),
        "cuTensorMapEncodeTiled",
        byref(result),
        c_int(_UINT8),
        c_uint32(rank),
        c_void_p(address),
        (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*(1,) * rank),
        *(c_int(each) for each in (_NO_INTERLEAVE, _SWIZZLE_128_BYTES, _L2_256_BYTES, _FILL_ZEROS)),
    )
    return result


def _call(driver: ctypes.PyDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status != 0:
        message = c_char_p()
        driver.cuGetErrorString(status, byref(message))
        raise RuntimeError(f"{name} failed: {(message.value or b'unknown error').decode()}")


def _kept(source: str, architecture: str) -> bytes:
    """Returns the binary from Triton's cache of kernels, or compiles it."""
    try:
        from triton.runtime.cache import get_cache_manager
    except ImportError:
        return _compiled(source, architecture)
    facts = (source, architecture, torch.__version__, torch.version.cuda)
    folder, name = get_cache_manager(hashlib.sha256(repr(facts).encode()).hexdigest()), "kernel.cubin"
    if (file := folder.get_file(name)) is not None:
        return Path(file).read_bytes()
    binary = _compiled(source, architecture)
    folder.put(binary, name)
    return binary


def _compiled(source: str, architecture: str) -> bytes:
    # The library through which torch calls NVRTC. It also has the symbols of the libraries that it is linked to.
    nvrtc = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvrtc, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed: {message(status)}{log()}")

    def message(status: int) -> str:
        nvrtc.nvrtcGetErrorString.restype = c_char_p
        return nvrtc.nvrtcGetErrorString(status).decode()

    def log() -> str:
        size = c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        nvrtc.nvrtcGetProgramLog(program, text)
        return f"\n{text.value.decode()}"

    program = c_void_p()
    call("nvrtcCreateProgram", byref(program), source.encode(), None, 0, None, None)
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        call("nvrtcCompileProgram", program, len(options), (c_char_p * len(options))(*options))
        size = c_size_t()
        call("nvrtcGetCUBINSize", program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, binary)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return binary.raw
