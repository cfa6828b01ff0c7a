"""Divides an image into Moondream's overlapping square crops, on the host."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from kestrel_runtime.imaging.crops import Crops
from kestrel_runtime.models.moondream.config import VisionConfig


class MoondreamCropping:
    """Rows and columns of crops, and their pixels. The aspect ratio is not kept: crops are square."""

    def __init__(self, vision: VisionConfig) -> None:
        self.crop_px = vision.crop_size
        self.margins_px = 2 * vision.overlap_margin * vision.enc_patch_size
        """The width of both margins of a crop together, which overlap with neighbouring crops."""
        self.stride_px = self.crop_px - self.margins_px
        self._max_grid_crops = vision.max_crops

    @property
    def crop_bytes(self) -> int:
        """Returns the bytes of the pixels of one crop."""
        return 3 * self.crop_px**2

    @property
    def max_crops(self) -> int:
        """Returns the most crops of one image, the whole image included."""
        return 1 + self._max_grid_crops

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Returns the rows and columns of the crops that cover an image of this size: at most `max_crops` crops."""
        window, max_crops = self.stride_px, self._max_grid_crops
        height, width = max(1, height_px - self.margins_px), max(1, width_px - self.margins_px)
        if height <= window or width <= window:
            return 1, 1
        rows, columns = math.ceil(height / window), math.ceil(width / window)
        if rows * columns > max_crops:
            # Too large for crops at full resolution: reduce the image and keep the aspect ratio.
            shrink = math.sqrt(max_crops / (rows * columns))
            rows, columns = max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
        else:
            # More crops are allowed: as many as fit with the aspect ratio of the image.
            rows = max(rows, math.floor(math.sqrt(max_crops * height / width)))
            columns = max(columns, math.floor(math.sqrt(max_crops * width / height)))
        # Neither case limits the longer side of a long narrow image.
        if columns > rows:
            return rows, min(columns, max_crops // rows)
        return min(rows, max_crops // columns), columns

    def canvas_px(self, num_crops: int) -> int:
        """Returns the length in pixels of `num_crops` overlapping crops in a row."""
        return num_crops * self.stride_px + self.margins_px

    def make_crops(self, image: Image.Image) -> Crops:
        """Returns the crops of an RGB image, made on the host."""
        rows, columns = self.select(image.height, image.width)
        size = self.crop_px
        pixels = np.empty((1 + rows * columns, size, size, 3), dtype=np.uint8)
        pixels[0] = _resize(image, size, size)
        canvas = _resize(image, self.canvas_px(rows), self.canvas_px(columns))
        for row in range(rows):
            for column in range(columns):
                top, left = row * self.stride_px, column * self.stride_px
                pixels[1 + row * columns + column] = canvas[top : top + size, left : left + size]
        return Crops(pixels, rows, columns)


def _resize(image: Image.Image, height_px: int, width_px: int) -> np.ndarray:
    return np.asarray(image.resize((width_px, height_px), Image.Resampling.LANCZOS))
