"""Whatever draws tokens as CUDA graphs: one for each of a few batch sizes and each kind of draw.

A graph reads and writes where it did when it was captured. Batches between the sizes are padded with nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget, Works
from kestrel_runtime.execution.graph_capture import Recorder
from kestrel_runtime.execution.sampling import DrawNeeds


class DrawGraphs:
    """Runs `step`, which ends in a draw, for batches of any size and kind, by a graph where there is one."""

    def __init__(
        self,
        kind: str,
        step: Callable[[Tensor, DrawNeeds], Tensor],
        nobody: Tensor,
        recorder: Recorder,
        budget: GraphBudget,
        *,
        max_batch_size: int,
    ) -> None:
        """`step` takes int32 inputs [B, width] and returns [B, …]; `nobody` [width] is the row that pads.

        `kind` names the steps in the log.
        """
        self._step = step
        self._nobody = nobody
        self._nobody_on_host = nobody.cpu().numpy()
        self._sizes = batch_sizes(max_batch_size)
        self._inputs = {size: nobody.repeat(size, 1) for size in self._sizes}
        self.captured = CapturedGraphs(kind, recorder, budget)

    def replay(self, rows: np.ndarray, needs: DrawNeeds) -> Tensor:
        """rows: int32 [B, width] → what `step` returns, [B, …]: valid until the next replay."""
        size = next(size for size in self._sizes if size >= len(rows))
        inputs = self._inputs[size]
        # Padded on the host: every operation here may cost the thread its turn with the interpreter.
        padded = torch.empty(inputs.shape, dtype=torch.int32, pin_memory=inputs.is_cuda)
        on_host = padded.numpy()
        on_host[: len(rows)] = rows
        on_host[len(rows) :] = self._nobody_on_host
        inputs.copy_(padded, non_blocking=True)
        return self.captured.run((size, needs), partial(self._step, inputs, needs))[: len(rows)]

    def usual(self, kinds: Iterable[DrawNeeds]) -> Works:
        """Every size for draws of some kinds, the largest sizes first, with inputs of nobody: what is drawn for
        nobody is lost on nobody."""
        kinds = list(kinds)
        for size in reversed(self._sizes):
            self._inputs[size][:] = self._nobody
            for needs in kinds:
                yield (size, needs), partial(self._step, self._inputs[size], needs)


def batch_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then by half as much: near enough above every batch, and few."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]
