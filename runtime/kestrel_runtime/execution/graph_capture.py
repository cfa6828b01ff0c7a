"""Captures work on a CUDA stream as a CUDA graph. `graph_policy` decides which work, and when.

At every launch another thread may take the interpreter's lock, and the launching thread then waits for it. Under
load, hundreds of launches take several times as long as the device needs for them. A replay is a single launch.

A capture can fail at any point: for lack of memory, or because the work waits for the device, as the reference
implementations of some operations do. torch does not clean up after all of these failures, so this module does.
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
"""Device memory that captures leave free, for steps that run without a graph."""
_DRIVER = "libcuda.so.1"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph. Replaying it runs the work again."""

    graph: torch.cuda.CUDAGraph
    result: Tensor
    """The result of the work. Every replay overwrites it."""
    graph_bytes: int
    """Device memory of the graph itself, freed when it is destroyed."""
    pool_bytes: int
    """Device memory by which the pool grew for it. Later captures reuse it."""


class StreamCapture:
    """Captures on the CUDA stream that replays, so that kernels keep its priority and libraries their workspaces.

    All graphs of a stream share a pool of memory, since they never run concurrently. One graph that is never
    replayed holds the pool: torch refuses to capture into a pool whose graphs are all gone, or have all failed.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._holder: torch.cuda.CUDAGraph | None = None
        self._blank: Tensor | None = None

    def entered(self) -> AbstractContextManager[object]:
        """Returns a context in which work is launched on the stream."""
        return self._stream.entered()

    def release_warm_up_memory(self) -> None:
        """Waits for the device and frees memory that only warm-up runs used. Called at the start only."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Captures `run`, which has run with the same shapes before. Neither runs it nor waits for the device.

        Meanwhile no thread may free pinned memory that work on this stream has used: torch would record an event in
        the capture, and raise "invalid argument" at the next allocation of pinned memory.

        Raises whatever made the capture fail. No part of the capture is left then; `run` can run without a graph.
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
        """Returns a graph of `run` in a pool, by default a new one, and what `run` returned."""
        graph = torch.cuda.CUDAGraph()
        # A garbage collection during the capture could destroy another graph, which makes the capture invalid.
        with self._stream.entered(), _without_garbage_collection():
            try:
                # Other threads are not restricted by this capture.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, result

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event after all work launched on the stream so far; None on a CPU."""
        return self._stream.record_event()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a failed capture on the stream and in torch's state, so that the work can run without a graph."""
        self._clear_error()  # this also adds work to a valid capture: torch warns of empty ones
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture has ended, but if `capture_end` raises, torch before 2.13 behaves as if it had not: freed
            # memory is not reused, and no capture in this pool can begin. Ending a valid capture of arbitrary work
            # for the same graph resets that state.
            self._clear_error()
            if _begin_capture(self._stream.handle):
                with contextlib.suppress(RuntimeError):  # newer torch has reset its state already
                    self._launch_anything()
                    graph.capture_end()
                if torch.cuda.is_current_stream_capturing():
                    _drop_capture(self._stream.handle)
        graph.reset()
        self._clear_error()

    def _clear_error(self) -> None:
        """Clears a pending CUDA error that a library left: otherwise the next launch would raise it."""
        with contextlib.suppress(RuntimeError):
            self._launch_anything()

    def _launch_anything(self) -> Tensor:
        assert self._blank is not None, "made before the first capture"
        with torch.inference_mode():  # so that inference tensors can be written too
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


# Asks the driver itself, which torch does not know of.


def _begin_capture(stream: int) -> bool:
    """Begins a capture on a stream, given by its handle. False where there is no driver or it refuses."""
    driver = _driver()
    return driver is not None and driver.cuStreamBeginCapture_v2(c_void_p(stream), _THREAD_LOCAL) == 0


def _drop_capture(stream: int) -> None:
    """Ends the capture of a stream, if there is one, and discards what was captured."""
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
