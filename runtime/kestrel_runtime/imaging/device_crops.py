"""Makes crops of images on the device while their requests wait, and hands them to the vision encoder.

Without `DeviceCropper` the engine thread would make them between two steps, while the device idles.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kestrel_runtime.api.images import DecodedPixels
from kestrel_runtime.imaging.crops import Cropping, Crops, DecodedImage, keep_decoded, may_stay_decoded

_MAX_AWAITED_BYTES = 2**23
"""The most pixels for whose copy the engine thread waits: about 2 ms."""

_log = logging.getLogger(__name__)


class DeviceOperations(NamedTuple):
    """Operations on the images of worker threads, on one device."""

    crop: Callable[[DecodedImage], Tensor]
    """Makes on the device what `Cropping.make_crops` makes on the host: uint8 [crops, side, side, 3]."""
    crop_now: Callable[[DecodedImage], Tensor]
    """Does the same sooner, and has the thread wait for the copy of the pixels."""
    hash_words: Callable[[Tensor, Tensor], Tensor]
    """The operation `hash_words`."""


class CropDigests:
    """Digests that a device computes, until they are needed on the host."""

    def __init__(self, digests: Tensor) -> None:
        """Takes digests int64 [crops, words], which are written on the current stream."""
        self._digests = digests
        if digests.is_cuda:
            self._digests = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=True)
            self._digests.copy_(digests, non_blocking=True)
        self._ready = torch.cuda.current_stream(digests.device).record_event() if digests.is_cuda else None
        self._known: tuple[bytes, ...] | None = None

    def get(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns the digest of each crop; empty if the device has failed.

        While they are being computed it returns None, or waits for them if `waits` is true.
        """
        if self._known is None:
            try:
                if self._ready is not None and not self._ready.query():
                    if not waits:
                        return None
                    self._ready.synchronize()
            except RuntimeError:  # the step that follows reports the error
                return ()
            self._known = tuple(row.tobytes() for row in self._digests.numpy())
        return self._known


