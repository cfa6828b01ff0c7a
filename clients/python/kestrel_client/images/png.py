"""Writes pixels as a PNG file, for images that must be files. Needs no imaging library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from kestrel_client.images.raw_image import RawImage

_COLOUR_TYPES = {"gray8": 0, "rgb8": 2, "bgr8": 2, "rgba8": 6}
_CHANNELS = {"gray8": 1, "rgb8": 3, "bgr8": 3, "rgba8": 4}


def png(image: RawImage) -> bytes:
    """The file. Raises ValueError where the pixels do not fill the rows."""
    header = struct.pack(">IIBBBBB", image.width_px, image.height_px, 8, _COLOUR_TYPES[image.layout], 0, 0, 0)
    # Level 1, since the time of the caller matters more than the size of the message.
    body = zlib.compress(b"".join(_rows(image)), 1)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _rows(image: RawImage) -> Iterator[bytes]:
    """Each row, behind the number of its filter: none."""
    pixels = memoryview(image.pixels).cast("B")
    size = image.width_px * _CHANNELS[image.layout]
    stride = image.row_stride_bytes or size
    if stride < size or len(pixels) < stride * (image.height_px - 1) + size:
        raise ValueError(f"{len(pixels)} bytes are too few for {image.width_px}x{image.height_px} {image.layout}")
    for start in range(0, stride * image.height_px, stride):
        row = bytearray(pixels[start : start + size])
        if image.layout == "bgr8":
            row[0::3], row[2::3] = row[2::3], row[0::3]
        yield b"\0" + row


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
