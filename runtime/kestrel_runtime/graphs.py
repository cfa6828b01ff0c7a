"""Whatever draws tokens recorded as CUDA graphs: one for each of a few batch sizes and each kind of draw.

A graph reads and writes where it did when it was recorded. Batches between the sizes are padded with nobody.
Recording waits for the device; replaying does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.recording import Recorder, Recording
from kestrel_runtime.sampling import DrawNeeds

_log = logging.getLogger(__name__)


class DrawGraphs:
    """Records `step`, which ends in a draw, when a size and kind is first met, and replays it."""

    def __init__(
        self,
        kind: str,
        step: Callable[[Tensor, DrawNeeds], Tensor],
        nobody: Tensor,
        recorder: Recorder,
        *,
        max_batch_size: int,
    ) -> None:
        """`step` takes int32 inputs [B, width] and returns [B, …]; `nobody` [width] is the row that pads.

        `kind` names the steps in the log.
        """
        self._kind = kind
        self._step = step
        self._recorder = recorder
        self._nobody = nobody
        self._nobody_on_host = nobody.cpu().numpy()
        self._sizes = batch_sizes(max_batch_size)
        self._inputs = {size: nobody.repeat(size, 1) for size in self._sizes}
        self._recorded: dict[tuple[int, DrawNeeds], Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, rows: np.ndarray, needs: DrawNeeds) -> Tensor:
        """rows: int32 [B, width] → what `step` returns, [B, …]: valid until the next replay."""
        size = next(size for size in self._sizes if size >= len(rows))
        graph, result = self._graph(size, needs)
        inputs = self._inputs[size]
        # Padded on the host: every operation here may cost the thread its turn with the interpreter.
        padded = torch.empty(inputs.shape, dtype=torch.int32, pin_memory=True)
        on_host = padded.numpy()
        on_host[: len(rows)] = rows
        on_host[len(rows) :] = self._nobody_on_host
        inputs.copy_(padded, non_blocking=True)
        graph.replay()
        return result[: len(rows)]

    def record_all(self, needs: DrawNeeds) -> None:
        """Record every size for draws of one kind, the largest first: the others fit into its memory."""
        for size in reversed(self._sizes):
            self._graph(size, needs)

    def _graph(self, size: int, needs: DrawNeeds) -> Recording:
        recorded = self._recorded.get((size, needs))
        if recorded is None:
            started = time.monotonic()
            recorded = self._recorded[size, needs] = self._record(size, needs)
            _log.info("recorded %s of %d, %s, in %.2f s", self._kind, size, needs, time.monotonic() - started)
        return recorded

    def _record(self, size: int, needs: DrawNeeds) -> Recording:
        inputs = self._inputs[size]
        inputs[:] = self._nobody  # what a rehearsal draws for nobody is lost on nobody
        return self._recorder.record(lambda: self._step(inputs, needs), self._pool)


def batch_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then by half as much: near enough above every batch, and few."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]
