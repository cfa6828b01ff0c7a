"""Image file directories: the tables of tags that TIFF files are made of and that EXIF metadata is.

Knows how tags are stored, and not what they mean.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kestrel_runtime.imaging.formats.header import beyond_limit, undecodable

MAX_TAGS = 1024
MAX_VALUES = 2**18
"""Numbers in all tags of a directory, each of which becomes an object in Python. A TIFF of 65,536 rows that are
stored one by one has two for each."""

_BYTE, _ASCII, _UNDEFINED = 1, 2, 7  # of these a tag of any length is one object
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBER_FORMATS = {1: "B", 3: "H", 4: "I", 13: "I"}


class _Tag(NamedTuple):
    kind: int
    num_values: int
    position: int
    """Where its values begin in the file."""


class Directory:
    """The tags of one directory, by number."""

    def __init__(self, data: bytes, byte_order: str, position: int) -> None:
        """byte_order: as `struct` writes it, < or >. Raises `ImageError` for directories beyond the limits."""
        self._data = data
        self._byte_order = byte_order
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
        """How many values a tag has; 0 where it is missing."""
        return self._tags[number].num_values if number in self._tags else 0

    def numbers(self, number: int) -> tuple[int, ...]:
        """The values of a tag of whole numbers; none where it is missing."""
        tag = self._tags.get(number)
        if tag is None:
            return ()
        if tag.kind not in _NUMBER_FORMATS or tag.num_values > MAX_VALUES:
            raise undecodable()
        form = f"{self._byte_order}{tag.num_values}{_NUMBER_FORMATS[tag.kind]}"
        if tag.position + struct.calcsize(form) > len(self._data):
            raise undecodable()
        return struct.unpack_from(form, self._data, tag.position)

    def first(self, number: int, default: int) -> int:
        """The first value of a tag of whole numbers."""
        return next(iter(self.numbers(number)), default)


def byte_order_of(data: bytes) -> str | None:
    """How numbers are stored in a file or block of this kind, as `struct` writes it; None where it is none."""
    return {b"II": "<", b"MM": ">"}.get(data[:2])


def check(block: bytes) -> None:
    """Raise `ImageError` for EXIF metadata that is beyond the limits; what does not parse says nothing."""
    byte_order = byte_order_of(block)
    if byte_order is not None and len(block) >= 8:
        Directory(block, byte_order, *struct.unpack_from(f"{byte_order}I", block, 4))
