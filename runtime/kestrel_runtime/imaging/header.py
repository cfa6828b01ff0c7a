"""Provides what the parsers of image files share: declared sizes, errors, and directories of tags.

A directory is a table of tags in a TIFF file or in EXIF metadata. The parsers interpret it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from kestrel_runtime.api.errors import ImageError

DECODED_BYTES_PER_PIXEL = 8
"""Most formats decode to at most 4 bytes per pixel, and an RGB or upright copy of that takes another 4."""
MAX_TAGS = 1024
MAX_VALUES = 2**18
"""Limit of numbers in all tags of a directory, each of which becomes a Python object. A TIFF with 65,536 strips of
one row each has two numbers for each strip."""

_BYTE, _ASCII, _UNDEFINED = 1, 2, 7  # a tag of one of these types becomes one object, whatever its length
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBER_FORMATS = {1: "B", 3: "H", 4: "I", 13: "I"}


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size of an image and the memory that decoding takes. `format` is a key of `formats.FORMATS`."""

    format: str
    width: int
    height: int
    decoding_bytes: int
    """Peak memory of decoding: it includes the decoded image and not the encoded file."""
    is_cost_known: bool = False
    """True if the header alone determines the cost of decoding, so that `check_structure` can be skipped."""


def simple_header(image_format: str, width: int, height: int) -> ImageHeader:
    """Returns the header of a file whose decoder needs only the pixels and a copy of them."""
    return ImageHeader(image_format, width, height, DECODED_BYTES_PER_PIXEL * width * height)


def undecodable() -> ImageError:
    """Returns the error for files that are damaged or in no served format."""
    return ImageError("cannot be decoded; must be a complete file in one of JPEG, PNG, WEBP, GIF, BMP, TIFF")


def beyond_limit(what: str, limit: int) -> ImageError:
    """Returns the error for files with more parts of some kind than any real picture has."""
    return ImageError(f"has more than {limit} {what}", too_large=True)


class _Tag(NamedTuple):
    kind: int
    num_values: int
    position: int
    """Position of the first value in the file."""


class Directory:
    """The tags of one directory, by number."""

    def __init__(self, data: bytes, byte_order: str, position: int) -> None:
        """Reads a directory; `byte_order` is "<" or ">", as in `struct`. Raises `ImageError` beyond the limits."""
        self._data = data
        self.byte_order = byte_order
        self._tags: dict[int, _Tag] = {}
        self.has_duplicates = False
        if position + 2 > len(data):
            return
        (num_tags,) = struct.unpack_from(f"{byte_order}H", data, position)
        if num_tags > MAX_TAGS:
            raise beyond_limit("metadata tags", MAX_TAGS)
        num_values = 0
        for place in range(position + 2, min(position + 2 + 12 * num_tags, len(data) - 11), 12):
            number, kind, count, value = struct.unpack_from(f"{byte_order}HHII", data, place)
            if number in self._tags:
                self.has_duplicates = True
                continue
            if kind not in (_BYTE, _ASCII, _UNDEFINED):
                num_values += count
            is_inline = count * _TYPE_BYTES.get(kind, 0) <= 4
            self._tags[number] = _Tag(kind, count, place + 8 if is_inline else value)
        if num_values > MAX_VALUES:
            raise beyond_limit("numbers in its metadata tags", MAX_VALUES)

    def __contains__(self, number: int) -> bool:
        return number in self._tags

    def count(self, number: int) -> int:
        """Returns the number of values of a tag; 0 if it is missing."""
        return self._tags[number].num_values if number in self._tags else 0

    def numbers(self, number: int) -> tuple[int, ...]:
        """Returns the values of a tag of whole numbers; empty if it is missing."""
        tag = self._tags.get(number)
        if tag is None:
            return ()
        if tag.kind not in _NUMBER_FORMATS or tag.num_values > MAX_VALUES:
            raise undecodable()
        form = f"{self.byte_order}{tag.num_values}{_NUMBER_FORMATS[tag.kind]}"
        if tag.position + struct.calcsize(form) > len(self._data):
            raise undecodable()
        return struct.unpack_from(form, self._data, tag.position)

    def entry(self, number: int) -> tuple[int, int, bytes]:
        """Returns the type of a tag that is there, the number of its values, and the values as they are stored."""
        tag = self._tags[number]
        length = tag.num_values * _TYPE_BYTES.get(tag.kind, 0)
        values = self._data[tag.position : tag.position + length]
        if len(values) != length or tag.num_values > MAX_VALUES:
            raise undecodable()
        return tag.kind, tag.num_values, values

    def first(self, number: int, default: int) -> int:
        """Returns the first value of a tag of whole numbers."""
        return next(iter(self.numbers(number)), default)


def byte_order_of(data: bytes) -> str | None:
    """Returns the byte order of a TIFF file or an EXIF block, as in `struct`; None for other data."""
    return {b"II": "<", b"MM": ">"}.get(data[:2])


def check_exif(block: bytes) -> None:
    """Raises `ImageError` for EXIF metadata beyond the limits. Metadata that does not parse is ignored."""
    byte_order = byte_order_of(block)
    if byte_order is not None and len(block) >= 8:
        Directory(block, byte_order, *struct.unpack_from(f"{byte_order}I", block, 4))
