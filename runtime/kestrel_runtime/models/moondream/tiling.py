"""Cuts decoded images into crops on the device: the very pixels that `make_crops` would give.

Each axis of each resize is a sum over few source places, with weights that only the two lengths decide. Knows
tensors; knows no files and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.imaging.decoding import UncutImage, crop_margins_px
from kestrel_runtime.imaging.lanczos import LanczosAxis, shrinks_rows_first
from kestrel_runtime.models.moondream.config import VisionConfig

_MAX_KEPT_AXES = 256
"""Weights of so many pairs of lengths stay on the device: mostly below 50 kB each, 400 kB at the very most."""


class Tiler:
    """Makes crops of one model's size on one device. Belongs to one thread."""

    def __init__(
        self, vision: VisionConfig, device: torch.device, resample: Callable[[Tensor, Tensor, int], Tensor]
    ) -> None:
        """resample: an implementation of the operation of that name."""
        self._vision = vision
        self._device = device
        self._resample = resample
        self._taps = lru_cache(_MAX_KEPT_AXES)(lambda axis: self._upload(axis.taps().numpy(), torch.int32))

    def crops(self, image: UncutImage) -> Tensor:
        """uint8 [crops, side, side, 3]: first the whole image, then the tiles, row by row. Does not synchronise."""
        return self.cut(self.upload(image.pixels), image.rows, image.columns)

    def upload(self, pixels: np.ndarray) -> Tensor:
        """Of uint8 [height, width, 3 or 4] the first three lanes, on the device; copied while the host goes on."""
        return self._upload(pixels, torch.uint8)[:, :, :3].contiguous()

    def cut(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """The crops of pixels that are on the device; [1 + rows * columns, side, side, 3]."""
        size, margins = self._vision.crop_size, crop_margins_px(self._vision)
        stride = size - margins
        canvas = self._resize(pixels, rows * stride + margins, columns * stride + margins)
        tiles = canvas.unfold(0, size, stride).unfold(1, size, stride)  # [rows, columns, 3, side, side]
        crops = pixels.new_empty(1 + rows * columns, size, size, 3)
        crops[0] = self._resize(pixels, size, size)
        crops[1:].unflatten(0, (rows, columns)).copy_(tiles.permute(0, 1, 3, 4, 2))
        return crops

    def _resize(self, pixels: Tensor, height: int, width: int) -> Tensor:
        rows, columns = LanczosAxis(pixels.shape[0], height), LanczosAxis(pixels.shape[1], width)
        passes = [(columns, 1), (rows, 0)]
        for axis, dim in reversed(passes) if shrinks_rows_first(rows, columns) else passes:
            if axis.source != axis.target:
                pixels = self._resample(pixels, self._taps(axis), dim)
        return pixels

    def _upload(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        # Only a copy from pinned memory leaves the host alone.
        staged = torch.empty(array.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        np.copyto(staged.numpy(), array)
        return staged.to(self._device, non_blocking=True)
