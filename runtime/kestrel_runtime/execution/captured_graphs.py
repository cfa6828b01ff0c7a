"""Which work has a captured graph: when it is captured, when it is dropped, and what runs where there is none.

Invariants
  G1  Work runs once and gives its result, whether or not a capture succeeds. No failure to capture gets out.
  G2  In traffic nothing is run twice, and nothing waits for the device: work that comes the first time runs as it
      is, and is captured when it comes again.
  G3  All graphs of a runner together stay within their budget. Those used longest ago are dropped, each destroyed
      once its last replay is over.
  G4  A failure to capture is logged once for its key, and not tried again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from kestrel_runtime.execution.graph_capture import CapturedGraph, StreamCapture

_MOST_GRAPHS = 512
_MOST_FAILURES = 8
"""Of one kind, after which no more are captured: what fails so often fails for all, and trying takes time."""

Works = Iterator[tuple[Hashable, Callable[[], Tensor]]]
"""Keys, and for each the work to capture. Its inputs are in their places until the next is asked for."""

_log = logging.getLogger(__name__)


class GraphBudget:
    """Counts the graphs of one runner, of all kinds, and has the least recently used ones dropped."""

    def __init__(self, *, max_bytes: int, max_graphs: int = _MOST_GRAPHS) -> None:
        """`max_bytes` of device memory are for graphs and the pools that they compute in."""
        self._max_bytes = max_bytes
        self._max_graphs = max_graphs
        self._graph_bytes: OrderedDict[tuple[CapturedGraphs, Hashable], int] = OrderedDict()
        self._pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graph_bytes)

    @property
    def num_bytes(self) -> int:
        """Device memory that graphs and their pools take, as far as it was measured."""
        return self._pool_bytes + sum(self._graph_bytes.values())

    @property
    def has_room(self) -> bool:
        """Whether dropping graphs can make room: pools keep what they have."""
        return self._pool_bytes < self._max_bytes

    def add(self, owner: CapturedGraphs, key: Hashable, captured: CapturedGraph) -> None:
        """Count a new graph, and drop others until all are within bounds."""
        self._graph_bytes[owner, key] = captured.graph_bytes
        had_room = self.has_room
        self._pool_bytes += captured.pool_bytes
        if had_room and not self.has_room:
            _log.warning("the memory for CUDA graphs is used up: no more are captured")
        while self.num_graphs > 1 and (self.num_graphs > self._max_graphs or self.num_bytes > self._max_bytes):
            oldest_owner, oldest = next(iter(self._graph_bytes))
            oldest_owner.drop(oldest)

    def use(self, owner: CapturedGraphs, key: Hashable) -> None:
        """Note that a graph is used now."""
        self._graph_bytes.move_to_end((owner, key))

    def remove(self, owner: CapturedGraphs, key: Hashable) -> None:
        """Count a graph no longer."""
        del self._graph_bytes[owner, key]


class CapturedGraphs:
    """Graphs of one kind of work, each under a key. A key's work always reads its inputs in the same places."""

    def __init__(self, kind: str, stream_capture: StreamCapture, budget: GraphBudget) -> None:
        """`kind` names them in the log."""
        self._kind = kind
        self._stream_capture = stream_capture
        self._budget = budget
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._met: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._dropped: list[tuple[CapturedGraph, torch.cuda.Event]] = []

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """Do `work` once, by a replay where there is a graph. Returns its result, valid until the next `run`."""
        self._destroy_dropped()
        captured = self._captured.get(key)
        if captured is not None:
            captured.graph.replay()
            self._budget.use(self, key)
            return captured.result
        if key in self._met and self._may_capture(key) and self._capture(key, work):
            captured = self._captured[key]
            try:
                captured.graph.replay()
            except Exception as error:  # the first launch takes memory too; nothing has run then
                self.drop(key)
                self._give_up(key, error)
            else:
                return captured.result
        self._met.add(key)
        return work()

    def capture_all(self, works: Works, *, until: float) -> int:
        """Capture works before traffic, in their order: the largest first, so that others fit into its memory.

        Each is run once before, because what libraries do on first use no capture allows; whatever it changes then
        must not matter. Waits for the device. Stops at `until`, a moment of the monotonic clock. Returns how many
        were left out for that.
        """
        num_left = 0
        is_first = True
        with self._stream_capture.entered():  # for the inputs, which `works` lays out
            for key, work in works:
                if not self._may_capture(key):
                    continue
                if time.monotonic() >= until:
                    num_left += 1
                    continue
                try:
                    work()
                    if is_first:
                        self._stream_capture.release_warm_up_memory()
                except Exception as error:  # lack of memory, for a size that may never come
                    self._give_up(key, error)
                    continue
                is_first = False
                self._met.add(key)
                self._capture(key, work)
        return num_left

    def drop(self, key: Hashable) -> None:
        """Let a graph go. It is destroyed when all that was launched on its stream until now is over."""
        captured, event = self._captured.pop(key), self._stream_capture.mark()
        self._budget.remove(self, key)
        self._met.discard(key)
        if event is not None:
            self._dropped.append((captured, event))

    def clear(self) -> None:
        """Let all graphs go: what they read and write is no longer where it was."""
        for key in list(self._captured):
            self.drop(key)

    def _may_capture(self, key: Hashable) -> bool:
        has_luck = len(self._failed) < _MOST_FAILURES
        return key not in self._captured and key not in self._failed and has_luck and self._budget.has_room

    def _capture(self, key: Hashable, work: Callable[[], Tensor]) -> bool:
        started = time.monotonic()
        try:
            captured = self._stream_capture.capture(work)
        except Exception as error:  # of the work itself too, which then raises again where it runs as it is
            self._give_up(key, error)
            return False
        self._captured[key] = captured
        self._budget.add(self, key, captured)
        _log.debug("captured %s of %s in %.3f s", self._kind, key, time.monotonic() - started)
        return key in self._captured

    def _give_up(self, key: Hashable, error: Exception) -> None:
        self._failed.add(key)
        reason = str(error).partition("\n")[0] or type(error).__name__
        last = "; no more of them are captured" if len(self._failed) == _MOST_FAILURES else ""
        _log.warning("%s of %s run without a CUDA graph: %s%s", self._kind, key, reason, last)

    def _destroy_dropped(self) -> None:
        if self._dropped:
            self._dropped = [(captured, event) for captured, event in self._dropped if not event.query()]
