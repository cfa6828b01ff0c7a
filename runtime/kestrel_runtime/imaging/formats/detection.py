"""Recognises the served formats by the first bytes of a file.

`read_header` looks at a bounded number of places in the file and may run on an event loop. `check_structure` walks
through the whole file without decoding or copying it, and runs on a worker thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging.formats import bmp, gif, jpeg, png, tiff, webp
from kestrel_runtime.imaging.formats.header import ImageHeader, undecodable

MAX_SIDE_PX = 65_536
"""A resize needs weights for every pixel along a side; for 64 million pixels they would take gigabytes."""


@dataclass(frozen=True, slots=True)
class _Format:
    prefixes: tuple[bytes, ...]
    read_header: Callable[[bytes], ImageHeader]
    check_structure: Callable[[bytes], list[int]] = lambda data: []


_FORMATS = {
    "JPEG": _Format((b"\xff\xd8\xff",), jpeg.read_header, jpeg.check_structure),
    "PNG": _Format((png.SIGNATURE,), png.read_header, png.check_structure),
    "WEBP": _Format((b"RIFF",), webp.read_header, webp.check_structure),
    "GIF": _Format((b"GIF87a", b"GIF89a"), gif.read_header),
    "BMP": _Format((b"BM",), bmp.read_header),
    "TIFF": _Format((b"II*\0", b"MM\0*"), tiff.read_header, tiff.check_structure),
}
FORMATS = tuple(_FORMATS)
# Errors of a parser when the file is truncated or contains an invalid number.
_MALFORMED = (IndexError, ValueError, struct.error)


def read_header(data: bytes, *, max_image_pixels: int) -> ImageHeader:
    """Read the header of an encoded file. Raises `ImageError` if the file is no image, damaged or too large."""
    for found in _FORMATS.values():
        if data.startswith(found.prefixes):
            break
    else:
        if data[4:8] == b"ftyp":
            raise ImageError("AVIF, HEIC and videos are not decoded; convert the image, as the Python client does")
        raise undecodable()
    try:
        header = found.read_header(data)
    except _MALFORMED as error:
        raise undecodable() from error
    if header.width < 1 or header.height < 1:
        raise undecodable()
    check_size(header, max_image_pixels=max_image_pixels)
    return header


def check_size(header: ImageHeader, *, max_image_pixels: int) -> None:
    """Raise `ImageError` for an image that is too large."""
    if header.width * header.height > max_image_pixels:
        raise ImageError(f"must have at most {max_image_pixels} pixels", too_large=True)
    if max(header.width, header.height) > MAX_SIDE_PX:
        raise ImageError(f"must be at most {MAX_SIDE_PX} pixels wide and high", too_large=True)


def check_structure(data: bytes, header: ImageHeader) -> list[int]:
    """Raise `ImageError` for a file with more parts than any real picture has.

    Returns the positions in the file before which decoding should check whether its request was cancelled: after
    each of them a few bytes may cause much work.
    """
    if header.tells_all:
        return []
    try:
        return _FORMATS[header.format].check_structure(data)
    except _MALFORMED as error:
        raise undecodable() from error
