"""Tiles of images on the device: made ahead while their requests wait, and handed to the vision encoder.

Without `DeviceTiler` the engine thread would make them between two steps, while the device idles.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.imaging.tiles import DecodedImage, Tiles, Tiling, keep_decoded

_log = logging.getLogger(__name__)


class PrefetchedTiles:
    """Tiles on the device, until they are claimed."""

    def __init__(self, tiles: Tensor) -> None:
        """tiles: uint8 [tiles, side, side, 3], written on the current stream."""
        self._tiles: Tensor | None = tiles
        self._ready = torch.cuda.current_stream(tiles.device).record_event() if tiles.is_cuda else None

    @property
    def is_claimed(self) -> bool:
        return self._tiles is None

    def claim(self) -> Tensor | None:
        """The tiles, for use on the current stream. Every call after the first returns None."""
        tiles, self._tiles = self._tiles, None
        if tiles is not None and self._ready is not None:
            stream = torch.cuda.current_stream(tiles.device)
            stream.wait_event(self._ready)
            tiles.record_stream(stream)
        return tiles


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchedImage(DecodedImage):
    """An image whose tiles are on the device. Its pixels are kept, so that freed tiles can be made again."""

    prefetched: PrefetchedTiles = field(kw_only=True)


class DeviceTiler:
    """Makes tiles for worker threads, one image at a time, on a stream of its own."""

    def __init__(
        self,
        tiling: Tiling,
        tile: Callable[[DecodedImage], Tensor],
        on_stream: Callable[[], AbstractContextManager[object]],
        *,
        max_images: int,
    ) -> None:
        """`tile` makes all tiles of an image on the device, and runs within `on_stream`, which selects the stream.

        `max_images` bounds the images whose tiles are on the device and not claimed.
        """
        self._tiling = tiling
        self._tile = tile
        self._on_stream = on_stream
        self._max_images = max_images
        self._kept: weakref.WeakSet[PrefetchedTiles] = weakref.WeakSet()  # until their requests end
        self._lock = threading.Lock()

    def __call__(self, image: Image.Image) -> Tiles | DecodedImage:
        """An RGB image with its tiles on the device.

        The tiles are not on the device if `max_images` images have theirs there, if the device has no memory left,
        or if the image is too large to be kept decoded.
        """
        prepared = keep_decoded(image, self._tiling)
        if isinstance(prepared, Tiles):
            return prepared
        with self._lock:
            if sum(not tiles.is_claimed for tiles in self._kept) >= self._max_images:
                return prepared
            try:
                with torch.inference_mode(), self._on_stream():
                    tiles = PrefetchedTiles(self._tile(prepared))
            except RuntimeError as error:  # the engine loop handles errors of the device
                _log.warning("an image could not be tiled in advance: %s", error)
                return prepared
            self._kept.add(tiles)
        return PrefetchedImage(prepared.pixels, prepared.rows, prepared.columns, prefetched=tiles)


class TileSource:
    """Provides tiles by the id of their image, a few at a time. Belongs to the engine thread.

    The tiles of a decoded image are made when the first of them is taken, and kept until the last one is taken.
    """

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
