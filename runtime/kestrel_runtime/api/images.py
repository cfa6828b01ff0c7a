"""Defines the forms of a request's image: an encoded file, with or without its digest, or pixels."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

from kestrel_runtime.api.errors import Violation

_DIGEST_PREFIX = b"kestrel raw image\0"


class HashedImage(bytes):
    """An encoded image whose SHA-256 is known, so that requests need not compute it."""

    sha256: bytes

    def __new__(cls, data: bytes, sha256: bytes) -> Self:
        """Returns a copy of `data`. The caller has computed `sha256` from it; a wrong value would mix up cached
        images."""
        image = super().__new__(cls, data)
        image.sha256 = sha256
        return image


class PixelFormat(Enum):
    """The channels of a pixel in their order, 8 bits each; the value is the number of bytes, and a name."""

    RGB8 = (3, "RGB")
    BGR8 = (3, "BGR")
    RGBA8 = (4, "RGBA")
    """Red, green, blue and the opacity, not premultiplied."""
    GRAY8 = (1, "L")

    @property
    def pixel_bytes(self) -> int:
        return self.value[0]


@dataclass(frozen=True, slots=True)
class RawImage:
    """The pixels of an image: rows from the top, pixels from the left.

    `row_stride_bytes` is the number of bytes from the start of a row to the start of the next. The padding after
    the last row may be missing. `len` returns the number of bytes in `pixels`.
    """

    pixels: bytes
    width_px: int
    height_px: int
    format: PixelFormat
    row_stride_bytes: int

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def padded_bytes(self) -> int:
        """The bytes of all rows with their padding, even if that of the last row is missing."""
        return self.row_stride_bytes * self.height_px

    @classmethod
    def packed(cls, pixels: bytes, width_px: int, height_px: int, format: PixelFormat) -> RawImage:
        """Returns the same image without padding between its rows."""
        return cls(pixels, width_px, height_px, format, width_px * format.pixel_bytes)

    def violations(self) -> Iterator[Violation]:
        """Yields every violation of the contract, with paths that begin with `image.raw`."""
        wrong = list(side_violations(self.width_px, self.height_px))
        yield from wrong
        row_bytes = self.width_px * self.format.pixel_bytes
        if self.width_px >= 1 and self.row_stride_bytes < row_bytes:
            yield Violation("image.raw.row_stride_bytes", f"must be at least {row_bytes}, the length of a row")
        elif not wrong:
            most = self.padded_bytes
            least = most - self.row_stride_bytes + row_bytes
            if not least <= len(self.pixels) <= most:
                bounds = f"{most}" if least == most else f"{least} to {most}"
                yield Violation("image.raw.pixels", f"must be {bounds} bytes long")

    def digest(self) -> bytes:
        """Returns the SHA-256 (32 bytes) of the image with its format and shape, unlike that of any file."""
        shape = struct.pack(">QQQ", self.width_px, self.height_px, self.row_stride_bytes)
        name = self.format.name.encode()
        digest = hashlib.sha256(_DIGEST_PREFIX + struct.pack(">B", len(name)) + name + shape)
        digest.update(self.pixels)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class DecodedPixels:
    """A decoded image: upright rows from the top without padding, four bytes a pixel: red, green, blue and
    unused."""

    pixels: memoryview
    width_px: int
    height_px: int


class RemoteImage:
    """The base of images in another process. Digest and size are known here; pixels are fetched only if they are
    needed.

    It is no abstract class, since every request asks which kind of image it has, and that takes several times as
    long for these.
    """

    digest: bytes
    """The digest that `image_digest` returns for the image."""
    num_bytes: int
    """The size of the file, or of the pixels that were sent instead of a file."""
    width_px: int
    height_px: int
    """The height in the image's header; a recorded orientation is not applied."""

    def __len__(self) -> int:
        return self.num_bytes

    def fetch(self, check_wanted: Callable[[], None]) -> DecodedPixels:
        """Returns the decoded image. Blocks. `check_wanted` is called repeatedly and may raise to give up.

        Raises `ImageError`, and `EngineUnavailable` if the other process has ended.
        """
        raise NotImplementedError


def side_violations(width_px: int, height_px: int) -> Iterator[Violation]:
    """Yields the violations of the limits on the size of an image, whatever its format."""
    for name, side_px in (("width_px", width_px), ("height_px", height_px)):
        if side_px < 1:
            yield Violation(f"image.raw.{name}", "must be positive")


Image = bytes | RawImage | RemoteImage
"""An encoded file, pixels, or an image in another process."""


_MAX_BYTES_HASHED_AT_ONCE = 2**18


def is_hashed_at_once(image: Image) -> bool:
    """Returns True if `image_digest` takes at most about 0.2 ms; for other images a worker should call it."""
    return isinstance(image, HashedImage | RemoteImage) or len(image) <= _MAX_BYTES_HASHED_AT_ONCE


def image_digest(image: Image) -> bytes:
    """Returns the key of an image in the caches: SHA-256 of the file, or of pixels with their format and shape."""
    if isinstance(image, RemoteImage):
        return image.digest
    if isinstance(image, RawImage):
        return image.digest()
    return image.sha256 if isinstance(image, HashedImage) else hashlib.sha256(image).digest()
