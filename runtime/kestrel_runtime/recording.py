"""Work recorded as CUDA graphs and replayed. Knows nothing of what is recorded, nor of who replays it when.

Every launch gives other threads of the interpreter a chance to take its lock, and the launching one must wait for
it: under load, hundreds of launches take several times as long as the device needs for them. A replay is one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUM_REHEARSALS = 2  # compilers and libraries allocate on first use, which no recording allows

_log = logging.getLogger(__name__)


class Recording(NamedTuple):
    """A graph that does `run` again when replayed, and where its result then stands."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    @classmethod
    def of(cls, run: Callable[[], Tensor], pool: Any) -> Recording:
        """Rehearse `run`, then record it with memory from `pool`, as torch hands it out. Waits for the device."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_NUM_REHEARSALS):
                run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the rehearsals took belongs to their stream, which nobody uses again
        return cls.of_rehearsed(run, pool)

    @classmethod
    def of_rehearsed(cls, run: Callable[[], Tensor], pool: Any) -> Recording:
        """Record `run`, which has run with the same sizes before. Does not wait for the device."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what raised may have ended it already
                    graph.capture_end()
                raise
            graph.capture_end()
        return cls(graph, result)

    def replayed(self) -> Tensor:
        """Do it again; a copy of the result, whose place the next replay writes."""
        self.graph.replay()
        return self.result.clone()


class Recordings:
    """Works of one kind, each under a key. They always read their inputs from the same places."""

    def __init__(self, kind: str) -> None:
        """`kind` names them in the log."""
        self._kind = kind
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, Recording] = {}
        self._met: set[Hashable] = set()
        self._too_large: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], Tensor], *, at_once: bool) -> Tensor:
        """A copy of what `work` returns, by a replay where it is recorded.

        With `at_once` it is recorded when first met, for which the device has to wait; else the second time, so
        that what comes once is not recorded at all. What finds no memory for that is not tried again.
        """
        if key not in self._recorded and key not in self._too_large and (at_once or key in self._met):
            self._record(key, work)
        recording = self._recorded.get(key)
        if recording is not None:
            return recording.replayed()
        self._met.add(key)
        return work().clone()

    def _record(self, key: Hashable, work: Callable[[], Tensor]) -> None:
        started = time.monotonic()
        record = Recording.of_rehearsed if key in self._met else Recording.of
        try:
            self._recorded[key] = record(work, self._pool)
        except torch.OutOfMemoryError:
            self._too_large.add(key)
            _log.warning("no memory to record %s of %s; they run as they are", self._kind, key)
        else:
            _log.info("recorded %s of %s in %.2f s", self._kind, key, time.monotonic() - started)
