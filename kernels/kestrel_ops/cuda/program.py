"""Compiles a CUDA kernel by NVRTC, which is part of torch, and launches it through the driver."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch

_MOST_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute


class Program:
    """One compiled kernel, loaded onto the current device."""

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

    def launch(self, num_programs: int, num_threads: int, *arguments: ctypes._SimpleCData[Any]) -> None:
        """Launch on the current stream. Arguments have the types and the order of the kernel's parameters."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._call(
            "cuLaunchKernel",
            self._function,
            *(c_uint(number) for number in (num_programs, 1, 1, num_threads, 1, 1, self._shared_bytes)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
            pointers,
            None,
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            message = c_char_p()
            self._driver.cuGetErrorString(status, byref(message))
            raise RuntimeError(f"{name} failed: {(message.value or b'unknown error').decode()}")


def _kept(source: str, architecture: str) -> bytes:
    """What was compiled before, from where Triton keeps its kernels, or what is compiled now."""
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