class PrefetchedCrops:
    """Crops on the device, and their digests. The first thread that wants them has them made."""

    def __init__(
        self,
        make: Callable[[], tuple[Tensor, torch.cuda.Event | None]],
        digest: Callable[[Tensor], CropDigests] | None,
    ) -> None:
        """Takes `make`, which makes crops uint8 [crops, side, side, 3] and an event after them, and `digest`, which
        launches their digests; None computes none. Both choose their stream.
        """
        self._make: Callable[[], tuple[Tensor, torch.cuda.Event | None]] | None = make
        self._digest = digest
        self._crops: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._unhashed: Tensor | None = None
        self._digests: CropDigests | None = None
        self._lock = threading.Lock()
        self.is_claimed = False
        """True once the crops have been claimed or freed, or could not be made."""

    def make(self) -> None:
        """Makes the crops, unless that has been done. May be called from any thread."""
        with self._lock:
            make, self._make = self._make, None
            if make is None or self.is_claimed:
                return
            try:
                self._crops, self._ready = make()
            except RuntimeError as error:  # the engine loop handles errors of the device
                _log.warning("an image could not be divided into crops in advance: %s", error)
                self.is_claimed = True
            if self._digest is not None:
                self._unhashed = self._crops

    def hash(self) -> None:
        """Launches the digests of the crops, unless that has been done. One thread at a time may call it."""
        if self._digest is None:
            return
        self.make()
        digest, self._digest = self._digest, None
        crops, self._unhashed = self._unhashed, None
        if crops is not None:
            try:
                self._digests = digest(crops)
            except RuntimeError as error:  # the engine loop handles errors of the device
                _log.warning("crops have no digests: %s", error)

    def claim(self) -> Tensor | None:
        """Returns the crops, for use on the current stream. Every call after the first returns None."""
        self.make()
        self.is_claimed = True
        crops, self._crops = self._crops, None
        if crops is not None and self._ready is not None:
            stream = torch.cuda.current_stream(crops.device)
            stream.wait_event(self._ready)
            crops.record_stream(stream)
        return crops

    def free(self) -> None:
        """Frees the crops without using them."""
        self.is_claimed, self._crops = True, None

    def digests(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns the digest of each crop, as `CropDigests.get` does; empty if none are computed."""
        if waits:
            self.hash()
        elif self._digest is not None:
            return None
        return () if self._digests is None else self._digests.get(waits=waits)


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchedImage(DecodedImage):
    """An image whose crops are on the device. Its pixels are kept, so that freed crops can be made again."""

    prefetched: PrefetchedCrops = field(kw_only=True)

    def prefetch(self) -> None:
        """Makes the crops now, in this thread."""
        self.prefetched.make()

    def crop_digests(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns a digest of the pixels of each crop, as `CropDigests.get` does; empty if none are computed."""
        return self.prefetched.digests(waits=waits)


class DeviceCropper:
    """Makes crops for worker threads, one image at a time, on a stream of its own."""

    def __init__(
        self,
        cropping: Cropping,
        crop: Callable[[DecodedImage], Tensor],
        on_stream: Callable[[], AbstractContextManager[object]],
        *,
        max_images: int,
        digest: Callable[[Tensor], Tensor] | None = None,
        crop_now: Callable[[DecodedImage], Tensor] | None = None,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes `crop`, which makes all crops of an image on the device, and runs it within `on_stream`, which
        selects the stream.

        `max_images` bounds the images whose crops are on the device and not claimed. `digest` computes the digests
        int64 [crops, words] of uint8 crops [crops, side, side, 3]; None computes none. While `is_idle` returns
        True, `PrefetchedCrops.make` is left to later, so that the engine plans its step meanwhile, and uses
        `crop_now`.
        """
        self._cropping = cropping
        self._crop = crop
        self._on_stream = on_stream
        self._max_images = max_images
        self._digest = digest
        self._crop_now = crop_now or crop
        self._is_idle = is_idle
        self._thread = threading.local()
        self._kept: weakref.WeakSet[PrefetchedCrops] = weakref.WeakSet()  # until their requests end
        self._keeping, self._lock = threading.Lock(), threading.Lock()

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        """Within the context the thread stays on the stream. Entering it takes longer than to launch the crops."""
        with torch.inference_mode(), self._on_stream():
            self._thread.is_on_stream = True
            try:
                yield
            finally:
                self._thread.is_on_stream = False

    def __call__(self, image: Image.Image) -> Crops | DecodedImage:
        """Returns an RGB image with its crops on the device.

        The crops are not on the device if `max_images` images have theirs there, if the device has no memory left,
        or if the image is too large to be kept decoded.
        """
        prepared = keep_decoded(image, self._cropping)
        return self._with_digests(prepared) if isinstance(prepared, Crops) else self._prefetched(prepared)

    def keep(self, decoded: DecodedPixels) -> DecodedImage | None:
        """Returns the same for pixels in the memory of another process, which are not copied on the host. None if
        they must be: such memory takes a file descriptor, so that only an idle engine keeps it."""
        if not self._is_idle() or not may_stay_decoded(decoded.width_px, decoded.height_px):
            return None
        pixels = np.frombuffer(decoded.pixels, np.uint8).reshape(decoded.height_px, decoded.width_px, 4)
        grid = self._cropping.select(decoded.height_px, decoded.width_px)
        return self._prefetched(DecodedImage(pixels, *grid))

    def _prefetched(self, prepared: DecodedImage) -> DecodedImage:
        is_idle = self._is_idle() and prepared.pixels.nbytes <= _MAX_AWAITED_BYTES
        make = partial(self._make, self._crop_now if is_idle else self._crop, prepared)
        crops = PrefetchedCrops(make, None if self._digest is None else self._digests_of)
        with self._keeping:
            if sum(not crops.is_claimed for crops in self._kept) >= self._max_images:
                return prepared
            self._kept.add(crops)
        if not is_idle:
            crops.hash()
            crops.make()
            if crops.is_claimed:
                return prepared
        return PrefetchedImage(prepared.pixels, prepared.rows, prepared.columns, prefetched=crops)

    def _make(
        self, crop: Callable[[DecodedImage], Tensor], image: DecodedImage
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        with self._lock, self._entered():
            crops = crop(image)
            if not crops.is_cuda:
                return crops, None
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(crops.device))
            return crops, ready

    def _digests_of(self, crops: Tensor) -> CropDigests:
        assert self._digest is not None, "called only with it"
        with self._lock, self._entered():
            return CropDigests(self._digest(crops))

    def _entered(self) -> AbstractContextManager[object]:
        return nullcontext() if getattr(self._thread, "is_on_stream", False) else self.on_thread()

    def _with_digests(self, made: Crops) -> Crops:
        """Returns crops of the host with digests by the device: equal pixels have equal ones, wherever they were
        made. Waits for the device."""
        if self._digest is None:
            return made
        try:
            digests = self._digests_of(torch.from_numpy(made.pixels))
        except RuntimeError as error:  # the engine loop handles errors of the device
            _log.warning("crops have no digests: %s", error)
            return made
        return replace(made, digests=digests.get(waits=True) or ())


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

    def take(
        self, image_id: Hashable, image: Crops | DecodedImage, crops: Sequence[int], *, is_last: bool
    ) -> list[Tensor]:
        """Returns crops of an image, named by their numbers in ascending order: uint8 [some, side, side, 3] on the
        device, in pieces. With `is_last` no crop of the image is taken after these."""
        if isinstance(image, Crops):
            return [self._upload(image.pixels[start:end]) for start, end in _runs(crops)]
        made = self._kept.pop(image_id, None)
        if crops and made is None:
            prefetched = image.prefetched.claim() if isinstance(image, PrefetchedImage) else None
            made = self._crop(image) if prefetched is None else prefetched
        if not is_last and made is not None:
            self._kept[image_id] = made
        if is_last and isinstance(image, PrefetchedImage):
            image.prefetched.free()
        if made is None or len(crops) == len(made):  # usually all, for which a view is made in vain
            return [] if made is None else [made]
        return [made[start:end] for start, end in _runs(crops)]

    def release(self, image_id: Hashable) -> None:
        """Frees the crops that are kept of an image."""
        self._kept.pop(image_id, None)

    def clear(self) -> None:
        """Frees the crops of all images. Crops that are still needed are made again."""
        self._kept.clear()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the runs [start, end) of consecutive numbers in ascending order."""
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        first, *_, last = [number for _, number in run] * 2
        yield first, last + 1
