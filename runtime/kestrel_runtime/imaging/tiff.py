"""Reads what a TIFF file declares: its size, what its samples mean, and how they are divided into parts.

Decodes nothing.
"""

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

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, FILL_ORDER, SAMPLES, PLANES = 256, 257, 258, 259, 262, 266, 277, 284
_STRIP_OFFSETS, ROWS_PER_STRIP, _STRIP_BYTES = 273, 278, 279
TILE_WIDTH, TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325
_EXIF, _GPS, _INTEROPERABILITY = 34665, 34853, 40965
ORIENTATION, _XMP = 274, 700
_MAX_VALUE, _PREDICTOR, _COLOURS, _INKS, _EXTRAS, _SAMPLE_FORMAT = 281, 317, 320, 332, 338, 339
_COEFFICIENTS, _SUBSAMPLING, _SITES, _RANGES = 529, 530, 531, 532
DESCRIPTION = (
    *(WIDTH, HEIGHT, BITS, PHOTOMETRIC, FILL_ORDER, SAMPLES, PLANES, ORIENTATION),
    *(ROWS_PER_STRIP, TILE_WIDTH, TILE_HEIGHT, _COLOURS, _EXTRAS),
    *(_COEFFICIENTS, _SUBSAMPLING, _SITES, _RANGES),
)
"""The tags that say what uncompressed samples mean."""

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR, _CIELAB = 0, 1, 2, 3, 5, 6, 8
_NUM_COLOURS = {_WHITE_IS_ZERO: 1, _BLACK_IS_ZERO: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3, _CIELAB: 3}
_UNSIGNED = 1
_SAMPLE_FORMATS = {2: "signed", 3: "floating-point", 4: "undefined", 5: "complex", 6: "complex"}
_PREMULTIPLIED, _ALPHA, _OLD_ALPHA = 1, 2, 999  # the last is what Corel Draw 10 writes
_MAX_SAMPLE_BITS = 16

_UNCOMPRESSED, _JPEG = 1, 7
_FAX = (2, 3, 4)
# None, three kinds of fax, LZW, JPEG, two numbers for Deflate, PackBits. Other compressions have no bound on their
# memory, contain a picture of another format, or are rare.
_COMPRESSIONS = (_UNCOMPRESSED, *_FAX, 5, _JPEG, 8, 32946, 32773)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The division of an image into strips or tiles."""

    num_parts: int
    part_pixels: int
    offsets_tag: int


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a file that Pillow decodes wrongly or not at all."""

    byte_order: str
    width: int
    height: int
    bits: int
    """Bits of each sample: 1 to 16."""
    num_samples: int
    num_planes: int
    """1, or as many as samples where each is stored on its own."""
    num_colours: int
    """1 for grey, 3 for RGB, 4 for CMYK. Other samples follow these."""
    white_is_zero: bool
    alpha_sample: int | None
    is_premultiplied: bool
    max_value: int
    """2ⁿ - 1 for the n bits that are significant."""
    is_predicted: bool
    """True if each sample is stored as its difference from the left one."""
    tile_width: int
    """0 for strips."""

    @property
    def samples_per_plane(self) -> int:
        return self.num_samples // self.num_planes


