"""The encoding of few crops recorded as CUDA graphs, one for each number of them, and replayed.

One image keeps the device busy for about as long as the host takes to launch its hundreds of kernels; replaying
takes the host no time. Larger batches keep it busy for longer and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kestrel_runtime.recording import Recording


class EncodeGraphs:
    """Records `encode` when a number of crops is first met. Stands in for it."""

    def __init__(self, encode: Callable[[Tensor], Tensor], *, max_crops: int) -> None:
        """`encode` takes uint8 crops [N, side, side, channels]; more than `max_crops` are not recorded."""
        self._encode = encode
        self._max_crops = max_crops
        self._recorded: dict[int, tuple[Tensor, Recording]] = {}  # where it reads the crops, and the rest
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, crops: Tensor) -> Tensor:
        """What `encode` returns for `crops`."""
        count = len(crops)
        if count > self._max_crops:
            return self._encode(crops)
        if count not in self._recorded:
            own = crops.clone()
            self._recorded[count] = own, Recording.of(lambda: self._encode(own), self._pool)
        inputs, recording = self._recorded[count]
        inputs.copy_(crops)
        return recording.replayed()
