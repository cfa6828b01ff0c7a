"""Reads the headers of image files and checks their structure, before anything is decoded.

`read_header` looks at a bounded number of places in the file and may run on an event loop. `check_structure` walks
through the whole file without decoding or copying it, and runs on a worker thread. JPEG, TIFF and BMP have modules
of their own; PNG, WebP and GIF are here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging import bmp, jpeg, tiff
from kestrel_runtime.imaging.header import ImageHeader, beyond_limit, check_exif, simple_header, undecodable

MAX_SIDE_PX = 65_536
"""A resize needs weights for every pixel along a side; for 64 million pixels they would take gigabytes."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PNG_CHUNKS = 32_768
"""Encoders write the pixels in chunks of 8 KiB and more: the largest file that is accepted has 4,096 of these."""
MAX_COMPRESSED_TEXTS = 16
"""Limit of chunks with texts and colour profiles, which are decompressed to up to 1 MiB each."""

_PNG_CHUNK = struct.Struct(">I4s")
_PNG_CHUNK_OVERHEAD_BYTES = 12  # length, type and checksum

MAX_WEBP_CHUNKS = 16_384
"""Each frame of an animation is one chunk."""

_WEBP_BYTES_PER_PIXEL = 16
"""Two canvases of the decoder, the bytes of the first frame, and the image made of them."""
_WEBP_CHUNK = struct.Struct("<4sI")

MAX_BLOCKS_BEFORE_IMAGE = 4096
"""Limit of blocks of comments and metadata. With 255 bytes each they hold 1 MiB."""

_EXTENSION, _IMAGE, _TRAILER = b"!", b",", b";"
_COMMENT, _APPLICATION = 0xFE, 0xFF

# Errors of a parser when the file is truncated or contains an invalid number.
_MALFORMED = (IndexError, ValueError, struct.error)


def read_header(data: bytes, *, max_image_pixels: int) -> ImageHeader:
    """Reads the header of an encoded file. Raises `ImageError` if the file is no image, damaged or too large."""
    for found in _FORMATS.values():
        if data.startswith(found.prefixes):
            break
    else:
        if data[4:8] == b"ftyp":
            raise ImageError("AVIF, HEIC and videos are not decoded; convert the image, as the Python client does")
        for name, prefixes in _OTHERS.items():
            if data.startswith(prefixes):
                raise ImageError(f"is {name}; must be a file in one of {', '.join(FORMATS)}")
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
    """Raises `ImageError` for an image that is too large."""
    if header.width * header.height > max_image_pixels:
        raise ImageError(f"must have at most {max_image_pixels} pixels", too_large=True)
    if max(header.width, header.height) > MAX_SIDE_PX:
        raise ImageError(f"must be at most {MAX_SIDE_PX} pixels wide and high", too_large=True)


def check_structure(data: bytes, header: ImageHeader) -> list[int]:
    """Raises `ImageError` for a file with more parts than any real picture has.

    Returns the positions in the file before which decoding should check whether its request was cancelled: after
    each of them a few bytes may cause much work.
    """
    if header.is_cost_known:
        return []
    try:
        return _FORMATS[header.format].check_structure(data)
    except _MALFORMED as error:
        raise undecodable() from error


def first_frame_box(data: bytes, header: ImageHeader) -> tuple[int, int, int, int] | None:
    """Returns left, top, right, bottom of the first frame of a GIF or WebP; None if it covers its canvas."""
    find = _FORMATS[header.format].find_frame
    box = find(data) if find is not None else None
    return None if box == (0, 0, header.width, header.height) else box


# PNG


def _png_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory, from the first chunk."""
    if data[12:16] == b"CgBI":
        raise ImageError("is a PNG of iOS (CgBI); must be a PNG as the standard has it")
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise undecodable()
    return simple_header("PNG", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))


def _png_structure(data: bytes) -> list[int]:
    """Counts the chunks. No position is returned, since no chunk is large enough to need one."""
    position, num_texts = len(_PNG_SIGNATURE), 0
    for _ in range(MAX_PNG_CHUNKS):
        if position + _PNG_CHUNK.size > len(data):
            return []
        length, kind = _PNG_CHUNK.unpack_from(data, position)
        start = position + _PNG_CHUNK.size
        if kind == b"IEND":
            return []
        if kind == b"eXIf":
            check_exif(data[start : start + length])
        elif kind in (b"zTXt", b"iCCP") or (kind == b"iTXt" and _is_compressed(data, start)):
            num_texts += 1
            if num_texts > MAX_COMPRESSED_TEXTS:
                raise beyond_limit("compressed texts and profiles", MAX_COMPRESSED_TEXTS)
        position += length + _PNG_CHUNK_OVERHEAD_BYTES
    raise beyond_limit("PNG chunks", MAX_PNG_CHUNKS)


def _is_compressed(data: bytes, start: int) -> bool:
    """Returns True if an iTXt chunk is compressed: a flag after its keyword, of at most 79 bytes and a zero."""
    end_of_keyword = data.find(b"\0", start, start + 80)
    return end_of_keyword < 0 or data[end_of_keyword + 1 : end_of_keyword + 2] != b"\0"


# WebP


def _webp_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory, from the first chunk."""
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
    return ImageHeader("WEBP", width, height, _WEBP_BYTES_PER_PIXEL * width * height)


