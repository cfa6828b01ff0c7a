"""The image of a request: an encoded file, with or without its digest, or pixels."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

from kestrel_runtime.api.errors import Violation

_DIGEST_PREFIX = b"kestrel raw image\0"


class HashedImage(bytes):
    """An encoded image whose SHA-256 is known, so that it is not computed for each request."""

    sha256: bytes

    def __new__(cls, data: bytes, sha256: bytes) -> Self:
        """A copy of `data`. The caller has computed `sha256` from it; another value would mix up cached images."""
        image = super().__new__(cls, data)
        image.sha256 = sha256
        return image


class PixelFormat(Enum):
    """The channels of a pixel in their order, 8 bits each; the value is how many there are in bytes, and a name."""

    RGB8 = (3, "RGB")
    BGR8 = (3, "BGR")
    RGBA8 = (4, "RGBA")
    """The last is the opacity, not premultiplied."""
    GRAY8 = (1, "L")

    @property
    def pixel_bytes(self) -> int:
        return self.value[0]


@dataclass(frozen=True, slots=True)
class RawImage:
    """Rows from the top, each from the left. `row_stride_bytes` is from the start of a row to that of the next.

    After the last row the padding may be missing. Its length is that of `pixels`.
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
        """The bytes of all rows with their padding, also where that of the last row is missing."""
        return self.row_stride_bytes * self.height_px

    @classmethod
    def packed(cls, pixels: bytes, width_px: int, height_px: int, format: PixelFormat) -> RawImage:
        """An image whose rows follow each other without padding."""
        return cls(pixels, width_px, height_px, format, width_px * format.pixel_bytes)

    def violations(self) -> Iterator[Violation]:
        """Every breach, with paths below `image.raw`."""
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
        """The SHA-256 of the image with its format and shape, 32 bytes; no file has the same."""
        shape = struct.pack(">QQQ", self.width_px, self.height_px, self.row_stride_bytes)
        name = self.format.name.encode()
        digest = hashlib.sha256(_DIGEST_PREFIX + struct.pack(">B", len(name)) + name + shape)
        digest.update(self.pixels)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class DecodedPixels:
    """A decoded image: upright rows from the top without gaps, four bytes a pixel: red, green, blue and padding."""

    pixels: memoryview
    width_px: int
    height_px: int


class RemoteImage(ABC):
    """An image that another process has: digest and size are here, pixels are fetched if they are needed."""

    digest: bytes
    """The digest, as `image_digest` computes it."""
    num_bytes: int
    """The size of the file, or of the pixels that came in its place."""
    width_px: int
    height_px: int
    """The width and height that its header declares; a recorded orientation is not applied."""

    def __len__(self) -> int:
        return self.num_bytes

    @abstractmethod
    def fetch(self, check_wanted: Callable[[], None]) -> DecodedPixels:
        """Returns the decoded image. Blocks. `check_wanted` is called now and then and may raise.

        Raises `ImageError`, and `EngineUnavailable` if the other process has gone.
        """


def side_violations(width_px: int, height_px: int) -> Iterator[Violation]:
    """The breaches of the size of an image, whatever its format."""
    for name, side_px in (("width_px", width_px), ("height_px", height_px)):
        if side_px < 1:
            yield Violation(f"image.raw.{name}", "must be positive")


Image = bytes | RawImage | RemoteImage
"""An encoded file, pixels, or an image of another process."""


_MAX_BYTES_HASHED_AT_ONCE = 2**18


def is_hashed_at_once(image: Image) -> bool:
    """Returns True if `image_digest` takes at most about 0.2 ms; a worker should call it for other images."""
    return isinstance(image, HashedImage | RemoteImage) or len(image) <= _MAX_BYTES_HASHED_AT_ONCE


def image_digest(image: Image) -> bytes:
    """The key of an image in the caches: SHA-256 of the file, or of pixels with their format and shape."""
    if isinstance(image, RemoteImage):
        return image.digest
    if isinstance(image, RawImage):
        return image.digest()
    return image.sha256 if isinstance(image, HashedImage) else hashlib.sha256(image).digest()
