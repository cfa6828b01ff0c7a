"""Provides tiles of images on the device, a few at a time, for the vision encoder.

The tiles of a decoded image are made when the first of them is taken, and kept until the last one is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from kestrel_runtime.imaging.device_tiler import PrefetchedImage
from kestrel_runtime.imaging.tiles import DecodedImage, Tiles


class TileSource:
    """Provides tiles by the id of their image. Belongs to the engine loop thread."""

    def __init__(self, tile: Callable[[DecodedImage], Tensor], upload: Callable[[np.ndarray], Tensor]) -> None:
        """`tile` makes all tiles of an image on the device, uint8 [tiles, side, side, 3]; `upload` copies there."""
        self._tile = tile
        self._upload = upload
        self._kept: dict[int, Tensor] = {}  # by image id

    def take(self, image_id: int, image: Tiles | DecodedImage, start: int, end: int) -> Tensor:
        """Tiles [start, end) of an image: uint8 [end - start, side, side, 3] on the device."""
        if isinstance(image, Tiles):
            return self._upload(image.pixels[start:end])
        tiles = self._kept.get(image_id)
        if tiles is None:
            prefetched = image.prefetched.claim() if isinstance(image, PrefetchedImage) else None
            tiles = self._kept[image_id] = self._tile(image) if prefetched is None else prefetched
        if end == image.num_tiles:
            del self._kept[image_id]
        return tiles[start:end]

    def release(self, image_id: int) -> None:
        """Free the tiles that are kept of an image."""
        self._kept.pop(image_id, None)

    def clear(self) -> None:
        """Free the tiles of all images. Tiles that are still needed are made again."""
        self._kept.clear()
