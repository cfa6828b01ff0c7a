"""Crops of images as the vision encoder takes them: a few at a time, on the device, whatever they come from.

Images that were not cut ahead are cut once; crops are kept until the last one has been taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.imaging.decoding import UncutImage
from kestrel_runtime.imaging.device_tiler import CutImage
from kestrel_runtime.scheduling.sequence import CropRange, Sequence


class CropSource:
    """Gives crops out by sequence. Belongs to the engine's thread."""

    def __init__(self, cut: Callable[[UncutImage], Tensor], device: torch.device) -> None:
        """cut: makes all crops of an image, uint8 [crops, side, side, 3] on the device."""
        self._cut = cut
        self._device = device
        self._cut_crops: dict[int, Tensor] = {}  # by sequence id

    def take(self, crop_range: CropRange) -> Tensor:
        """uint8 [end - start, side, side, 3] on the device."""
        sequence, start, end = crop_range
        image = sequence.crops
        assert image is not None, "only sequences with an image have crops to encode"
        if not isinstance(image, UncutImage):
            return to_device(image.pixels[start:end], torch.uint8, self._device)
        crops = self._cut_crops.get(sequence.id)
        if crops is None:
            ahead = image.ahead.claim() if isinstance(image, CutImage) else None
            crops = self._cut_crops[sequence.id] = self._cut(image) if ahead is None else ahead
        if end == image.num_crops:
            del self._cut_crops[sequence.id]
        return crops[start:end]

    def release(self, sequence: Sequence) -> None:
        """Forget what is kept of a sequence's image."""
        self._cut_crops.pop(sequence.id, None)

    def clear(self) -> None:
        """Forget what is kept of everybody's images; who needs it has it cut again."""
        self._cut_crops.clear()
