"""Makes Moondream's crops on the device, with the same pixels as on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.imaging.crops import DecodedImage
from kestrel_runtime.imaging.lanczos import LanczosAxis, joined_taps, shrinks_rows_first
from kestrel_runtime.models.moondream.layers import concatenated
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping

_MAX_KEPT_SIZES = 128
"""The number of sizes of images whose resize weights stay on the device. Most take less than 100 kB, none 800."""

_Pass = tuple[Tensor, int]
"""Weights of the operation `resample`, and the dimension."""
_Passes = tuple[_Pass, _Pass, Tensor]
"""Two passes, and the windows [crops, 2] of the second."""


class Cropper:
    """Makes the crops of decoded images on one device. Belongs to one thread."""

    def __init__(self, cropping: MoondreamCropping, device: torch.device, resample: Callable[..., Tensor]) -> None:
        """Takes an implementation of the operation `resample`."""
        self._cropping = cropping
        self._device = device
        self._resample = resample
        self._passes = lru_cache(_MAX_KEPT_SIZES)(self._new_passes)

    def make_crops(self, image: DecodedImage) -> Tensor:
        """Returns the crops of `MoondreamCropping.make_crops`: uint8 [crops, side, side, 3].

        Does not synchronise.
        """
        return self.crop(self.upload(image.pixels), image.rows, image.columns)

    def make_crops_now(self, image: DecodedImage) -> Tensor:
        """Returns the same. Waits until the pixels have left the host.

        The driver copies them in small pieces from where they are, which takes less time than a copy to pinned
        memory and one from there.
        """
        if not image.pixels.flags.writeable:  # torch would warn
            return self.make_crops(image)
        pixels = torch.from_numpy(image.pixels).to(self._device, non_blocking=True)
        return self.crop(pixels, image.rows, image.columns)

    def upload(self, pixels: np.ndarray) -> Tensor:
        """Returns uint8 pixels on the device. Does not synchronise."""
        return self._upload(pixels, torch.uint8)

    def crop(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the crops [1 + rows * columns, side, side, 3] of pixels [height, width, 3 or 4] on the device."""
        made: list[Tensor] = []
        for (first_taps, first_dim), (taps, dim), windows in self._passes(*pixels.shape[:2], rows, columns):
            between = self._resample(pixels, first_taps, first_dim)
            made.append(self._resample(between, taps, dim, windows, self._cropping.crop_px))
        return concatenated(made)

    def _new_passes(self, height: int, width: int, rows: int, columns: int) -> list[_Passes]:
        """Returns the passes that make the crops of images of a size, in their order.

        The whole image and the canvas of the other crops are resized together: the weights of one are behind those
        of the other along both axes, and the parts of the result that mix them are not computed. Only if rows are
        resampled first for one of them and columns for the other are they resized apart.
        """
        size, stride = self._cropping.crop_px, self._cropping.stride_px
        whole = LanczosAxis(height, size), LanczosAxis(width, size)
        canvas = (
            LanczosAxis(height, self._cropping.canvas_px(rows)),
            LanczosAxis(width, self._cropping.canvas_px(columns)),
        )
        grid = [(row * stride, column * stride) for row, column in product(range(rows), range(columns))]
        if shrinks_rows_first(*whole) != shrinks_rows_first(*canvas):
            return [self._passes_of([whole], [(0, 0)]), self._passes_of([canvas], grid)]
        return [self._passes_of([whole, canvas], [(0, 0), *((size + top, size + left) for top, left in grid)])]

    def _passes_of(self, resizes: list[tuple[LanczosAxis, LanczosAxis]], windows: list[tuple[int, int]]) -> _Passes:
        """Returns the passes of resizes whose results stand behind each other along both axes."""
        by_dim = [
            (self._upload(joined_taps(axes).numpy(), torch.int32), dim)
            for dim, axes in enumerate(zip(*resizes, strict=True))
        ]
        rows_first = shrinks_rows_first(*resizes[0])
        first, second = by_dim if rows_first else reversed(by_dim)
        return first, second, self._upload(np.array(windows, np.int32), torch.int32)

    def _upload(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        # Only copies from pinned memory are asynchronous.
        staged = torch.empty(array.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        np.copyto(staged.numpy(), array)
        return staged.to(self._device, non_blocking=True)
