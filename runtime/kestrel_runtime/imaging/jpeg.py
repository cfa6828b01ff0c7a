"""Reads the size, the components and the scans that a JPEG file declares. Decodes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging.header import (
    DECODED_BYTES_PER_PIXEL,
    ImageHeader,
    beyond_limit,
    check_exif,
    simple_header,
    undecodable,
)

MAX_SCANS = 64
"""Progressive encoders write about 10. Each scan visits every block of the image, however few bytes it has."""
MAX_SEGMENTS = 1024
"""Limit of segments of headers, tables and metadata. Files with depth maps or large profiles have a few hundred."""
_MAX_PADDING_BYTES = 2**16
"""Limit of bytes between header segments. Valid files have none."""
_MAX_EXIF_BYTES = 2**20

_TEM, _SOI, _EOI, _SOS, _DHP, _APP1 = 0x01, 0xD8, 0xD9, 0xDA, 0xDE, 0xE1
_LOSSLESS_LS = 0xF7
_FRAMES = frozenset((*range(0xC0, 0xD0), _LOSSLESS_LS)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_EXIF_PREFIX = b"Exif\0\0"
_BLOCK_BYTES = 64 * 2

# After 0xFF, a 0 means a data byte, D0 to D7 are restarts within a scan, and FF is padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_WINDOW_BYTES = 2**20
"""Bytes per search. A search holds the interpreter's lock, for this many bytes at most about 10 ms."""


class _Segment(NamedTuple):
    marker: int
    found: int
    """Position of the marker."""
    start: int
    end: int
    """The content, [start, end); empty if the marker has none."""


def read_header(data: bytes) -> ImageHeader:
    """Returns the width, the height and the decoding memory, from the segments before the first scan."""
    frame: _Segment | None = None
    exif_parts: list[bytes] = []
    num_padding = num_exif_bytes = 0
    position = 2
    for segment in _segments(data, position, len(data), max_padding=_MAX_PADDING_BYTES):
        num_padding += segment.found - position
        if num_padding > _MAX_PADDING_BYTES:
            raise undecodable()
        if segment.marker == _SOS:
            break
        if segment.marker in _FRAMES:
            if frame is not None:
                raise undecodable()
            frame = segment
        elif segment.marker in (_TEM, _SOI, _EOI, _DHP):
            raise undecodable()
        elif segment.marker == _APP1 and data.startswith(_EXIF_PREFIX, segment.start):
            exif_parts.append(data[segment.start + len(_EXIF_PREFIX) : segment.end])
            num_exif_bytes += len(exif_parts[-1])
            if num_exif_bytes > _MAX_EXIF_BYTES:
                raise beyond_limit("bytes of EXIF metadata", _MAX_EXIF_BYTES)
        position = segment.end
    else:
        raise undecodable()
    if frame is None:
        raise undecodable()
    check_exif(b"".join(exif_parts))
    return _header(data, frame, num_components_in_scan=data[segment.start])


def check_structure(data: bytes, start: int = 0, end: int | None = None, max_scans: int = MAX_SCANS) -> list[int]:
    """Returns the start of each scan after the first, in the JPEG stream at [start, end) of the data."""
    scans = []
    end = len(data) if end is None else end
    for segment in _segments(data, start + 2, end, max_padding=end):
        if segment.marker == _EOI:
            break
        if segment.marker == _SOS:
            scans.append(segment.found)
            if len(scans) > max_scans:
                raise beyond_limit("JPEG scans", max_scans)
    return scans[1:]


def _header(data: bytes, frame: _Segment, num_components_in_scan: int) -> ImageHeader:
    height = int.from_bytes(data[frame.start + 1 : frame.start + 3])
    width = int.from_bytes(data[frame.start + 3 : frame.start + 5])
    num_components = data[frame.start + 5]
    if frame.marker == _LOSSLESS_LS:
        raise ImageError("is a JPEG-LS file; must be a JPEG")
    if data[frame.start] != 8:
        raise ImageError(f"is a JPEG of {data[frame.start]} bits per sample; must have 8")
    if num_components == 2:
        raise ImageError("is a JPEG of 2 components; must have 1, 3 or 4")
    header = simple_header("JPEG", width, height)
    if frame.marker not in _PROGRESSIVE and num_components_in_scan >= num_components:
        return replace(header, is_cost_known=True)  # decoders refuse a second scan of such files
    # With several scans the decoder keeps the coefficients of the whole image until the last scan.
    samplings = [data[frame.start + 7 + 3 * place] for place in range(num_components)]
    across, down = [value >> 4 for value in samplings], [value & 15 for value in samplings]
    if not all(across) or not all(down):
        raise undecodable()
    num_blocks = sum(
        _blocks(width, x, max(across)) * _blocks(height, y, max(down)) for x, y in zip(across, down, strict=True)
    )
    decoding_bytes = num_blocks * _BLOCK_BYTES + DECODED_BYTES_PER_PIXEL // 2 * width * height
    return ImageHeader("JPEG", width, height, max(header.decoding_bytes, decoding_bytes))


def _blocks(length_px: int, sampling: int, max_sampling: int) -> int:
    """Returns the number of blocks of 8 samples of a component along one side, in whole units of the image."""
    return -(-length_px // (8 * max_sampling)) * sampling


def _segments(data: bytes, position: int, end: int, *, max_padding: int) -> Iterator[_Segment]:
    """Yields the segments from a position on. Ends where `max_padding` bytes contain no segment."""
    for _ in range(MAX_SEGMENTS):
        found = _next_marker(data, position, min(end, position + max_padding + 2))
        if found is None:
            return
        marker, start = data[found + 1], found + 2
        if marker in (_TEM, _SOI, _EOI):
            yield _Segment(marker, found, start, start)
            position = start
        else:
            position = start + max(2, int.from_bytes(data[start : start + 2]))
            yield _Segment(marker, found, start + 2, position)
    raise beyond_limit("JPEG segments", MAX_SEGMENTS)


def _next_marker(data: bytes, position: int, end: int) -> int | None:
    while position < end:
        # One more byte, since a marker may cross the border of two windows.
        match = _MARKER.search(data, position, min(position + _WINDOW_BYTES + 1, end))
        if match is not None:
            return match.start()
        position += _WINDOW_BYTES
    return None
