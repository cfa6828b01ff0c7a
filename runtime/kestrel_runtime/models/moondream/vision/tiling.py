"""Divides an image into Moondream's overlapping square tiles, on the host.

The paper and the public reference call these tiles crops, and so do the keys of `config.json`.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from kestrel_runtime.imaging.tiles import Tiles
from kestrel_runtime.models.moondream.config import VisionConfig


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


def _resize(image: Image.Image, height_px: int, width_px: int) -> np.ndarray:
    return np.asarray(image.resize((width_px, height_px), Image.Resampling.LANCZOS))
