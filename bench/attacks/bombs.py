"""Picture files that are small and cost much: in time, or in memory. All are read by Pillow, as far as it goes."""

import struct
import zlib
from collections.abc import Iterable

_EOB_RUN_BLOCKS = 2**15 - 1
_ZEROS_PER_BLOCK = 2**20


def jpeg_of_scans(num_scans: int, side_px: int = 8_000) -> bytes:
    """A progressive grey JPEG whose scans each pass over the whole picture and change nothing.

    A scan is 70 to 90 bytes long for 64 million pixels, because one code ends up to 32,767 blocks.
    """
    num_blocks = ((side_px + 7) // 8) ** 2
    frame = struct.pack(">BHHB", 8, side_px, side_px, 1) + bytes((1, 0x11, 0))
    # One code of one bit in each table: a DC difference of 0, and an end-of-band run of 15 bits.
    tables = [bytes((kind, 1, *[0] * 15, symbol)) for kind, symbol in ((0x00, 0x00), (0x10, 0xE0))]
    bits = "".join("0" + format(run - 2**14, "014b") for run in _runs(num_blocks))
    parts = [b"\xff\xd8", _jpeg_segment(0xDB, bytes(1) + b"\x01" * 64), _jpeg_segment(0xC2, frame)]
    parts += [_jpeg_segment(0xC4, table) for table in tables]
    parts.append(_jpeg_scan(0, 0, "0" * num_blocks))
    parts.append(_jpeg_scan(1, 63, bits) * (num_scans - 1))
    return b"".join((*parts, b"\xff\xd9"))


def tiff_of_one_tile(tile_px: int = 26_000, side_px: int = 64) -> bytes:
    """A small picture in a single compressed tile that is far larger than the picture, and black."""
    tile = _deflated_zeros(3 * tile_px**2)
    bits = struct.pack("<HHH", 8, 8, 8)
    entries = (
        (256, 1, side_px),  # width
        (257, 1, side_px),  # height
        (258, 3, 8),  # bits per sample: where they stand
        (259, 1, 8),  # compression: deflate
        (262, 1, 2),  # RGB
        (277, 1, 3),  # samples per pixel
        (284, 1, 1),  # samples beside each other
        (322, 1, tile_px),
        (323, 1, tile_px),
        (324, 1, 8 + len(bits)),  # where the tile stands
        (325, 1, len(tile)),
    )
    # Of 16 bits are only those numbers of which there are several.
    directory = b"".join(
        struct.pack("<HHII", tag, 3 if count > 1 else 4, count, value) for tag, count, value in entries
    )
    directory = struct.pack("<H", len(entries)) + directory + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(bits) + len(tile)) + bits + tile + directory


def png_of_one_colour(width_px: int, height_px: int, *, alpha: bool) -> bytes:
    """A PNG whose lines are all alike: about a byte for each thousand that it decodes to."""
    num_lanes = 4 if alpha else 3
    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 6 if alpha else 2, 0, 0, 0)
    pixels = _deflated_zeros((1 + num_lanes * width_px) * height_px)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, body) for kind, body in chunks)


def webp_of_canvas(width_px: int, height_px: int) -> bytes:
    """An animated WebP of one pixel on a canvas of any size."""
    # Lossless: its signature, a size of 1 by 1, then the codes of one colour.
    pixel = bytes.fromhex("2f000000000710fd8ffe0722a2ff01")
    canvas = struct.pack("<I", width_px - 1)[:3] + struct.pack("<I", height_px - 1)[:3]
    frame = bytes(12) + struct.pack("<I", 100)[:3] + b"\x02" + _webp_chunk(b"VP8L", pixel)
    body = _webp_chunk(b"VP8X", b"\x12\0\0\0" + canvas)
    body += _webp_chunk(b"ANIM", bytes(6)) + _webp_chunk(b"ANMF", frame)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _runs(num_blocks: int) -> Iterable[int]:
    """Lengths from 16,384 to 32,767 that add up to the number of blocks or just above."""
    while num_blocks > 0:
        run = max(2**14, min(_EOB_RUN_BLOCKS, num_blocks))
        yield run
        num_blocks -= run


def _jpeg_segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def _jpeg_scan(first: int, last: int, bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return _jpeg_segment(0xDA, bytes((1, 1, 0x00, first, last, 0x00))) + data


def _deflated_zeros(num_bytes: int) -> bytes:
    """So many zeros, compressed by zlib: a block that is repeated, since compressing gigabytes would take long."""
    num_blocks, num_left = divmod(num_bytes, _ZEROS_PER_BLOCK)
    compress = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = compress.compress(bytes(_ZEROS_PER_BLOCK)) + compress.flush(zlib.Z_FULL_FLUSH)
    last = compress.compress(bytes(num_left)) + compress.flush()
    adler = num_bytes % 65_521 << 16 | 1
    return b"\x78\xda" + block * num_blocks + last + struct.pack(">I", adler)


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _webp_chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
