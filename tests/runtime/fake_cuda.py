"""CUDA graph capture as far as the host sees it, on a machine without a GPU, with failures on demand.

`FakeCuda` replaces what torch and the driver do in a capture, so that `StreamCapture` itself runs.
`FakeStreamCapture` replaces `StreamCapture` in tests with real work, which a capture on a CPU would run.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from kestrel_runtime.execution import graph_capture
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.graph_capture import CapturedGraph, StreamCapture

MIB = 2**20


class FakeCuda:
    """Counts what must not happen in traffic.

    Behaves as torch 2.11 does: an invalid capture stays in its books until a valid one is ended for the graph.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_synchronised = self.num_emptied = self.num_captures = 0
        self.free_bytes = 1024 * MIB
        self.reserved_bytes = 0
        self.bytes_per_graph = self.bytes_of_pool = 0
        self.is_capturing = self.is_invalid = False
        self.closes_books_itself = False
        """As torch 2.13 does."""
        self.fails_at: str | None = None
        """begin, end or instantiate: where the next capture fails by itself."""
        self.open_books: dict[int | None, object] = {}
        """Captures that torch's allocators take to be under way, by pool: nothing is freed meanwhile."""
        self.new_pools = itertools.count()
        self.num_users: Counter[int] = Counter()
        """Graphs of each pool. A pool that has had graphs and has none is refused."""
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronise)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (self.free_bytes, 2**40))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: self.reserved_bytes)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(graph_capture, "_begin_capture", self._begin_by_driver)
        monkeypatch.setattr(graph_capture, "_drop_capture", self._drop_by_driver)

    @property
    def is_clean(self) -> bool:
        return not self.is_capturing and not self.open_books and gc.isenabled()

    def break_capture(self, message: str = "operation not permitted when stream is capturing") -> None:
        """What work does that waits for the device."""
        if self.is_capturing:
            self.is_invalid = True
            raise RuntimeError(f"CUDA error: {message}\nand a page of advice")

    def _synchronise(self, *_: object) -> None:
        self.break_capture()
        self.num_synchronised += 1

    def _empty(self) -> None:
        self.break_capture()
        self.num_emptied += 1

    def _begin_by_driver(self, stream: int) -> bool:
        assert not self.is_capturing
        self.is_capturing, self.is_invalid = True, False
        return True

    def _drop_by_driver(self, stream: int) -> None:
        self.is_capturing = False


class FakeGraph:
    """As `torch.cuda.CUDAGraph`. On a CPU the work of a capture runs, which the tests' work allows for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._pool: int | None = None
        self.has_ended = False

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> int | None:
        return self._pool

    def capture_begin(self, pool: int | None, capture_error_mode: str) -> None:
        cuda = self._cuda
        pool = next(cuda.new_pools) if pool is None else pool
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        if pool in cuda.open_books:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if cuda.fails_at == "begin":
            raise RuntimeError("no capture today")
        if cuda.num_users.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        cuda.num_users[pool] += 1
        self._pool = pool
        cuda.open_books[pool] = self
        cuda.is_capturing, cuda.is_invalid = True, False
        cuda.num_captures += 1

    def capture_end(self) -> None:
        cuda = self._cuda
        if not cuda.is_capturing:
            raise RuntimeError("the stream is not capturing")
        cuda.is_capturing = False
        if cuda.is_invalid or cuda.fails_at == "end":
            cuda.fails_at = None
            if cuda.closes_books_itself:
                cuda.open_books.pop(self._pool, None)
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nand advice")
        if cuda.open_books.pop(self._pool, None) is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        self.has_ended = True
        if cuda.fails_at == "instantiate":
            raise torch.OutOfMemoryError("CUDA out of memory")
        cuda.free_bytes -= cuda.bytes_per_graph + cuda.bytes_of_pool
        cuda.reserved_bytes += cuda.bytes_of_pool
        cuda.bytes_of_pool = 0

    def reset(self) -> None:
        self.has_ended = False
        if self._pool is not None:
            self._cuda.num_users[self._pool] -= 1
        self._pool = None

    def replay(self) -> None:
        assert self.has_ended


def new_stream_capture(device: torch.device) -> StreamCapture:
    """A real one on a GPU, else one that only looks so."""
    settle(device)
    return StreamCapture(CudaStream(device)) if device.type == "cuda" else FakeStreamCapture()  # pyrefly: ignore[bad-return]


def settle(device: torch.device) -> None:
    """Wait for what was launched on no stream in particular, as a start does before it captures."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class FakeEvent:
    """An event that comes to pass when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class ReplayingGraph:
    """Does its work again, and leaves the result where it was, or without `in_place` elsewhere."""

    def __init__(self, run: Callable[[], Tensor], *, in_place: bool) -> None:
        self._run = run
        self._in_place = in_place
        self.result: Tensor | None = None

    def replay(self) -> None:
        result = self._run()
        if self.result is None or not self._in_place:
            self.result = result.clone()
        else:
            self.result.copy_(result)


class FakeStreamCapture:
    """Like `StreamCapture`. Each capture raises the next of `failures`; it succeeds for None and after the last."""

    def __init__(self, failures: Iterable[Exception | None] = ()) -> None:
        self._failures = iter(failures)
        self.num_captures = self.num_releases = 0
        self.events: list[FakeEvent] = []
        self.graph_bytes = self.pool_bytes = 0
        self.has_events = False
        self.in_place = True
        """Whether every replay writes its result to the same place, which a copy in stream order allows for."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def release_warm_up_memory(self) -> None:
        self.num_releases += 1

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        self.num_captures += 1
        failure = next(self._failures, None)
        if failure is not None:
            raise failure
        pool_bytes, self.pool_bytes = self.pool_bytes, 0
        return _LazyGraph(ReplayingGraph(run, in_place=self.in_place), self.graph_bytes, pool_bytes)  # pyrefly: ignore[bad-return]

    def mark(self) -> FakeEvent | None:
        if not self.has_events:
            return None
        self.events.append(FakeEvent())
        return self.events[-1]


class _LazyGraph:
    """As `CapturedGraph`; its result has a place from the first replay on."""

    def __init__(self, graph: ReplayingGraph, graph_bytes: int, pool_bytes: int) -> None:
        self.graph, self.graph_bytes, self.pool_bytes = graph, graph_bytes, pool_bytes

    @property
    def result(self) -> Tensor | None:
        return self.graph.result
