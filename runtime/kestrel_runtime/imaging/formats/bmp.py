"""Reads the size and the compression that a BMP file declares. Decodes nothing."""

from __future__ import annotations

from kestrel_runtime.imaging.formats.header import ImageHeader, beyond_limit, simple_header, undecodable

MAX_RUN_LENGTH_BYTES = 2**21
"""Limit of files with run-length encoding, which Pillow decodes in Python, byte by byte."""

_CORE_HEADER_BYTES = 12
_HEADER_BYTES = (40, 52, 56, 64, 108, 124)
_RUN_LENGTHS = (1, 2)


def read_header(data: bytes) -> ImageHeader:
    """Width, height and decoding memory."""
    header_bytes = _number(data, 14, 4)
    if header_bytes == _CORE_HEADER_BYTES:
        return simple_header("BMP", _number(data, 18, 2), _number(data, 20, 2))
    if header_bytes not in _HEADER_BYTES:
        raise undecodable()
    if _number(data, 30, 4) in _RUN_LENGTHS and len(data) > MAX_RUN_LENGTH_BYTES:
        raise beyond_limit("bytes, run-length encoded", MAX_RUN_LENGTH_BYTES)
    height = _number(data, 22, 4)
    if data[25] == 0xFF:  # a negative height: the rows are stored from top to bottom
        height = 2**32 - height
    return simple_header("BMP", _number(data, 18, 4), height)


def _number(data: bytes, position: int, num_bytes: int) -> int:
    if position + num_bytes > len(data):
        raise undecodable()
    return int.from_bytes(data[position : position + num_bytes], "little")
