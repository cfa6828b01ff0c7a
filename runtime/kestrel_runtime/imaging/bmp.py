"""Reads the headers of BMP files, and decodes those whose colours Pillow reads wrongly or not at all."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from PIL import Image

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging.header import ImageHeader, beyond_limit, simple_header, undecodable

MAX_RUN_LENGTH_BYTES = 2**21
"""Limit of files with run-length encoding, which Pillow decodes in Python, byte by byte."""

_CORE_HEADER_BYTES, _SHORT_HEADER_BYTES = 12, 16
_HEADER_BYTES = (40, 52, 56, 64, 108, 124)
_OS2_HEADER_BYTES = 64  # has no masks, and other compressions by the same numbers
_RUN_LENGTHS, _BIT_FIELDS, _ALPHA_BIT_FIELDS = (1, 2), 3, 6
_CONTAINED = {4: "JPEG", 5: "PNG"}
_BITS = (1, 2, 4, 8, 16, 24, 32)
_NUM_COLOURS = 46
"""Position of the number of colours in the palette."""
_PIXELS_AT_A_TIME = 2**18

# What Pillow reads: red, green, blue and alpha, within the bits of a pixel.
_KNOWN_MASKS = {
    16: ((0xF800, 0x7E0, 0x1F, 0), (0x7C00, 0x3E0, 0x1F, 0)),
    24: ((0xFF0000, 0xFF00, 0xFF, 0),),
    32: (
        *((0xFF0000, 0xFF00, 0xFF, 0), (0xFF000000, 0xFF0000, 0xFF00, 0), (0xFF000000, 0xFF00, 0xFF, 0)),
        *((0xFF000000, 0xFF0000, 0xFF00, 0xFF), (0xFF, 0xFF00, 0xFF0000, 0xFF000000)),
        *((0xFF0000, 0xFF00, 0xFF, 0xFF000000), (0xFF000000, 0xFF00, 0xFF, 0xFF0000), (0, 0, 0, 0)),
    ),
}


@dataclass(frozen=True, slots=True)
class BitFields:
    """Says where a file has its pixels, and which bits of each are which channel."""

    bits: int
    """16 or 32, for each pixel."""
    masks: tuple[int, int, int, int]
    """Red, green, blue and alpha; 0 for no alpha."""
    position: int
    is_top_down: bool


def read_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory of a file. Raises `ImageError`."""
    header_bytes = _number(data, 14, 4)
    if header_bytes == _CORE_HEADER_BYTES:
        _check_bits(_number(data, 24, 2))
        return simple_header("BMP", _number(data, 18, 2), _number(data, 20, 2))
    bits = _number(data, 28, 2)
    if header_bytes == _SHORT_HEADER_BYTES:
        _check_bits(bits)
        return simple_header("BMP", _number(data, 18, 4), _number(data, 22, 4))
    if header_bytes not in _HEADER_BYTES:
        known = ", ".join(map(str, (_CORE_HEADER_BYTES, _SHORT_HEADER_BYTES, *_HEADER_BYTES)))
        raise ImageError(f"is a BMP with a header of {header_bytes} bytes; must be one of {known}")
    compression, is_os2 = _number(data, 30, 4), header_bytes == _OS2_HEADER_BYTES
    if compression in _CONTAINED and not is_os2:
        raise ImageError(f"is a BMP that contains a {_CONTAINED[compression]}; send that")
    if compression not in (0, *_RUN_LENGTHS, *(() if is_os2 else (_BIT_FIELDS, _ALPHA_BIT_FIELDS))):
        kind = " of OS/2" if is_os2 else ""
        raise ImageError(f"is a BMP{kind} with compression {compression}; must have none, RLE8, RLE4 or bit masks")
    _check_bits(bits)
    if compression in _RUN_LENGTHS and len(data) > MAX_RUN_LENGTH_BYTES:
        raise beyond_limit("bytes, run-length encoded", MAX_RUN_LENGTH_BYTES)
    height = _number(data, 22, 4)
    if data[25] == 0xFF:  # a negative height: the rows are stored from top to bottom
        height = 2**32 - height
    return simple_header("BMP", _number(data, 18, 4), height)


def bit_fields(data: bytes) -> BitFields | None:
    """Returns how to decode a file whose masks Pillow does not support; None for other files."""
    header_bytes = _number(data, 14, 4)
    if header_bytes in (_CORE_HEADER_BYTES, _SHORT_HEADER_BYTES, _OS2_HEADER_BYTES):
        return None
    bits, compression = _number(data, 28, 2), _number(data, 30, 4)
    if compression not in (_BIT_FIELDS, _ALPHA_BIT_FIELDS):
        return None
    # With a header of 40 bytes the masks follow it, at the same place.
    num_masks = 4 if header_bytes >= 56 or compression == _ALPHA_BIT_FIELDS else 3
    masks = (*struct.unpack_from(f"<{num_masks}I", data, 54), 0)[:4]
    if compression == _BIT_FIELDS and masks in _KNOWN_MASKS.get(bits, ()):
        return None
    if bits not in (16, 32) or not all(masks[:3]) or any(mask >> bits for mask in masks):
        raise undecodable()
    return BitFields(bits, masks, _number(data, 10, 4), data[25] == 0xFF)


