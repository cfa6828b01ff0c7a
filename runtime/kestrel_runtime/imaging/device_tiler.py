"""Crops cut on the device while their request still waits, so that the engine's thread finds them there.

Between two steps every launch of that thread is a moment without work for the device. Knows no requests.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.execution.cuda_stream import Lane
from kestrel_runtime.imaging.decoding import Crops, UncutImage, leave_uncut
from kestrel_runtime.models.moondream.config import VisionConfig

_log = logging.getLogger(__name__)


class CutAhead:
    """Crops on the device, until somebody claims them."""

    def __init__(self, crops: Tensor) -> None:
        """crops: uint8 [crops, side, side, 3], written on the current stream."""
        self._crops: Tensor | None = crops
        self._ready = torch.cuda.current_stream(crops.device).record_event() if crops.is_cuda else None

    @property
    def is_claimed(self) -> bool:
        return self._crops is None

    def claim(self) -> Tensor | None:
        """The crops, for the current stream, the first time; None from then on."""
        crops, self._crops = self._crops, None
        if crops is not None and self._ready is not None:
            stream = torch.cuda.current_stream(crops.device)
            stream.wait_event(self._ready)
            crops.record_stream(stream)
        return crops


@dataclass(frozen=True, slots=True, eq=False)
class CutImage(UncutImage):
    """An image whose crops are on the device already; its pixels are there for when they get lost."""

    ahead: CutAhead = field(kw_only=True)


class AheadCutter:
    """Cuts images for worker threads, one at a time, in a lane of its own."""

    def __init__(self, cut: Callable[[UncutImage], Tensor], device: torch.device, *, most_images: int) -> None:
        """`cut` makes all crops of an image on the device; `most_images` is how many may have theirs unclaimed."""
        self._cut = cut
        self._lane = Lane(device)
        self._most_images = most_images
        self._kept: weakref.WeakSet[CutAhead] = weakref.WeakSet()  # until their requests are over
        self._turn = threading.Lock()

    def __call__(self, image: Image.Image, vision: VisionConfig) -> Crops | UncutImage:
        """An RGB image as the engine takes it: cut, or uncut where there are enough or the device refuses."""
        prepared = leave_uncut(image, vision)
        if not isinstance(prepared, UncutImage):
            return prepared
        with self._turn:
            if sum(not ahead.is_claimed for ahead in self._kept) >= self._most_images:
                return prepared
            try:
                with torch.inference_mode(), self._lane.entered():
                    ahead = CutAhead(self._cut(prepared))
            except RuntimeError as error:  # out of memory, or worse: the engine's thread will meet it, and can act
                _log.warning("an image could not be cut ahead: %s", error)
                return prepared
            self._kept.add(ahead)
        return CutImage(prepared.pixels, prepared.rows, prepared.columns, ahead=ahead)