def _webp_structure(data: bytes) -> list[int]:
    """Counts the chunks. Decoding cannot be stopped within the file."""
    for kind, start, length in _webp_chunks(data):
        if kind == b"EXIF":
            check_exif(data[start : start + length].removeprefix(b"Exif\0\0"))
    return []


def _webp_frame(data: bytes) -> tuple[int, int, int, int] | None:
    """Returns the place of the first frame of an animation."""
    for kind, start, _ in _webp_chunks(data):
        if kind == b"ANMF":
            left, top, right, bottom = (
                int.from_bytes(data[at : at + 3], "little") for at in range(start, start + 12, 3)
            )
            return 2 * left, 2 * top, 2 * left + right + 1, 2 * top + bottom + 1
    return None


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind of each chunk, the position of its content, and the length of that."""
    position = 12
    for _ in range(MAX_WEBP_CHUNKS):
        if position + _WEBP_CHUNK.size > len(data):
            return
        kind, length = _WEBP_CHUNK.unpack_from(data, position)
        start = position + _WEBP_CHUNK.size
        yield kind, start, length
        position = start + length + length % 2
    raise beyond_limit("WebP chunks", MAX_WEBP_CHUNKS)


# GIF


def _gif_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory.

    A first frame that is larger than the screen enlarges it.
    """
    width, height = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    _, _, right, bottom = _gif_frame(data)
    return simple_header("GIF", max(width, right), max(height, bottom))


def _gif_frame(data: bytes) -> tuple[int, int, int, int]:
    """Returns the place of the first frame."""
    blocks = _Blocks(data, 13 + _palette_bytes(data[10]))
    while (kind := blocks.kind()) != _IMAGE:
        if kind == _EXTENSION:
            blocks.skip_extension()
        elif kind == _TRAILER:
            raise undecodable()
    left, top, width, height = blocks.extent()
    return left, top, left + width, top + height


def _palette_bytes(flags: int) -> int:
    return 3 << 1 + (flags & 7) if flags & 0x80 else 0


class _Blocks:
    """A position in the blocks before the image. Moves as Pillow does, also in malformed files."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._num_left = MAX_BLOCKS_BEFORE_IMAGE

    def kind(self) -> bytes:
        """Returns the byte that opens a block, or one without meaning."""
        self._count()
        self._position += 1
        if self._position > len(self._data):
            raise undecodable()
        return self._data[self._position - 1 : self._position]

    def extent(self) -> tuple[int, int, int, int]:
        """Returns left, top, width and height of the image whose block has been opened."""
        sides = self._data[self._position : self._position + 8]
        if len(sides) < 8:
            raise undecodable()
        left, top, width, height = (int.from_bytes(sides[at : at + 2], "little") for at in range(0, 8, 2))
        return left, top, width, height

    def skip_extension(self) -> None:
        label = self._data[self._position]
        self._position += 1
        block = self._part()
        if label == _COMMENT:
            while block:
                block = self._part()
            return
        if label == _APPLICATION and block is not None and block.startswith(b"NETSCAPE2.0"):
            self._part()
        while self._part():
            pass

    def _part(self) -> bytes | None:
        """Returns the next part of an extension; None at its end."""
        self._count()
        start = self._position + 1
        self._position = start + self._data[self._position]
        return self._data[start : self._position] or None

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise beyond_limit("blocks before the first image of the GIF", MAX_BLOCKS_BEFORE_IMAGE)


@dataclass(frozen=True, slots=True)
class _Format:
    prefixes: tuple[bytes, ...]
    read_header: Callable[[bytes], ImageHeader]
    check_structure: Callable[[bytes], list[int]] = lambda data: []
    find_frame: Callable[[bytes], tuple[int, int, int, int] | None] | None = None


_FORMATS = {
    "JPEG": _Format((b"\xff\xd8\xff",), jpeg.read_header, jpeg.check_structure),
    "PNG": _Format((_PNG_SIGNATURE,), _png_header, _png_structure),
    "WEBP": _Format((b"RIFF",), _webp_header, _webp_structure, _webp_frame),
    "GIF": _Format((b"GIF87a", b"GIF89a"), _gif_header, find_frame=_gif_frame),
    "BMP": _Format((b"BM",), bmp.read_header),
    "TIFF": _Format((b"II*\0", b"MM\0*"), tiff.read_header, tiff.check_structure),
}
FORMATS = tuple(_FORMATS)

_OTHERS = {
    "a JPEG XL file": (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
    "a JPEG 2000 file": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "a JPEG XR file": (b"II\xbc",),
    "a BigTIFF file": (b"II+\0", b"MM\0+"),
    "an ICO or CUR file": (b"\0\0\1\0", b"\0\0\2\0"),
    "a PBM, PGM or PPM file": (
        *(b"P%d%c" % (number, space) for number in range(1, 7) for space in b" \n\r\t"),
        b"P7\n",
    ),
    "a PDF file": (b"%PDF-",),
    "a Photoshop file": (b"8BPS",),
    "an OpenEXR file": (b"v/1\x01",),
    "a Radiance HDR file": (b"#?RADIANCE", b"#?RGBE"),
    "a QOI file": (b"qoif",),
    "an SVG file": (b"<svg",),
}
"""The first bytes of files in other formats that people send."""
