"""Reads the size of the canvas and the chunks that a WebP file declares. Decodes nothing."""

from __future__ import annotations

import struct

from kestrel_runtime.imaging.formats import exif
from kestrel_runtime.imaging.formats.header import ImageHeader, beyond_limit, undecodable

MAX_CHUNKS = 16_384
"""Each frame of an animation is one chunk."""

_BYTES_PER_PIXEL = 16
"""Two canvases of the decoder, the bytes of the first frame, and the image made of them."""
_CHUNK = struct.Struct("<4sI")


def read_header(data: bytes) -> ImageHeader:
    """Width, height and decoding memory, from the first chunk."""
    if data[8:12] != b"WEBP" or len(data) < 30:
        raise undecodable()
    match data[12:16]:
        case b"VP8X":
            width = 1 + int.from_bytes(data[24:27], "little")
            height = 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width = int.from_bytes(data[26:28], "little") & 0x3FFF
            height = int.from_bytes(data[28:30], "little") & 0x3FFF
        case _:
            raise undecodable()
    return ImageHeader("WEBP", width, height, _BYTES_PER_PIXEL * width * height)


def check_structure(data: bytes) -> list[int]:
    """Count the chunks. Decoding cannot be stopped within the file."""
    position = 12
    for _ in range(MAX_CHUNKS):
        if position + _CHUNK.size > len(data):
            return []
        kind, length = _CHUNK.unpack_from(data, position)
        start = position + _CHUNK.size
        if kind == b"EXIF":
            exif.check(data[start : start + length].removeprefix(b"Exif\0\0"))
        position = start + length + length % 2
    raise beyond_limit("WebP chunks", MAX_CHUNKS)
