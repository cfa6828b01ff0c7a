"""Reads the size and the chunks that a PNG file declares. Decodes nothing."""

from __future__ import annotations

import struct

from kestrel_runtime.imaging.formats import exif
from kestrel_runtime.imaging.formats.header import ImageHeader, beyond_limit, simple_header, undecodable

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 32_768
"""Encoders write the pixels in chunks of 8 KiB and more: the largest file that is accepted has 4,096 of these."""
MAX_COMPRESSED_TEXTS = 16
"""Limit of chunks with texts and colour profiles, which are decompressed to up to 1 MiB each."""

_CHUNK = struct.Struct(">I4s")
_CHUNK_OVERHEAD_BYTES = 12  # length, type and checksum


def read_header(data: bytes) -> ImageHeader:
    """Width, height and decoding memory, from the first chunk."""
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise undecodable()
    return simple_header("PNG", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))


def check_structure(data: bytes) -> list[int]:
    """Count the chunks. No position is returned, since no chunk is large enough to need one."""
    position, num_texts = len(SIGNATURE), 0
    for _ in range(MAX_CHUNKS):
        if position + _CHUNK.size > len(data):
            return []
        length, kind = _CHUNK.unpack_from(data, position)
        start = position + _CHUNK.size
        if kind == b"IEND":
            return []
        if kind == b"eXIf":
            exif.check(data[start : start + length])
        elif kind in (b"zTXt", b"iCCP") or (kind == b"iTXt" and _is_compressed(data, start)):
            num_texts += 1
            if num_texts > MAX_COMPRESSED_TEXTS:
                raise beyond_limit("compressed texts and profiles", MAX_COMPRESSED_TEXTS)
        position += length + _CHUNK_OVERHEAD_BYTES
    raise beyond_limit("PNG chunks", MAX_CHUNKS)


def _is_compressed(data: bytes, start: int) -> bool:
    """Whether an iTXt chunk is compressed: a flag after its keyword, which ends with a zero within 80 bytes."""
    end_of_keyword = data.find(b"\0", start, start + 80)
    return end_of_keyword < 0 or data[end_of_keyword + 1 : end_of_keyword + 2] != b"\0"
