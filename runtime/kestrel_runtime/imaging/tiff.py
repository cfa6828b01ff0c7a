"""Reads the size that a TIFF file declares and how its pixels are divided into parts. Decodes nothing."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging import jpeg
from kestrel_runtime.imaging.header import (
    Directory,
    ImageHeader,
    beyond_limit,
    byte_order_of,
    simple_header,
    undecodable,
)

MAX_PARTS = 65_536
"""Limit of strips or tiles."""
_MAX_EMPTY_PIXELS = 2**22
"""Pixels of tiles outside of the image: at most as many as the image has, and this many more, a tile of 2048²."""
_MAX_JPEG_SCANS_PER_PART = 4
_MAX_SAMPLES = 6
_MAX_BITS = 64

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _SAMPLES, _PLANES = 256, 257, 258, 259, 277, 284
_STRIP_OFFSETS, _ROWS_PER_STRIP, _STRIP_BYTES = 273, 278, 279
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325
_EXIF, _GPS, _INTEROPERABILITY = 34665, 34853, 40965
_ORIENTATION, _XMP = 274, 700
_UNCOMPRESSED, _JPEG = 1, 7
# None, three kinds of fax, LZW, JPEG, two numbers for Deflate, PackBits. Other compressions have no bound on their
# memory, contain a picture of another format, or are rare.
_COMPRESSIONS = (_UNCOMPRESSED, 2, 3, 4, 5, _JPEG, 8, 32946, 32773)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How an image is divided into strips or tiles."""

    num_parts: int
    part_pixels: int
    offsets_tag: int


def read_header(data: bytes) -> ImageHeader:
    """Width, height and decoding memory, from the first directory and those that it names."""
    directory = _first_directory(data)
    if directory.has_duplicates:
        raise undecodable()
    for number in (_EXIF, _GPS):
        _check_directory(data, directory, number)
    compression = directory.first(_COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise ImageError(
            f"is a TIFF with compression {compression}; must have none, LZW, Deflate, PackBits, JPEG or fax (CCITT)"
        )
    width, height = directory.first(_WIDTH, 0), directory.first(_HEIGHT, 0)
    num_samples = directory.first(_SAMPLES, 1)
    num_bits = max(directory.numbers(_BITS), default=1)
    if min(width, height) < 1 or not 1 <= num_samples <= _MAX_SAMPLES or not 1 <= num_bits <= _MAX_BITS:
        raise undecodable()
    num_planes = num_samples if directory.first(_PLANES, 1) == 2 else 1
    layout = _layout(directory, width, height, num_planes)
    if directory.count(layout.offsets_tag) > layout.num_parts:
        raise undecodable()
    header = simple_header("TIFF", width, height)
    if compression == _UNCOMPRESSED:
        return header
    # Besides the pixels the decoder holds one part, also while the image is turned upright.
    part_bytes = math.ceil(layout.part_pixels * num_samples * num_bits / 8)
    is_turned = directory.first(_ORIENTATION, 1) != 1 or _XMP in directory
    copies_bytes = header.decoding_bytes if is_turned else header.decoding_bytes // 2
    return replace(header, decoding_bytes=max(header.decoding_bytes, copies_bytes + part_bytes))


def check_structure(data: bytes) -> list[int]:
    """Count the scans of parts that are JPEG streams. Decoding cannot be stopped within the file."""
    directory = _first_directory(data)
    if directory.first(_COMPRESSION, 1) == _JPEG:
        is_tiled = _TILE_OFFSETS in directory
        starts = directory.numbers(_TILE_OFFSETS if is_tiled else _STRIP_OFFSETS)
        lengths = directory.numbers(_TILE_BYTES if is_tiled else _STRIP_BYTES)
        for start, length in zip(starts, lengths, strict=True):
            jpeg.check_structure(data, start, min(start + length, len(data)), _MAX_JPEG_SCANS_PER_PART)
    return []


def _first_directory(data: bytes) -> Directory:
    byte_order = byte_order_of(data)
    if byte_order is None or len(data) < 8:
        raise undecodable()
    return Directory(data, byte_order, *struct.unpack_from(f"{byte_order}I", data, 4))


def _check_directory(data: bytes, parent: Directory, number: int) -> None:
    """Check a directory that Pillow also reads, and the directory within it."""
    byte_order = byte_order_of(data)
    if number not in parent or byte_order is None:
        return
    directory = Directory(data, byte_order, parent.first(number, 0))
    if number == _EXIF:
        _check_directory(data, directory, _INTEROPERABILITY)


def _layout(directory: Directory, width: int, height: int, num_planes: int) -> _Layout:
    is_striped, is_tiled = _STRIP_OFFSETS in directory, _TILE_OFFSETS in directory
    if is_striped == is_tiled:
        raise undecodable()
    if is_striped:
        rows = min(directory.first(_ROWS_PER_STRIP, height), height)
        across, part_width, part_height = 1, width, rows
    else:
        part_width, part_height = directory.first(_TILE_WIDTH, 0), directory.first(_TILE_HEIGHT, 0)
        across = math.ceil(width / part_width) if part_width else 0
    if min(part_width, part_height) < 1:
        raise undecodable()
    down = math.ceil(height / part_height)
    num_parts = across * down * num_planes
    if num_parts > MAX_PARTS:
        raise beyond_limit("TIFF strips or tiles", MAX_PARTS)
    part_pixels = part_width * part_height
    if is_tiled and across * down * part_pixels > 2 * width * height + _MAX_EMPTY_PIXELS:
        raise ImageError("is a TIFF whose tiles are much larger than the image", too_large=True)
    return _Layout(num_parts, part_pixels, _STRIP_OFFSETS if is_striped else _TILE_OFFSETS)
