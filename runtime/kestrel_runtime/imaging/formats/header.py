"""The values that the header of an image file declares."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.errors import ImageError

DECODED_BYTES_PER_PIXEL = 8
"""Most formats decode to at most 4 bytes per pixel, and an RGB or upright copy of that takes another 4."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size of an image and the memory that decoding takes. `format` is a key of `detection.FORMATS`."""

    format: str
    width: int
    height: int
    decoding_bytes: int
    """Peak memory of decoding: it includes the decoded image and not the encoded file."""
    tells_all: bool = False
    """Whether the header alone determines the cost of decoding, so that `check_structure` can be skipped."""


def simple_header(image_format: str, width: int, height: int) -> ImageHeader:
    """The header of a file whose decoder needs only the pixels and a copy of them."""
    return ImageHeader(image_format, width, height, DECODED_BYTES_PER_PIXEL * width * height)


def undecodable() -> ImageError:
    """The error for files that are damaged or in no served format."""
    return ImageError("cannot be decoded; must be a complete file in one of JPEG, PNG, WEBP, GIF, BMP, TIFF")


def beyond_limit(what: str, limit: int) -> ImageError:
    """The error for files with more parts of some kind than any real picture has."""
    return ImageError(f"has more than {limit} {what}", too_large=True)
