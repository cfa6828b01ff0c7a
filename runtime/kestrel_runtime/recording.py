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

from kestrel_runtime.lane import Lane

_NUM_REHEARSALS = 2  # compilers and libraries allocate on first use, which no recording allows

_MOST_RECORDINGS = 256
"""Of one kind. What comes often comes early, and a recording of hundreds of kernels takes memory of its own."""

_log = logging.getLogger(__name__)


class Recording(NamedTuple):
    """A graph that does its work again when replayed, and where the result then stands."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replayed(self) -> Tensor:
        """Do it again; a copy of the result, whose place the next replay writes."""
        self.graph.replay()
        return self.result.clone()


class Recorder:
    """Records in the lane that replays: kernels keep its priority, and libraries the memory that they have for it.

    What other threads launched there meanwhile would be recorded too.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def record(self, run: Callable[[], Tensor], pool: Any) -> Recording:
        """Rehearse `run`, then record it with memory from `pool`, as torch hands it out. Waits for the device."""
        torch.cuda.synchronize()  # what `run` reads may have been written anywhere
        with self._lane.entered():
            for _ in range(_NUM_REHEARSALS):
                run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the rehearsals took is of no use to the recording
        return self.record_rehearsed(run, pool)

    def record_rehearsed(self, run: Callable[[], Tensor], pool: Any) -> Recording:
        """Record `run`, which has run with the same sizes before. Does not wait for the device."""
        graph = torch.cuda.CUDAGraph()
        with self._lane.entered():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what raised may have ended it already
                    graph.capture_end()
                raise
            graph.capture_end()
        return Recording(graph, result)


class Recordings:
    """Works of one kind, each under a key. They always read their inputs from the same places."""

    def __init__(self, kind: str, recorder: Recorder) -> None:
        """`kind` names them in the log."""
        self._kind = kind
        self._recorder = recorder
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, Recording] = {}
        self._met: set[Hashable] = set()
        self._unrecorded: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], Tensor], *, at_once: bool) -> Tensor:
        """A copy of what `work` returns, by a replay where it is recorded.

        With `at_once` it is recorded when first met, for which the device has to wait; else the second time, so
        that what comes once is not recorded at all. What cannot be recorded, for want of memory say, runs as it is,
        and so does what comes when there are many recordings.
        """
        has_room = len(self._recorded) < _MOST_RECORDINGS
        if key not in self._recorded and key not in self._unrecorded and has_room and (at_once or key in self._met):
            self._record(key, work)
        recording = self._recorded.get(key)
        if recording is not None:
            return recording.replayed()
        self._met.add(key)
        return work().clone()

    def _record(self, key: Hashable, work: Callable[[], Tensor]) -> None:
        started = time.monotonic()
        record = self._recorder.record_rehearsed if key in self._met else self._recorder.record
        try:
            self._recorded[key] = record(work, self._pool)
        except RuntimeError as error:  # of the work itself too, which then raises again where it runs as it is
            self._unrecorded.add(key)
            _log.warning("%s of %s cannot be recorded and run as they are: %s", self._kind, key, error)
        else:
            _log.info("recorded %s of %s in %.2f s", self._kind, key, time.monotonic() - started)
