"""Reads the size of the screen and of the first frame that a GIF file declares. Decodes nothing."""

from __future__ import annotations

from kestrel_runtime.imaging.formats.header import ImageHeader, beyond_limit, simple_header, undecodable

MAX_BLOCKS_BEFORE_IMAGE = 4096
"""Limit of blocks of comments and metadata. With 255 bytes each they hold 1 MiB."""

_EXTENSION, _IMAGE, _TRAILER = b"!", b",", b";"
_COMMENT, _APPLICATION = 0xFE, 0xFF


def read_header(data: bytes) -> ImageHeader:
    """Width, height and decoding memory. A first frame that is larger than the screen enlarges it."""
    width, height = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    blocks = _Blocks(data, 13 + _palette_bytes(data[10]))
    while (kind := blocks.kind()) != _IMAGE:
        if kind == _EXTENSION:
            blocks.skip_extension()
        elif kind == _TRAILER:
            raise undecodable()
    left, top, frame_width, frame_height = blocks.extent()
    return simple_header("GIF", max(width, left + frame_width), max(height, top + frame_height))


def _palette_bytes(flags: int) -> int:
    return 3 << 1 + (flags & 7) if flags & 0x80 else 0


class _Blocks:
    """A position in the blocks before the image. Moves as Pillow does, also in malformed files."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._num_left = MAX_BLOCKS_BEFORE_IMAGE

    def kind(self) -> bytes:
        """The byte that opens a block, or one without meaning."""
        self._count()
        self._position += 1
        if self._position > len(self._data):
            raise undecodable()
        return self._data[self._position - 1 : self._position]

    def extent(self) -> tuple[int, int, int, int]:
        """Left, top, width and height of the image whose block has been opened."""
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
        """The next part of an extension; None at its end."""
        self._count()
        start = self._position + 1
        self._position = start + self._data[self._position]
        return self._data[start : self._position] or None

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise beyond_limit("blocks before the first image of the GIF", MAX_BLOCKS_BEFORE_IMAGE)
