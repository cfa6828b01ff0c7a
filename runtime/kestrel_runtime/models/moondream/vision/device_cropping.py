"""Makes Moondream's crops on the device, with the same pixels as on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.imaging.crops import DecodedImage
from kestrel_runtime.imaging.lanczos import LanczosAxis, shrinks_rows_first
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping

_MAX_KEPT_AXES = 256
"""The number of pairs of lengths whose resize weights stay on the device. Most take less than 50 kB, none 400."""


class Cropper:
    """Makes the crops of decoded images on one device. Belongs to one thread."""

    def __init__(
        self, cropping: MoondreamCropping, device: torch.device, resample: Callable[[Tensor, Tensor, int], Tensor]
    ) -> None:
        """Takes an implementation of the operation `resample`."""
        self._cropping = cropping
        self._device = device
        self._resample = resample
        self._taps = lru_cache(_MAX_KEPT_AXES)(lambda axis: self._upload(axis.taps().numpy(), torch.int32))

    def make_crops(self, image: DecodedImage) -> Tensor:
        """Returns the crops of `MoondreamCropping.make_crops`: uint8 [crops, side, side, 3].

        Does not synchronise.
        """
        return self.crop(self.upload(image.pixels), image.rows, image.columns)

    def upload(self, pixels: np.ndarray) -> Tensor:
        """Returns the first three channels of uint8 [..., 3 or 4] on the device. Does not synchronise."""
        return self._upload(pixels, torch.uint8)[..., :3].contiguous()

    def crop(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the crops [1 + rows * columns, side, side, 3] of pixels [height, width, 3] on the device."""
        size, stride = self._cropping.crop_px, self._cropping.stride_px
        canvas = self._resize(pixels, self._cropping.canvas_px(rows), self._cropping.canvas_px(columns))
        grid = canvas.unfold(0, size, stride).unfold(1, size, stride)  # [rows, columns, 3, side, side]
        crops = pixels.new_empty(1 + rows * columns, size, size, 3)
        crops[0] = self._resize(pixels, size, size)
        crops[1:].unflatten(0, (rows, columns)).copy_(grid.permute(0, 1, 3, 4, 2))
        return crops

    def _resize(self, pixels: Tensor, height: int, width: int) -> Tensor:
        # Along each axis a pixel is a weighted sum of few source pixels. Its weights depend on the lengths only.
        rows, columns = LanczosAxis(pixels.shape[0], height), LanczosAxis(pixels.shape[1], width)
        passes = [(columns, 1), (rows, 0)]
        for axis, dim in reversed(passes) if shrinks_rows_first(rows, columns) else passes:
            if axis.source != axis.target:
                pixels = self._resample(pixels, self._taps(axis), dim)
        return pixels

    def _upload(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        # Only copies from pinned memory are asynchronous.
        staged = torch.empty(array.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        np.copyto(staged.numpy(), array)
        return staged.to(self._device, non_blocking=True)
