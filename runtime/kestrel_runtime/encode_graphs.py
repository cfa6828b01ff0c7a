"""The encoding of few crops recorded as CUDA graphs, one for each number of them, and replayed.

One image keeps the device busy for about as long as the host takes to launch its hundreds of kernels; replaying
takes the host no time. Larger batches keep it busy for longer and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NUM_REHEARSALS = 2


class EncodeGraphs:
    """Records `encode` when a number of crops is first met. Stands in for it."""

    def __init__(self, encode: Callable[[Tensor], Tensor], *, max_crops: int) -> None:
        """`encode` takes uint8 crops [N, side, side, channels]; more than `max_crops` are not recorded."""
        self._encode = encode
        self._max_crops = max_crops
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, crops: Tensor) -> Tensor:
        """What `encode` returns for `crops`."""
        count = len(crops)
        if count > self._max_crops:
            return self._encode(crops)
        if count not in self._recorded:
            self._recorded[count] = self._record(crops)
        graph, inputs, features = self._recorded[count]
        inputs.copy_(crops)
        graph.replay()
        return features.clone()  # its place is written again by the next replay

    def _record(self, crops: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        inputs = crops.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compilers and libraries allocate on first use, which no recording allows
            for _ in range(_NUM_REHEARSALS):
                self._encode(inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            features = self._encode(inputs)
        return graph, inputs, features