def read_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory, from the first directory and those that it names."""
    directory = first_directory(data)
    if directory.has_duplicates:
        raise undecodable()
    for number in (_EXIF, _GPS):
        _check_directory(data, directory, number)
    compression = directory.first(COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise ImageError(
            f"is a TIFF with compression {compression}; must have none, LZW, Deflate, PackBits, JPEG or fax (CCITT)"
        )
    width, height = directory.first(WIDTH, 0), directory.first(HEIGHT, 0)
    num_samples = directory.first(SAMPLES, 1)
    num_bits = max(directory.numbers(BITS), default=1)
    if min(width, height) < 1 or not 1 <= num_samples <= _MAX_SAMPLES or not 1 <= num_bits <= _MAX_BITS:
        raise undecodable()
    _check_samples(directory)
    num_planes = num_samples if directory.first(PLANES, 1) == 2 else 1
    layout = _layout(directory, width, height, num_planes)
    if directory.count(layout.offsets_tag) > layout.num_parts:
        raise undecodable()
    header = simple_header("TIFF", width, height)
    part_bytes = math.ceil(layout.part_pixels * num_samples * num_bits / 8)
    if samples_of(directory) is not None:
        # The decoder holds a copy of the file, all samples, one part, and the image made of them.
        samples_bytes = height * math.ceil(width * num_samples * num_bits / 8)
        peak_bytes = len(data) + samples_bytes + part_bytes + header.decoding_bytes // 2
        return replace(header, decoding_bytes=max(header.decoding_bytes, peak_bytes))
    if is_wrapped(directory):
        header = replace(header, decoding_bytes=header.decoding_bytes + 2 * len(data))
    if compression == _UNCOMPRESSED:
        return header
    # In addition to the pixels, the decoder holds one part, also while the image is turned upright.
    is_turned = directory.first(ORIENTATION, 1) != 1 or _XMP in directory
    copies_bytes = header.decoding_bytes if is_turned else header.decoding_bytes // 2
    return replace(header, decoding_bytes=max(header.decoding_bytes, copies_bytes + part_bytes))


def samples_of(directory: Directory) -> Samples | None:
    """Returns how to decode the samples of a file; None if Pillow decodes them correctly."""
    photometric, num_samples = directory.first(PHOTOMETRIC, 0), directory.first(SAMPLES, 1)
    if photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _CMYK) or _pillow_reads_correctly(directory):
        return None
    num_colours, bits = _NUM_COLOURS[photometric], directory.first(BITS, 1)
    if num_samples < num_colours:
        raise undecodable()
    extras = directory.numbers(_EXTRAS)
    alphas = [place for place, kind in enumerate(extras) if kind in (_PREMULTIPLIED, _ALPHA, _OLD_ALPHA)]
    if not extras and num_samples == num_colours + 1:
        alphas, extras = [0], (_ALPHA,)
    return Samples(
        byte_order=directory.byte_order,
        width=directory.first(WIDTH, 0),
        height=directory.first(HEIGHT, 0),
        bits=bits,
        num_samples=num_samples,
        num_planes=num_samples if directory.first(PLANES, 1) == 2 else 1,
        num_colours=num_colours,
        white_is_zero=photometric == _WHITE_IS_ZERO,
        alpha_sample=num_colours + alphas[0] if alphas and num_colours + alphas[0] < num_samples else None,
        is_premultiplied=bool(alphas) and extras[alphas[0]] == _PREMULTIPLIED,
        max_value=_max_value(directory, bits),
        is_predicted=directory.first(COMPRESSION, 1) != _UNCOMPRESSED and directory.first(_PREDICTOR, 1) == 2,
        tile_width=directory.first(TILE_WIDTH, 0) if _TILE_OFFSETS in directory else 0,
    )


def is_wrapped(directory: Directory) -> bool:
    """Returns True if libtiff reads uncompressed samples correctly and Pillow does not.

    These are luma and chroma, which may be subsampled and have ranges, and indices and CIELab in planes.
    """
    photometric = directory.first(PHOTOMETRIC, 0)
    in_planes = photometric in (_PALETTE, _CIELAB) and directory.first(PLANES, 1) == 2
    return directory.first(COMPRESSION, 1) == _UNCOMPRESSED and (photometric == _YCBCR or in_planes)


def palette_of_bytes(directory: Directory) -> bytes | None:
    """Returns the colours of a palette, RGB, if the file has them in 8 bits instead of 16, as some writers do."""
    colours = directory.numbers(_COLOURS)
    if directory.first(PHOTOMETRIC, 0) != _PALETTE or not colours or max(colours) > 255:
        return None
    num_colours = len(colours) // 3
    return bytes(colours[num_colours * channel + place] for place in range(num_colours) for channel in range(3))


def _check_samples(directory: Directory) -> None:
    """Raises `ImageError` for samples whose meaning is not known here, with what they are."""
    photometric, compression = directory.first(PHOTOMETRIC, 0), directory.first(COMPRESSION, 1)
    bits = set(directory.numbers(BITS)) or {1}
    formats = set(directory.numbers(_SAMPLE_FORMAT)) - {_UNSIGNED}
    if formats or max(bits) > _MAX_SAMPLE_BITS:
        kind = _SAMPLE_FORMATS.get(max(formats), "unknown") if formats else "unsigned"
        raise ImageError(
            f"is a TIFF with {kind} samples of {max(bits)} bits; must have unsigned ones of at most 16"
        )
    if photometric not in _NUM_COLOURS:
        raise ImageError(
            f"is a TIFF with PhotometricInterpretation {photometric}; must be grey, RGB, CMYK, YCbCr, CIELab or "
            "have a palette"
        )
    if len(bits) > 1:
        listed = ", ".join(str(number) for number in sorted(bits))
        raise ImageError(f"is a TIFF with samples of {listed} bits; must have the same number for all")
    (num_bits,) = bits
    if photometric == _CMYK and directory.first(_INKS, 1) != 1:
        raise ImageError("is a TIFF with other inks than cyan, magenta, yellow and black")
    is_limited = compression == _JPEG or photometric in (_PALETTE, _YCBCR, _CIELAB)
    if is_limited and num_bits not in ((1, 2, 4, 8) if photometric == _PALETTE else (8,)):
        kind = "JPEG" if compression == _JPEG else {_PALETTE: "palette", _YCBCR: "YCbCr"}.get(photometric, "CIELab")
        raise ImageError(f"is a TIFF with {kind} samples of {num_bits} bits; must have at most 8")
    num_samples = directory.first(SAMPLES, 1)
    if compression == _JPEG and directory.first(PLANES, 1) == 2 and num_samples not in (1, 3):
        raise ImageError(
            f"is a TIFF with JPEG data in {num_samples} planes; must have 1 or 3, or one for all samples"
        )
    if directory.first(_PREDICTOR, 1) == 2 and compression != _UNCOMPRESSED and num_bits not in (8, 16):
        raise ImageError(f"is a TIFF with a predictor of samples of {num_bits} bits; must have 8 or 16")


def _pillow_reads_correctly(directory: Directory) -> bool:
    """Returns True if Pillow reads the grey, RGB or CMYK samples of a file with their meaning."""
    photometric, num_samples = directory.first(PHOTOMETRIC, 0), directory.first(SAMPLES, 1)
    bits, extras = directory.first(BITS, 1), directory.numbers(_EXTRAS)
    compression = directory.first(COMPRESSION, 1)
    if compression == _JPEG or compression in _FAX:
        return True
    in_planes = directory.first(PLANES, 1) == 2
    if in_planes and num_samples == 1 and compression == _UNCOMPRESSED:
        return (photometric, bits, directory.first(FILL_ORDER, 1)) == (_BLACK_IS_ZERO, 8, 1)
    is_grey, num_extras = photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO), num_samples - _NUM_COLOURS[photometric]
    if bits in (1, 2, 4):
        return is_grey and not num_extras
    if bits not in (8, 16) or (is_grey and photometric == _WHITE_IS_ZERO and (bits == 16 or num_extras)):
        return False
    if _max_value(directory, bits) != 2**bits - 1:
        return False
    if directory.first(FILL_ORDER, 1) != 1:
        return bits == 8 and not num_extras and photometric in (_BLACK_IS_ZERO, _RGB)
    if in_planes:
        return bits == 8 and not num_extras
    if not num_extras:
        return True
    if photometric == _RGB:
        return extras in _EXTRAS_OF_RGB[bits] and num_extras == (len(extras) or 1)
    return bits == 8 and extras in (((0,), (_ALPHA,)) if is_grey else ((0,), (0, 0))) and num_extras == len(extras)


# What may follow RGB: no word of it, samples without a meaning, or an alpha with or without them.
_EXTRAS_OF_RGB = {
    8: ((), (_OLD_ALPHA,), *((*first, *(0,) * more) for first in ((0,), (1,), (2,)) for more in range(3))),
    16: ((), (0,), (_PREMULTIPLIED,), (_ALPHA,)),
}


def _max_value(directory: Directory, bits: int) -> int:
    """Returns the largest value of samples: MaxSampleValue where it says that a part of 16 bits is significant.

    With other values, and with 8 bits, the tag is statistics.
    """
    declared = max(directory.numbers(_MAX_VALUE), default=0)
    is_part = bits == _MAX_SAMPLE_BITS and 0 < declared < 2**bits and not declared & (declared + 1)
    return declared if is_part else 2**bits - 1


def check_structure(data: bytes) -> list[int]:
    """Counts the scans of parts that are JPEG streams. Decoding cannot be stopped within the file."""
    directory = first_directory(data)
    if directory.first(COMPRESSION, 1) == _JPEG:
        offsets_tag, lengths_tag = part_tags(directory)
        starts, lengths = directory.numbers(offsets_tag), directory.numbers(lengths_tag)
        for start, length in zip(starts, lengths, strict=True):
            jpeg.check_structure(data, start, min(start + length, len(data)), _MAX_JPEG_SCANS_PER_PART)
    return []


def first_directory(data: bytes) -> Directory:
    """Returns the directory of the first image."""
    byte_order = byte_order_of(data)
    if byte_order is None or len(data) < 8:
        raise undecodable()
    return Directory(data, byte_order, *struct.unpack_from(f"{byte_order}I", data, 4))


def part_tags(directory: Directory) -> tuple[int, int]:
    """Returns the tags with the positions and the lengths of strips or tiles."""
    return (_TILE_OFFSETS, _TILE_BYTES) if _TILE_OFFSETS in directory else (_STRIP_OFFSETS, _STRIP_BYTES)


def _check_directory(data: bytes, parent: Directory, number: int) -> None:
    """Checks a directory that Pillow also reads, and the directory within it."""
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
        rows = min(directory.first(ROWS_PER_STRIP, height), height)
        across, part_width, part_height = 1, width, rows
    else:
        part_width, part_height = directory.first(TILE_WIDTH, 0), directory.first(TILE_HEIGHT, 0)
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
