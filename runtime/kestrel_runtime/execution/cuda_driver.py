"""Begins and ends the capture of a CUDA stream by the driver itself, beside torch's books. Knows no tensors."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_void_p

_LIBRARY = "libcuda.so.1"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def begin_capture(stream: int) -> bool:
    """Begin a capture on a stream, given by its handle. False where there is no driver or it refuses."""
    driver = _driver()
    return driver is not None and driver.cuStreamBeginCapture_v2(c_void_p(stream), _THREAD_LOCAL) == 0


def drop_capture(stream: int) -> None:
    """End the capture of a stream, if there is one, and throw away what was captured."""
    driver, graph = _driver(), c_void_p()
    if driver is not None and driver.cuStreamEndCapture(c_void_p(stream), byref(graph)) == 0 and graph:
        driver.cuGraphDestroy(graph)


@functools.cache
def _driver() -> ctypes.PyDLL | None:
    try:
        library = ctypes.PyDLL(_LIBRARY)
    except OSError:
        return None
    for name, arguments in (
        ("cuStreamBeginCapture_v2", [c_void_p, c_int]),
        ("cuStreamEndCapture", [c_void_p, c_void_p]),
        ("cuGraphDestroy", [c_void_p]),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library
