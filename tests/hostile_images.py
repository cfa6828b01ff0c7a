"""Small files that ask for much: written byte by byte, since no encoder would."""

import struct
import zlib
from collections.abc import Mapping

Tags = Mapping[int, tuple[int, int, bytes | int]]
"""Type, count and value by number; an int as value is as it stands in the table: a number or a place."""

# JPEG: every code is one bit long and stands for nothing, so that a scan of zeros has no end of blocks.
_QUANTIZATION = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64)
_DC_TABLE = b"\xff\xc4" + struct.pack(">HB", 20, 0x00) + bytes([1] + [0] * 15) + b"\x00"
_AC_TABLE = b"\xff\xc4" + struct.pack(">HB", 20, 0x10) + bytes([1] + [0] * 15) + b"\xe0"  # ends 2^14 blocks
_DC_SCAN = b"\xff\xda" + struct.pack(">HB", 12, 3) + bytes([1, 0, 2, 0, 3, 0, 0, 0, 0])
_AC_SCAN = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, 1, 63, 0])
END_OF_JPEG = b"\xff\xd9"


def jpeg_head(width: int, height: int, *, segments: bytes = b"") -> bytes:
    """A progressive JPEG up to its first scan, which is of three colours, none of them subsampled."""
    frame = struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    return b"\xff\xd8" + segments + _QUANTIZATION + b"\xff\xc2" + frame + _DC_TABLE + _AC_TABLE


def progressive_jpeg(width: int, height: int, num_scans: int, *, segments: bytes = b"") -> bytes:
    """A grey picture of so many scans, the first of which has all there is to see."""
    num_blocks = -(-width // 8) * -(-height // 8)
    first = _DC_SCAN + bytes((3 * num_blocks + 7) // 8)
    later = _AC_SCAN + bytes((-(-num_blocks // 2**14) * 15 + 7) // 8)
    return jpeg_head(width, height, segments=segments) + first + later * (num_scans - 1) + END_OF_JPEG


def jpeg_segment(marker: int, content: bytes) -> bytes:
    """A segment of metadata."""
    return b"\xff" + struct.pack(">BH", marker, 2 + len(content)) + content


def png_chunk(kind: bytes, content: bytes = b"") -> bytes:
    """A chunk with its checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *, colour_type: int = 6, chunks: bytes = b"", num_pixel_chunks: int = 1) -> bytes:
    """A PNG of zeros: transparent black with the colour type 6 (RGBA), black with 2 (RGB)."""
    row = bytes(1 + {0: 1, 2: 3, 6: 4}[colour_type] * width)
    packer = zlib.compressobj(9)
    pixels = b"".join((*(packer.compress(row) for _ in range(height)), packer.flush()))
    step = max(1, len(pixels) // num_pixel_chunks)
    parts = [pixels[at : at + step] for at in range(0, len(pixels), step)]
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0))
    body = b"".join(png_chunk(b"IDAT", part) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + header + chunks + body + png_chunk(b"IEND")


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP file of these chunks."""
    body = b"".join(
        kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for kind, content in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def webp_canvas(width: int, height: int, *frame: tuple[bytes, bytes], flags: int = 0) -> bytes:
    """A WebP whose canvas is of this size, whatever is on it. flags: 2 where it is an animation, 8 with EXIF."""
    return riff(
        (
            b"VP8X",
            struct.pack("<I", flags) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"),
        ),
        *frame,
    )


def directory(tags: Tags, *, position: int = 8, byte_order: str = "<", data: bytes = b"") -> bytes:
    """A TIFF file or EXIF block, with data behind its directory."""
    head = (b"II*\0" if byte_order == "<" else b"MM\0*") + struct.pack(f"{byte_order}I", position)
    table = struct.pack(f"{byte_order}H", len(tags))
    for number, (kind, count, value) in sorted(tags.items()):
        table += struct.pack(f"{byte_order}HHI", number, kind, count)
        if isinstance(value, bytes):
            table += value
        else:
            table += struct.pack(f"{byte_order}{'H' if kind == 3 and count == 1 else 'I'}", value).ljust(4, b"\0")
    return head.ljust(position, b"\0") + table + struct.pack(f"{byte_order}I", 0) + data


SHORT, LONG, RATIONAL = 3, 4, 5


def tiff(width: int, height: int, extra: Tags, *, compression: int = 8, data: bytes = b"") -> bytes:
    """A grey TIFF of 8 bits, whose pixels are where the other tags say."""
    tags: Tags = {
        256: (LONG, 1, width),
        257: (LONG, 1, height),
        258: (SHORT, 1, 8),
        259: (SHORT, 1, compression),
        262: (SHORT, 1, 1),
        **extra,
    }
    return directory(tags, data=data)


def tiff_of_one_tile(width: int, height: int, tile_side: int) -> bytes:
    """A TIFF with a single tile of this side, all zeros. The tile is compressed well."""
    pixels = zlib.compress(bytes(min(tile_side**2, 2**22)), 9)
    position = 8 + 2 + 12 * 9 + 4
    tags: Tags = {
        322: (LONG, 1, tile_side),
        323: (LONG, 1, tile_side),
        324: (LONG, 1, position),
        325: (LONG, 1, len(pixels)),
    }
    return tiff(width, height, tags, data=pixels)


def gif(width: int, height: int, *, blocks: bytes = b"", frame: tuple[int, int, int, int] | None = None) -> bytes:
    """A GIF of two colours; `blocks` come before its only image, whose pixels are cut off."""
    left, top, frame_width, frame_height = frame or (0, 0, width, height)
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    image = b"," + struct.pack("<HHHHB", left, top, frame_width, frame_height, 0) + b"\x02\x02\x44\x01\x00"
    return screen + blocks + image + b";"


def bmp_of_runs(width: int, height: int, num_bytes: int) -> bytes:
    """A BMP with run-length encoding, that ends one line after the other without a pixel in them."""
    info = struct.pack("<IIIHHIIIIII", 40, width, height, 1, 8, 1, num_bytes, 0, 0, 2, 2) + bytes(8)
    return b"BM" + struct.pack("<III", 14 + len(info) + num_bytes, 0, 14 + len(info)) + info + bytes(num_bytes)
