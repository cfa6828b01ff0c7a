"""Captures work on a CUDA stream as a graph that replays it. Knows nothing of what is captured, nor of when.

Every launch gives other threads of the interpreter a chance to take its lock, and the launching one must wait for
it: under load, hundreds of launches take several times as long as the device needs for them. A replay is one.

A capture can fail at any point: for lack of memory, or because the work waits for the device, which the reference
implementations of some operations do. torch does not clean up after all of these failures, so it is done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kestrel_runtime.api.config import MIB
from kestrel_runtime.execution.cuda_stream import CudaStream

_KEPT_FREE_BYTES = 256 * MIB
"""Of device memory, for steps that run without a graph: a captured graph only saves time."""
_DRIVER = "libcuda.so.1"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph: replaying it does the work again."""

    graph: torch.cuda.CUDAGraph
    result: Tensor
    """What the work returned; every replay writes it anew."""
    graph_bytes: int
    """Device memory that the graph itself takes, and gives back when it is dropped."""
    pool_bytes: int
    """Device memory by which the pool had to grow for it, and which later captures use again."""


class StreamCapture:
    """Captures on the CUDA stream that replays: kernels keep its priority, and libraries their workspaces there.

    All graphs of a stream share a pool of memory, since they never run beside each other. One graph that is never
    replayed holds the pool: torch refuses to capture into a pool whose graphs are all gone, or have all failed.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._holder: torch.cuda.CUDAGraph | None = None
        self._blank: Tensor | None = None

    def entered(self) -> AbstractContextManager[object]:
        """What is launched in the context goes onto the stream."""
        return self._stream.entered()

    def release_warm_up_memory(self) -> None:
        """Wait for the device, and give memory back to it that only warm-up runs used. For the start alone."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Capture `run`, which has run with the same shapes before; neither runs it nor waits for the device.

        Raises whatever went wrong; nothing of the capture is left then, and `run` can be run as it is.
        """
        free_before, reserved_before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        if free_before < _KEPT_FREE_BYTES:
            raise torch.OutOfMemoryError(f"only {free_before // MIB} MiB of device memory are free")
        if self._holder is None:
            self._blank = torch.zeros(1, device=self._stream.device)
            self._holder, _ = self._captured(self._launch_anything, pool=None)
        graph, result = self._captured(run, self._holder.pool())
        pool_bytes = max(0, torch.cuda.memory_reserved() - reserved_before)
        graph_bytes = max(0, free_before - torch.cuda.mem_get_info()[0] - pool_bytes)
        return CapturedGraph(graph, result, graph_bytes, pool_bytes)

    def _captured(self, run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `run` in a pool, or in one of its own, and what `run` returned."""
        graph = torch.cuda.CUDAGraph()
        # A garbage collection in the middle could destroy another graph, which makes the capture invalid.
        with self._stream.entered(), _without_garbage_collection():
            try:
                # Other threads go on as if nothing were captured.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, result

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that was launched on the stream until now."""
        return self._stream.record_event()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, on the stream and in torch's books, so that the work can run as it is."""
        self._clear_error()  # and a capture that is still valid is not empty, of which torch would warn
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture is over, but torch before 2.13 goes on as if it were not where its end raised: memory that
            # is freed is not used again, and no further capture in this pool can begin. Its books are closed by
            # ending a capture for the same graph that is valid, of work that does not matter.
            self._clear_error()
            if _begin_capture(self._stream.handle):
                with contextlib.suppress(RuntimeError):  # newer torch: the books are closed already
                    self._launch_anything()
                    graph.capture_end()
                if torch.cuda.is_current_stream_capturing():
                    _drop_capture(self._stream.handle)
        graph.reset()
        self._clear_error()

    def _clear_error(self) -> None:
        """Have CUDA forget an error that a library met in the capture and did not fetch: the next launch would."""
        with contextlib.suppress(RuntimeError):
            self._launch_anything()

    def _launch_anything(self) -> Tensor:
        assert self._blank is not None, "made before the first capture"
        with torch.inference_mode():  # the tensor may be of that mode or not
            return self._blank.add_(1)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# The driver itself, beside torch's books.


def _begin_capture(stream: int) -> bool:
    """Begin a capture on a stream, given by its handle. False where there is no driver or it refuses."""
    driver = _driver()
    return driver is not None and driver.cuStreamBeginCapture_v2(c_void_p(stream), _THREAD_LOCAL) == 0


def _drop_capture(stream: int) -> None:
    """End the capture of a stream, if there is one, and throw away what was captured."""
    driver, graph = _driver(), c_void_p()
    if driver is not None and driver.cuStreamEndCapture(c_void_p(stream), byref(graph)) == 0 and graph:
        driver.cuGraphDestroy(graph)


@functools.cache
def _driver() -> ctypes.PyDLL | None:
    try:
        library = ctypes.PyDLL(_DRIVER)
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
