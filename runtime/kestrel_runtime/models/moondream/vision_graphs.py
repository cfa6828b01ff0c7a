"""The encoding of crops as CUDA graphs, one for each number of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget, Works
from kestrel_runtime.execution.graph_capture import StreamCapture


class EncodeGraphs:
    """Runs `encode` by a graph where there is one for so many crops. One image's numbers are the usual ones."""

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        crop_shape: tuple[int, int, int],
        device: torch.device,
        stream_capture: StreamCapture,
        budget: GraphBudget,
        *,
        max_crops: int,
        max_crops_of_image: int,
    ) -> None:
        """`encode` takes uint8 crops [N, side, side, channels]; more than `max_crops` have no graph."""
        self._encode = encode
        self._max_crops = max(max_crops, max_crops_of_image)
        self._max_crops_of_image = max_crops_of_image
        self.captured = CapturedGraphs("encodings", stream_capture, budget)
        # Where all graphs read and write, one at a time.
        self._crops = torch.zeros(self._max_crops, *crop_shape, dtype=torch.uint8, device=device)
        self._features: Tensor | None = None

    def __call__(self, crops: Tensor) -> Tensor:
        """What `encode` returns for `crops`."""
        count = len(crops)
        if count > self._max_crops:
            return self._encode(crops)
        self._crops[:count].copy_(crops)
        return self.captured.run(count, partial(self._stored, count)).clone()

    def usual(self) -> Works:
        """The numbers of crops that one image can have, the largest first."""
        for count in range(self._max_crops_of_image, 0, -1):
            yield count, partial(self._stored, count)

    def _stored(self, count: int) -> Tensor:
        features = self._encode(self._crops[:count])
        if self._features is None:  # made where the work is first run, which is before any capture
            self._features = features.new_empty(self._max_crops, *features.shape[1:])
        return self._features[:count].copy_(features)
