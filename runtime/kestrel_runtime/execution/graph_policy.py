"""Decides which work is captured as a CUDA graph, when graphs are dropped, and what runs without one.

Invariants
  G1  Work runs once and returns its result, whether or not a capture succeeds. A failed capture raises nothing.
  G2  No work in traffic waits for a capture, runs twice or waits for the device: it runs without a graph, or by one
      of a larger size. Work that ran more than once, and work that the start has left, is captured by
      `capture_wanted`, while there is no traffic.
  G3  All graphs of a runner together stay within their budget. The least recently used ones are dropped, and
      destroyed when their last replay is complete.
  G4  A failure to capture is logged once for its key, and not tried again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from kestrel_runtime.execution.graph_capture import CapturedGraph, StreamCapture

_MOST_GRAPHS = 512
_MOST_FAILURES = 8
"""After so many failed captures of one kind no more are tried: the others would most likely fail too."""

Work = Callable[[], Tensor]
Works = Iterator[tuple[Hashable, Work]]
"""Keys with the work to capture. The inputs of a work are valid until the iterator is advanced."""

_log = logging.getLogger(__name__)


class GraphBudget:
    """Counts the graphs of one runner, of all kinds, and has the least recently used ones dropped."""

    def __init__(self, *, max_bytes: int, max_graphs: int = _MOST_GRAPHS) -> None:
        """Takes the limit of device memory, in bytes, for graphs and the pools that they compute in."""
        self._max_bytes = max_bytes
        self._max_graphs = max_graphs
        self._graph_bytes: OrderedDict[tuple[CapturedGraphs, Hashable], int] = OrderedDict()
        self._pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graph_bytes)

    @property
    def num_bytes(self) -> int:
        """Returns the device memory of all graphs and their pools, in bytes, as measured at capture."""
        return self._pool_bytes + sum(self._graph_bytes.values())

    @property
    def has_room(self) -> bool:
        """Returns True if dropping graphs can bring the total below the limit: pools never shrink."""
        return self._pool_bytes < self._max_bytes

    def add(self, owner: CapturedGraphs, key: Hashable, captured: CapturedGraph) -> None:
        """Counts a new graph, and drops others until all are within bounds."""
        self._graph_bytes[owner, key] = captured.graph_bytes
        had_room = self.has_room
        self._pool_bytes += captured.pool_bytes
        if had_room and not self.has_room:
            _log.warning("the memory for CUDA graphs is used up: no more are captured")
        while self.num_graphs > 1 and (self.num_graphs > self._max_graphs or self.num_bytes > self._max_bytes):
            oldest_owner, oldest = next(iter(self._graph_bytes))
            oldest_owner.drop(oldest)

    def use(self, owner: CapturedGraphs, key: Hashable) -> None:
        """Notes that a graph is used now."""
        self._graph_bytes.move_to_end((owner, key))

    def remove(self, owner: CapturedGraphs, key: Hashable) -> None:
        """Stops counting a graph."""
        del self._graph_bytes[owner, key]


class CapturedGraphs:
    """Graphs of one kind of work, by key. The work of a key always reads its inputs at the same addresses."""

    def __init__(self, kind: str, stream_capture: StreamCapture, budget: GraphBudget) -> None:
        """Takes the `kind` that names the graphs in the log."""
        self._kind = kind
        self._stream_capture = stream_capture
        self._budget = budget
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._unproven: set[Hashable] = set()
        self._met: set[Hashable] = set()
        self._wanted: dict[Hashable, Callable[[], Work]] = {}
        self._left: Works = iter(())
        self._failed: set[Hashable] = set()
        self._dropped: list[tuple[CapturedGraph, torch.cuda.Event]] = []

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def __iter__(self) -> Iterator[Hashable]:
        """Yields the keys of all graphs."""
        return iter(self._captured)

    def run(self, key: Hashable, work: Work) -> Tensor:
        """Runs `work` once, by a replay if it has a graph. The result is valid until the next `run`."""
        self._destroy_dropped()
        captured = self._captured.get(key)
        if captured is not None and self._replay(key, captured):
            return captured.result
        self.note_missing(key, lambda: work)
        return work()

    def note_missing(self, key: Hashable, new_work: Callable[[], Work]) -> None:
        """Notes that a work without a graph was asked for. The second time its graph is wanted.

        `new_work` lays out inputs and returns the work; called before the capture, while there is no traffic.
        """
        if key not in self._met:
            self._met.add(key)
        elif key not in self._wanted and self._may_capture(key):
            self._wanted[key] = new_work

    def leave(self, works: Works) -> None:
        """Leaves these works to `capture_wanted`, in their order. What they write must not matter."""
        self._left = itertools.chain(self._left, works)

    def capture_wanted(self) -> bool:
        """Captures a work that ran more than once without a graph, or else one that the start has left; returns
        False if there is none.

        Does not wait for the device. Runs only works that the start has left and that cannot be captured before
        they have run.
        """
        with self._stream_capture.entered():  # inputs are written
            while self._wanted:
                key = next(iter(self._wanted))
                new_work = self._wanted.pop(key)
                if self._may_capture(key):
                    self._capture(key, new_work())
                    return True
            for key, work in self._left:
                if self._may_capture(key):
                    self._capture_first(key, work, runs_before=False)
                    return True
        return False

    def capture_all(self, works: Works, *, each_runs_before: bool = False) -> None:
        """Captures works before traffic, in their order: the largest first, so that others fit into its memory.

        The first one runs before its capture, because libraries do things on first use that a capture does not
        allow; with `each_runs_before` every one does, and where a capture fails, it runs before a second attempt.
        What these runs write must not matter. Waits for the device.
        """
        is_first = True
        with self._stream_capture.entered():  # the iterator writes the inputs
            for key, work in works:
                if not self._may_capture(key):
                    continue
                if is_first:
                    try:
                        work()
                        self._stream_capture.release_warm_up_memory()
                    except Exception as error:  # out of memory, for a size that may never be needed
                        self._give_up(key, error)
                        continue
                self._capture_first(key, work, runs_before=each_runs_before and not is_first)
                is_first = False

    def _capture_first(self, key: Hashable, work: Work, *, runs_before: bool) -> None:
        """Captures a work that may not have run yet. Where that fails it runs before a second attempt."""
        try:
            if runs_before or not self._try_to_capture(key, work):
                work()
        except Exception as error:  # out of memory, for a size that may never be needed
            self._give_up(key, error)
            return
        self._met.add(key)
        if key not in self._captured and self._may_capture(key):
            self._capture(key, work)

    def drop(self, key: Hashable) -> None:
        """Drops a graph. It is destroyed when all work launched on its stream so far is complete."""
        captured, event = self._captured.pop(key), self._stream_capture.mark()
        self._budget.remove(self, key)
        self._unproven.discard(key)
        self._met.discard(key)
        if event is not None:
            self._dropped.append((captured, event))

    def clear(self) -> None:
        """Drops all graphs: the addresses that they read and write are no longer valid."""
        for key in list(self._captured):
            self.drop(key)
        self._wanted.clear()
        self._left = iter(())

    def _may_capture(self, key: Hashable) -> bool:
        may_try = len(self._failed) < _MOST_FAILURES
        return key not in self._captured and key not in self._failed and may_try and self._budget.has_room

    def _capture(self, key: Hashable, work: Work) -> None:
        try:
            self._add(key, work)
        except Exception as error:  # or an error of the work itself, which is raised again without a graph
            self._give_up(key, error)

    def _try_to_capture(self, key: Hashable, work: Work) -> bool:
        try:
            self._add(key, work)
        except Exception as error:
            _log.debug("%s of %s run before they are captured: %s", self._kind, key, error)
            return False
        return True

    def _add(self, key: Hashable, work: Work) -> None:
        started = time.monotonic()
        captured = self._stream_capture.capture(work)
        self._captured[key] = captured
        self._unproven.add(key)
        self._budget.add(self, key, captured)
        _log.debug("captured %s of %s in %.3f s", self._kind, key, time.monotonic() - started)

    def _replay(self, key: Hashable, captured: CapturedGraph) -> bool:
        """Returns True if the graph has run.

        A first launch takes memory, too; where there is none, nothing has run.
        """
        if key in self._unproven:
            try:
                captured.graph.replay()
            except Exception as error:
                self.drop(key)
                self._give_up(key, error)
                return False
            self._unproven.discard(key)
        else:
            captured.graph.replay()
        self._budget.use(self, key)
        return True

    def _give_up(self, key: Hashable, error: Exception) -> None:
        self._failed.add(key)
        reason = str(error).partition("\n")[0] or type(error).__name__
        last = "; no more of them are captured" if len(self._failed) == _MOST_FAILURES else ""
        _log.warning("%s of %s run without a CUDA graph: %s%s", self._kind, key, reason, last)

    def _destroy_dropped(self) -> None:
        if self._dropped:
            self._dropped = [(captured, event) for captured, event in self._dropped if not event.query()]
