"""Divides an image into Moondream's overlapping square tiles: on the host, or with the same pixels on the device.

The paper and the public reference call these tiles crops, and so do the keys of `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.imaging.lanczos import LanczosAxis, shrinks_rows_first
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles
from kestrel_runtime.models.moondream.config import VisionConfig

_MAX_KEPT_AXES = 256
"""The number of pairs of lengths whose resize weights stay on the device. Most take less than 50 kB, none 400."""


class MoondreamTiling:
    """Rows and columns of tiles, and their pixels. The aspect ratio is not kept: tiles are square."""

    def __init__(self, vision: VisionConfig) -> None:
        self.tile_px = vision.crop_size
        self.margins_px = 2 * vision.overlap_margin * vision.enc_patch_size
        """The width of both margins of a tile together, which overlap with neighbouring tiles."""
        self.stride_px = self.tile_px - self.margins_px
        self._max_grid_tiles = vision.max_crops

    @property
    def tile_bytes(self) -> int:
        """Memory of the pixels of one tile."""
        return 3 * self.tile_px**2

    @property
    def max_tiles(self) -> int:
        """The most tiles of one image, the whole image included."""
        return 1 + self._max_grid_tiles

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Rows and columns of the tiles that cover an image of this size: at most `max_crops` tiles."""
        window, max_tiles = self.stride_px, self._max_grid_tiles
        height, width = max(1, height_px - self.margins_px), max(1, width_px - self.margins_px)
        if height <= window or width <= window:
            return 1, 1
        rows, columns = math.ceil(height / window), math.ceil(width / window)
        if rows * columns > max_tiles:
            # Too large to tile at full resolution: reduce the image and keep the aspect ratio.
            shrink = math.sqrt(max_tiles / (rows * columns))
            rows, columns = max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
        else:
            # More tiles are allowed: as many as fit with the aspect ratio of the image.
            rows = max(rows, math.floor(math.sqrt(max_tiles * height / width)))
            columns = max(columns, math.floor(math.sqrt(max_tiles * width / height)))
        # Neither case limits the longer side of a long narrow image.
        if columns > rows:
            return rows, min(columns, max_tiles // rows)
        return min(rows, max_tiles // columns), columns

    def canvas_px(self, num_tiles: int) -> int:
        """The length in pixels of `num_tiles` overlapping tiles in a row."""
        return num_tiles * self.stride_px + self.margins_px

    def make_tiles(self, image: Image.Image) -> Tiles:
        """The tiles of an RGB image, made on the host."""
        rows, columns = self.select(image.height, image.width)
        size = self.tile_px
        pixels = np.empty((1 + rows * columns, size, size, 3), dtype=np.uint8)
        pixels[0] = _resize(image, size, size)
        canvas = _resize(image, self.canvas_px(rows), self.canvas_px(columns))
        for row in range(rows):
            for column in range(columns):
                top, left = row * self.stride_px, column * self.stride_px
                pixels[1 + row * columns + column] = canvas[top : top + size, left : left + size]
        return Tiles(pixels, rows, columns)


class Tiler:
    """Makes the tiles of decoded images on one device. Belongs to one thread."""

    def __init__(
        self, tiling: MoondreamTiling, device: torch.device, resample: Callable[[Tensor, Tensor, int], Tensor]
    ) -> None:
        """resample: an implementation of the operation `resample`."""
        self._tiling = tiling
        self._device = device
        self._resample = resample
        self._taps = lru_cache(_MAX_KEPT_AXES)(lambda axis: self._upload(axis.taps().numpy(), torch.int32))

    def make_tiles(self, image: DecodedImage) -> Tensor:
        """The tiles of `MoondreamTiling.make_tiles`: uint8 [tiles, side, side, 3]. Does not synchronise."""
        return self.tile(self.upload(image.pixels), image.rows, image.columns)

    def upload(self, pixels: np.ndarray) -> Tensor:
        """The first three channels of uint8 [..., 3 or 4] on the device. Does not synchronise."""
        return self._upload(pixels, torch.uint8)[..., :3].contiguous()

    def tile(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """The tiles [1 + rows * columns, side, side, 3] of pixels [height, width, 3] that are on the device."""
        size, stride = self._tiling.tile_px, self._tiling.stride_px
        canvas = self._resize(pixels, self._tiling.canvas_px(rows), self._tiling.canvas_px(columns))
        grid = canvas.unfold(0, size, stride).unfold(1, size, stride)  # [rows, columns, 3, side, side]
        tiles = pixels.new_empty(1 + rows * columns, size, size, 3)
        tiles[0] = self._resize(pixels, size, size)
        tiles[1:].unflatten(0, (rows, columns)).copy_(grid.permute(0, 1, 3, 4, 2))
        return tiles

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


def _resize(image: Image.Image, height_px: int, width_px: int) -> np.ndarray:
    return np.asarray(image.resize((width_px, height_px), Image.Resampling.LANCZOS))
