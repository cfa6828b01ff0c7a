"""Holds images between decoding and the vision encoder: as crops, or as pixels to be divided later on the device.

The model family divides images (`Cropping`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from PIL import Image

# A separate function object: the attributes of `ctypes.pythonapi` are shared with all other code.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
# Larger images are not kept decoded. This many pixels take 32 MB and hold an image of 3840 × 2160.
_MAX_DECODED_PIXELS = 2**23
# The first pass of a resize may produce an image as long as this side and as wide as all crops side by side.
_MAX_DECODED_SIDE_PX = 2**14


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Crops:
    """The crops of one image.

    `pixels` is uint8 [1 + rows * columns, side, side, 3]: first the whole image, then its crops row by row.
    """

    pixels: np.ndarray
    rows: int
    columns: int
    digests: Sequence[bytes] = ()
    """A digest of the pixels of each crop; empty if there are none."""

    @property
    def num_crops(self) -> int:
        return len(self.pixels)

    def crop_digests(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns `digests`."""
        return self.digests


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DecodedImage:
    """An image whose crops are made later, in the order of `Crops`.

    `pixels` is uint8 [height, width, 3 or 4] and read-only; a fourth channel is padding.
    """

    pixels: np.ndarray
    rows: int
    columns: int

    @property
    def num_crops(self) -> int:
        return 1 + self.rows * self.columns

    def prefetch(self) -> None:
        """Does nothing: the crops of this image are made when it is encoded."""

    def crop_digests(self, *, waits: bool) -> Sequence[bytes] | None:
        """Returns no digests: without crops there are none."""
        return ()


class Cropping(Protocol):
    """The division of images into crops by a model family. Called from any thread."""

    @property
    def crop_bytes(self) -> int:
        """Returns the bytes of the pixels of one crop."""
        ...

    @property
    def max_crops(self) -> int:
        """Returns the most crops of one image, the whole image included."""
        ...

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Returns the rows and columns of crops for an image of this size, in pixels."""
        ...

    def make_crops(self, image: Image.Image) -> Crops:
        """Returns the crops of an RGB image."""
        ...


def keep_decoded(image: Image.Image, cropping: Cropping) -> DecodedImage | Crops:
    """Keeps an RGB image decoded, to make its crops later; makes them now if the pixels take too much memory."""
    if not may_stay_decoded(*image.size):
        return cropping.make_crops(image)
    try:
        pixels = pixels_in_place(image)
    except ValueError:
        pixels = np.asarray(image)
    return DecodedImage(pixels, *cropping.select(image.height, image.width))


def may_stay_decoded(width_px: int, height_px: int) -> bool:
    """Returns True if the pixels of an image of this size take little enough memory to be kept."""
    return width_px * height_px <= _MAX_DECODED_PIXELS and max(width_px, height_px) <= _MAX_DECODED_SIDE_PX


def with_digests(crops: Crops) -> Crops:
    """Returns crops with the SHA-256 of the pixels of each."""
    return replace(crops, digests=tuple(hashlib.sha256(crop).digest() for crop in crops.pixels))


def crops_bytes(height_px: int, width_px: int, cropping: Cropping) -> int:
    """Returns the bytes of all crops of an image of this size, in pixels."""
    rows, columns = cropping.select(height_px, width_px)
    return cropping.crop_bytes * (1 + rows * columns)


def kept_bytes(height_px: int, width_px: int, cropping: Cropping) -> int:
    """Returns the most bytes that an image of this size, in pixels, takes while it waits: as crops or as pixels."""
    num_pixels = height_px * width_px
    return max(
        crops_bytes(height_px, width_px, cropping), 4 * num_pixels if num_pixels <= _MAX_DECODED_PIXELS else 0
    )


def max_kept_bytes(cropping: Cropping, *, decoded: bool) -> int:
    """Returns the bytes of the largest image that waits to be encoded: as crops; with `decoded`, also as pixels."""
    all_crops_bytes = cropping.crop_bytes * cropping.max_crops
    return max(all_crops_bytes, 4 * _MAX_DECODED_PIXELS) if decoded else all_crops_bytes


def pixels_in_place(image: Image.Image) -> np.ndarray:
    """Returns the pixels of an RGB image, read-only and without a copy: uint8 [height, width, 4].

    The channels are red, green, blue and padding.

    Uses the Arrow C data interface: https://arrow.apache.org/docs/format/CDataInterface.html.

    Raises ValueError if Pillow keeps the pixels in several blocks of memory, as it does for large images.
    """
    assert image.mode == "RGB"
    image.load()
    _, capsule = image.__arrow_c_array__()
    pixels = _array_in(capsule)  # a list for each pixel; its child is the array of all bytes
    assert pixels.n_children == 1
    assert pixels.length == image.width * image.height
    data = _Array.from_address(pixels.children[0]).buffers[1]
    memory = (ctypes.c_ubyte * (4 * pixels.length)).from_address(data)
    memory.owner = capsule  # the capsule frees the pixels when it is no longer referenced
    return np.frombuffer(memory, np.uint8).reshape(image.height, image.width, 4)


def _array_in(capsule: object) -> _Array:
    return _Array.from_address(_pointer_of(capsule, b"arrow_array"))


class _Array(ctypes.Structure):
    # struct ArrowArray
    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )
