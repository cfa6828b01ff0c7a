"""Makes crops of images on the device while their requests wait, and hands them to the vision encoder.

Without `DeviceCropper` the engine thread would make them between two steps, while the device idles.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.imaging.crops import Cropping, Crops, DecodedImage, keep_decoded

_log = logging.getLogger(__name__)


class PrefetchedCrops:
    """Crops on the device, until they are claimed."""

    def __init__(self, crops: Tensor) -> None:
        """Takes crops uint8 [crops, side, side, 3] that were written on the current stream."""
        self._crops: Tensor | None = crops
        self._ready = torch.cuda.current_stream(crops.device).record_event() if crops.is_cuda else None

    @property
    def is_claimed(self) -> bool:
        return self._crops is None

    def claim(self) -> Tensor | None:
        """Returns the crops, for use on the current stream. Every call after the first returns None."""
        crops, self._crops = self._crops, None
        if crops is not None and self._ready is not None:
            stream = torch.cuda.current_stream(crops.device)
            stream.wait_event(self._ready)
            crops.record_stream(stream)
        return crops


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchedImage(DecodedImage):
    """An image whose crops are on the device. Its pixels are kept, so that freed crops can be made again."""

    prefetched: PrefetchedCrops = field(kw_only=True)


class DeviceCropper:
    """Makes crops for worker threads, one image at a time, on a stream of its own."""

    def __init__(
        self,
        cropping: Cropping,
        crop: Callable[[DecodedImage], Tensor],
        on_stream: Callable[[], AbstractContextManager[object]],
        *,
        max_images: int,
    ) -> None:
        """Takes `crop`, which makes all crops of an image on the device, and runs it within `on_stream`, which
        selects the stream.

        `max_images` bounds the images whose crops are on the device and not claimed.
        """
        self._cropping = cropping
        self._crop = crop
        self._on_stream = on_stream
        self._max_images = max_images
        self._kept: weakref.WeakSet[PrefetchedCrops] = weakref.WeakSet()  # until their requests end
        self._lock = threading.Lock()

    def __call__(self, image: Image.Image) -> Crops | DecodedImage:
        """Returns an RGB image with its crops on the device.

        The crops are not on the device if `max_images` images have theirs there, if the device has no memory left,
        or if the image is too large to be kept decoded.
        """
        prepared = keep_decoded(image, self._cropping)
        if isinstance(prepared, Crops):
            return prepared
        with self._lock:
            if sum(not crops.is_claimed for crops in self._kept) >= self._max_images:
                return prepared
            try:
                with torch.inference_mode(), self._on_stream():
                    crops = PrefetchedCrops(self._crop(prepared))
            except RuntimeError as error:  # the engine loop handles errors of the device
                _log.warning("an image could not be divided into crops in advance: %s", error)
                return prepared
            self._kept.add(crops)
        return PrefetchedImage(prepared.pixels, prepared.rows, prepared.columns, prefetched=crops)


class CropSource:
    """Provides crops by the id of their image, a few at a time. Belongs to the engine thread.

    The crops of a decoded image are made when the first of them is taken, and kept until the last one is taken.
    """

    def __init__(self, crop: Callable[[DecodedImage], Tensor], upload: Callable[[np.ndarray], Tensor]) -> None:
        """Takes `crop`, which makes all crops of an image on the device, uint8 [crops, side, side, 3], and
        `upload`, which copies pixels there.
        """
        self._crop = crop
        self._upload = upload
        self._kept: dict[Hashable, Tensor] = {}  # by image id

    def take(self, image_id: Hashable, image: Crops | DecodedImage, start: int, end: int) -> Tensor:
        """Returns crops [start, end) of an image: uint8 [end - start, side, side, 3] on the device."""
        if isinstance(image, Crops):
            return self._upload(image.pixels[start:end])
        crops = self._kept.get(image_id)
        if crops is None:
            prefetched = image.prefetched.claim() if isinstance(image, PrefetchedImage) else None
            crops = self._kept[image_id] = self._crop(image) if prefetched is None else prefetched
        if end == image.num_crops:
            del self._kept[image_id]
        return crops[start:end]

    def release(self, image_id: Hashable) -> None:
        """Frees the crops that are kept of an image."""
        self._kept.pop(image_id, None)

    def clear(self) -> None:
        """Frees the crops of all images. Crops that are still needed are made again."""
        self._kept.clear()
