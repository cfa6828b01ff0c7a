"""Pixels without a file around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PixelLayout = Literal["rgb8", "bgr8", "rgba8", "gray8"]
"""The channels of a pixel in their order, 8 bits each."""


@dataclass(frozen=True, slots=True)
class RawImage:
    """Pixels without a file: rows from the top, each from the left.

    Args:
        pixels: The bytes of all rows.
        width_px: Width in pixels.
        height_px: Height in pixels.
        layout: The channels of a pixel, such as "bgr8" for what OpenCV reads.
        row_stride_bytes: From the start of a row to that of the next; None where there is no padding.
    """

    pixels: bytes | bytearray | memoryview
    width_px: int
    height_px: int
    layout: PixelLayout = "rgb8"
    row_stride_bytes: int | None = None
