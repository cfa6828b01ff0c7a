"""Encodes crops by CUDA graphs, one for each number of crops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kestrel_runtime.execution.graph_capture import StreamCapture
from kestrel_runtime.execution.graph_policy import CapturedGraphs, GraphBudget, Works

_USUAL_CROPS = 9
"""Crops of an image of 800 by 557 pixels: 2 by 4 and the global one."""
_PARTS_OF_IMAGES = range(14, 36, 2)
"""Numbers of crops of steps whose images have most of their crops in the crop cache: a step takes about eleven
prompts, and a change inside one crop leaves two to be encoded."""


FASTEST_PRODUCTS = "fastest products"
"""The fact by which a start keeps which algorithms of the encoder's products are the fastest."""


def measured_counts(max_crops: int, max_crops_of_image: int) -> list[int]:
    """Returns the numbers of crops that are worth a measurement of their products, the largest first.

    They are those of usual images, of the largest image and of the largest step, and hold the others.
    """
    most = max(max_crops, max_crops_of_image)
    return sorted({*range(_USUAL_CROPS, most + 1, _USUAL_CROPS), max_crops_of_image, most}, reverse=True)


class EncodeGraphs:
    """Runs `encode` by a graph if there is one for the number of crops."""

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
        """Takes `encode` for uint8 crops [N, side, side, channels]; more than `max_crops` have no graph."""
        self._encode = encode
        self._max_crops = max(max_crops, max_crops_of_image)
        self._max_crops_of_image = max_crops_of_image
        self.captured = CapturedGraphs("encodings", stream_capture, budget)
        # Input and output buffers, which all graphs share.
        self._crops = torch.zeros(self._max_crops, *crop_shape, dtype=torch.uint8, device=device)
        self._features: Tensor | None = None
        self._places: dict[int, Tensor] = {}  # views of `_crops`, by the number of crops

    def __call__(self, crops: Tensor) -> Tensor:
        """Returns the result of `encode` for `crops`; without a graph for their number, by the next larger one."""
        count = len(crops)
        if count > self._max_crops:  # several graphs, rather than none
            return torch.cat([self(part) for part in crops.split(self._max_crops)])
        if count not in self._places:
            self._places[count] = self._crops[:count]
        self._places[count].copy_(crops)
        own = count
        if own not in self.captured:
            held_by = [other for other in self.captured if isinstance(other, int) and other > count]
            if held_by:  # crops behind these, of earlier calls, are encoded with them
                self.captured.note_missing(count, lambda: partial(self._stored, count))
                own = min(held_by)
        return self.captured.run(own, partial(self._stored, own))[:count].clone()

    def usual(self, *, is_measured: bool) -> Works:
        """Returns the numbers of crops whose products are measured, or the others, which are those of one image,
        and of the changed parts of several; the largest first.
        """
        usual = measured_counts(self._max_crops, self._max_crops_of_image)
        parts = (count for count in _PARTS_OF_IMAGES if count <= self._max_crops)
        counts = usual if is_measured else {*range(1, self._max_crops_of_image), *parts}.difference(usual)
        for count in sorted(counts, reverse=True):
            yield count, partial(self._stored, count)

    def _stored(self, count: int) -> Tensor:
        features = self._encode(self._crops[:count])
        if self._features is None:  # allocated by the first run, before any capture
            self._features = features.new_empty(self._max_crops, *features.shape[1:])
        return self._features[:count].copy_(features)
