"""The encoding of crops recorded as CUDA graphs, one for each number of them, and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kestrel_runtime.recording import Recorder, Recordings


class EncodeGraphs:
    """Records `encode`: the crops of one image at once, those of several when so many come again."""

    def __init__(
        self, encode: Callable[[Tensor], Tensor], recorder: Recorder, *, max_crops: int, max_crops_of_image: int
    ) -> None:
        """`encode` takes uint8 crops [N, side, side, channels]; more than `max_crops` are not recorded."""
        self._encode = encode
        self._max_crops = max(max_crops, max_crops_of_image)
        self._max_crops_of_image = max_crops_of_image
        self._recordings = Recordings("encodings", recorder)
        # Where all recordings read and write, one at a time.
        self._crops: Tensor | None = None
        self._features: Tensor | None = None

    def __call__(self, crops: Tensor) -> Tensor:
        """What `encode` returns for `crops`."""
        count = len(crops)
        if count > self._max_crops:
            return self._encode(crops)
        if self._crops is None:
            self._crops = torch.empty(self._max_crops, *crops.shape[1:], dtype=crops.dtype, device=crops.device)
        own = self._crops[:count]
        own.copy_(crops)
        return self._recordings.run(count, lambda: self._stored(own), at_once=count <= self._max_crops_of_image)

    def _stored(self, crops: Tensor) -> Tensor:
        features = self._encode(crops)
        if self._features is None:  # which a rehearsal makes, and no recording
            self._features = features.new_empty(self._max_crops, *features.shape[1:])
        return self._features[: len(crops)].copy_(features)
