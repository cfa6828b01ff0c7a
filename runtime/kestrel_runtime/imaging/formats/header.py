"""What the header of an image file declares. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_runtime.api.errors import ImageError

DECODED_BYTES_PER_PIXEL = 8
"""Most formats decode to at most 4 bytes per pixel, and an RGB or upright copy of that takes another 4."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size of an image and the memory that decoding it takes. `format` is one of `FORMATS`."""

    format: str
    width: int
    height: int
    decoding_bytes: int
    """The most that decoding holds at a time, the decoded image included and the encoded file not."""
    tells_all: bool = False
    """Whether nothing behind the header decides what decoding costs, so that it need not be looked through."""


def simple_header(image_format: str, width: int, height: int) -> ImageHeader:
    """The header of a file whose decoder needs nothing but the pixels and a copy of them."""
    return ImageHeader(image_format, width, height, DECODED_BYTES_PER_PIXEL * width * height)


def undecodable() -> ImageError:
    """The error of files that are none in a format that is served, or damaged."""
    return ImageError("cannot be decoded; must be a complete file in one of JPEG, PNG, WEBP, GIF, BMP, TIFF")


def beyond_limit(what: str, limit: int) -> ImageError:
    """The error of files with more of something than any real picture has."""
    return ImageError(f"has more than {limit} {what}", too_large=True)