def decode(data: bytes, fields: BitFields, header: ImageHeader) -> Image.Image:
    """Decodes the pixels to RGB, over white. Raises `ImageError` for a truncated file."""
    row_bytes = -(-header.width * fields.bits // 32) * 4
    if fields.position + row_bytes * header.height > len(data):
        raise undecodable()
    pixels = np.ndarray(
        (header.height, header.width),
        f"<u{fields.bits // 8}",
        data,
        fields.position,
        (row_bytes, fields.bits // 8),
    )
    if not fields.is_top_down:
        pixels = pixels[::-1]
    has_alpha = fields.masks[3] != 0 and bool((pixels & pixels.dtype.type(fields.masks[3])).any())
    result = Image.new("RGB", (header.width, header.height))
    rows = max(1, _PIXELS_AT_A_TIME // header.width)
    for top in range(0, header.height, rows):
        part = pixels[top : top + rows]
        colours = np.stack([_channel(part, mask) for mask in fields.masks[:3]], axis=2)
        if has_alpha:
            alpha = _channel(part, fields.masks[3])[..., None]
            colours = (colours * alpha + 255 * (255 - alpha) + 127) // 255
        result.paste(Image.fromarray(colours.astype(np.uint8)), (0, top))
    return result


def as_pillow_reads(data: bytes) -> bytes:
    """Returns an equal file that Pillow decodes correctly.

    Pillow supports neither headers of 16 bytes, which become headers of 40, nor pixels of 2 bits, which become
    pixels of 4 bits. It reads pixels of 4 and 8 bits as 1 bit if the palette is black and white, so a third colour
    is added.
    """
    if _number(data, 14, 4) == _SHORT_HEADER_BYTES:
        missing = 40 - _SHORT_HEADER_BYTES
        start = struct.pack("<I", _number(data, 10, 4) + missing)
        data = b"".join((data[:10], start, struct.pack("<I", 40), data[18:30], bytes(missing), data[30:]))
    if _number(data, 14, 4) == _CORE_HEADER_BYTES:
        return data
    bits, num_colours = _number(data, 28, 2), _number(data, _NUM_COLOURS, 4)
    if bits == 2:
        return _with_4_bits(data, num_colours or 4)
    if bits not in (4, 8) or num_colours != 2:
        return data
    return b"".join((data[:_NUM_COLOURS], struct.pack("<I", 3), data[_NUM_COLOURS + 4 :]))


def _with_4_bits(data: bytes, num_colours: int) -> bytes:
    """Returns the file with 4 bits per pixel in place of 2."""
    width, start, colours = _number(data, 18, 4), _number(data, 10, 4), 14 + _number(data, 14, 4)
    row_bytes, wide_row_bytes = -(-width * 2 // 32) * 4, -(-width * 4 // 32) * 4
    height = _number(data, 22, 4)
    height = 2**32 - height if data[25] == 0xFF else height
    if start + row_bytes * height > len(data):
        raise undecodable()
    pairs = np.arange(256, dtype=np.uint16)
    # Each byte has four pixels, which become two bytes.
    wide = ((pairs & 0xC0) >> 2 | (pairs & 0x30) >> 4 | (pairs & 0x0C) << 10 | (pairs & 0x03) << 8).astype("<u2")
    rows = wide[np.frombuffer(data, np.uint8, row_bytes * height, start).reshape(height, row_bytes)].view(np.uint8)
    # More colours than there are, so that greys are not taken for their own numbers.
    palette = data[colours : colours + 4 * min(num_colours, 4)].ljust(16, b"\0") + bytes((1, 2, 3, 0)) * 12
    head = b"".join(
        (
            *(data[:10], struct.pack("<I", colours + len(palette)), data[14:28], struct.pack("<H", 4)),
            *(data[30:_NUM_COLOURS], struct.pack("<I", 16), data[_NUM_COLOURS + 4 : colours], palette),
        )
    )
    return head + np.ascontiguousarray(rows[:, :wide_row_bytes]).tobytes()


def _channel(pixels: np.ndarray, mask: int) -> np.ndarray:
    """Returns the bits of a mask, scaled to 0 to 255: uint32."""
    shift = (mask & -mask).bit_length() - 1
    largest = mask >> shift
    if largest > 255:
        return ((pixels & mask) >> (mask.bit_length() - 8)).astype(np.uint32)
    return (((pixels & mask) >> shift).astype(np.uint32) * 255 + largest // 2) // largest


def _check_bits(bits: int) -> None:
    if bits not in _BITS:
        raise ImageError(f"is a BMP with {bits} bits per pixel; must have 1, 2, 4, 8, 16, 24 or 32")


def _number(data: bytes, position: int, num_bytes: int) -> int:
    if position + num_bytes > len(data):
        raise undecodable()
    return int.from_bytes(data[position : position + num_bytes], "little")
