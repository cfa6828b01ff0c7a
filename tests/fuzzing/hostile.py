"""Image files that are built to cost much: more parts, larger numbers, deeper nesting than encoders write."""

import struct
import zlib
from typing import Any

from hypothesis import strategies as st

from tests import hostile_images as build

# Near the limits of images, of formats and of numbers.
_sides = st.one_of(
    st.sampled_from((1, 2, 7, 16, 255, 500, 501)),
    st.sampled_from((8_000, 16_383, 16_384, 65_535, 65_536, 2**20, 2**24, 2**31 - 1, 2**32 - 1)),
)
_small_sides = st.sampled_from((1, 8, 17, 64, 400))
_sides_of_16_bits = _sides.map(lambda side: side & 0xFFFF)
_counts = st.sampled_from((0, 1, 2, 9, 63, 64, 65, 500, 1_000, 5_000, 20_000))
_fills = st.one_of(st.binary(max_size=40), st.builds(lambda size: bytes(size), st.sampled_from((1, 300, 60_000))))
_numbers = st.one_of(st.integers(0, 9), st.sampled_from((26_000, 2**16 - 1, 2**16, 2**20, 2**31, 2**32 - 1)))


def _bomb(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


_packed = st.builds(_bomb, st.sampled_from((10, 2**16, 2**20, 2**20 + 1, 2**24)))

_IMPORTANT_TAGS = (
    *(254, 256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 282, 284, 317, 320, 322, 323, 324, 325, 330),
    *(338, 339, 347, 513, 514, 530, 700, 34665, 34675, 34853, 40965, 45057, 45058),
)
_tags = st.dictionaries(
    st.one_of(st.sampled_from(_IMPORTANT_TAGS), st.integers(0, 65_535)),
    st.tuples(
        st.one_of(st.sampled_from((3, 4)), st.integers(0, 18)),
        st.one_of(st.just(1), _numbers),
        st.one_of(_numbers, st.integers(0, 400)),
    ),
    max_size=14,
)


def _directory(tags: dict[int, tuple[int, int, int]], byte_order: str, position: int, data: bytes) -> bytes:
    fitting = {
        number: (kind, count, value & 0xFFFF if kind == 3 and count == 1 else value)
        for number, (kind, count, value) in tags.items()
    }
    return build.directory(fitting, position=position, byte_order=byte_order, data=data)


directories = st.builds(
    _directory, _tags, st.sampled_from("<>"), st.sampled_from((8, 8, 8, 10)), st.one_of(_fills, _packed)
)
"""TIFF files and EXIF blocks."""

_compressions = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 32_773, 32_946, 34_712, 34_925, 50_000, 50_001))
_tiffs = st.builds(
    lambda sides, tags, compression, data: build.tiff(sides[0], sides[1], tags, compression=compression, data=data),
    st.one_of(st.tuples(_small_sides, _small_sides), st.tuples(_sides, _sides)),
    _tags.map(
        lambda tags: {
            number: (kind, count, value & 0xFFFF if kind == 3 and count == 1 else value)
            for number, (kind, count, value) in tags.items()
            if number not in (256, 257, 259)
        }
    ),
    _compressions,
    st.one_of(_fills, _packed),
)
_tiled = st.builds(build.tiff_of_one_tile, _small_sides, _small_sides, _numbers.map(lambda side: max(1, side)))

_segments = st.lists(
    st.tuples(
        st.builds(
            build.jpeg_segment,
            st.one_of(st.sampled_from((0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xFE, 0xC4, 0xDB, 0xDD)), st.integers(0, 254)),
            st.one_of(
                _fills,
                directories.map(lambda block: b"Exif\0\0" + block[:60_000]),
                directories.map(lambda block: b"MPF\0" + block[:60_000]),
                _fills.map(lambda fill: b"ICC_PROFILE\0\1\1" + fill),
                _fills.map(lambda fill: b"Photoshop 3.0\0" + b"8BIM\3\xed\0\0\0\0\xff\xff" + fill),
                _fills.map(lambda fill: b'http://ns.adobe.com/xap/1.0/\0tiff:Orientation="6' + fill),
            ),
        ),
        st.sampled_from((1, 1, 1, 3, 1_100)),
    ),
    max_size=3,
).map(lambda parts: b"".join((segment * (count if len(segment) < 100 else 1)) for segment, count in parts))
_jpegs = st.builds(
    lambda width, height, scans, segments: build.progressive_jpeg(width, height, scans, segments=segments),
    _small_sides,
    _small_sides,
    _counts.filter(bool),
    _segments,
)
_jpeg_heads = st.builds(
    lambda width, height, segments: build.jpeg_head(width, height, segments=segments),
    _sides_of_16_bits,
    _sides_of_16_bits,
    _segments,
)

_kinds = st.sampled_from((b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tRNS", b"acTL", b"fcTL", b"fdAT", b"abCd"))
_chunks = st.lists(
    st.tuples(
        st.builds(
            build.png_chunk,
            _kinds,
            st.one_of(
                _fills,
                directories,
                _packed.map(lambda packed: b"a\0\0" + packed),
                _packed.map(lambda packed: b"a\0\1\0\0\0" + packed),
                st.integers(0, 2**32 - 1).map(lambda count: struct.pack(">II", count, 0)),
            ),
        ),
        st.sampled_from((1, 1, 1, 17, 300, 40_000)),
    ),
    max_size=3,
).map(lambda parts: b"".join((chunk * (count if len(chunk) < 60 else min(count, 20))) for chunk, count in parts))
_pngs = st.builds(
    lambda width, height, colour, chunks, num: build.png(
        width, height, colour_type=colour, chunks=chunks, num_pixel_chunks=num
    ),
    _small_sides,
    _small_sides,
    st.sampled_from((0, 2, 6)),
    _chunks,
    st.sampled_from((1, 2, 50)),
)


def _with_png_size(file: bytes, width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">II", width, height) + file[24:29]
    return file[:12] + head + struct.pack(">I", zlib.crc32(head)) + file[33:]


_pngs_of_other_sizes = st.builds(_with_png_size, _pngs, _sides, _sides)

_PIXEL = bytes.fromhex("2f000000000710fd8ffe0722a2ff01")  # lossless, 1 by 1
_FRAME = bytes(16) + b"VP8L" + struct.pack("<I", len(_PIXEL)) + _PIXEL + b"\0"
_webp_chunks = st.lists(
    st.tuples(
        st.sampled_from((b"ANIM", b"ANMF", b"ALPH", b"VP8L", b"VP8 ", b"ICCP", b"EXIF", b"XMP ", b"abcd")),
        st.one_of(_fills, directories, st.just(_PIXEL), st.just(_FRAME)),
    ),
    max_size=4,
)


def _webp(sides: tuple[int, int], chunks: list[tuple[bytes, bytes]], count: int, flags: int) -> bytes:
    repeated = chunks * count if sum(len(content) for _, content in chunks) < 200 else chunks
    width, height = (min(side, 2**24) for side in sides)
    animation = ((b"ANIM", bytes(6)), (b"ANMF", _FRAME)) if flags & 2 else ((b"VP8L", _PIXEL),)
    return build.webp_canvas(width, height, *animation, *repeated, flags=flags)


_webps = st.builds(
    _webp,
    st.one_of(st.tuples(_small_sides, _small_sides), st.tuples(_sides, _sides), st.just((1, 1))),
    _webp_chunks,
    st.sampled_from((1, 1, 2, 5_000)),
    st.one_of(st.sampled_from((0, 2, 10)), st.integers(0, 255)),
)

_BLOCKS = (*(b"!\xfe\x01a\0", b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0", b"!\xf9\4\1\0\0\0\0"), *(b"!\xfe\0", b"\0", b"!"))
_gif_blocks = st.lists(st.tuples(st.sampled_from(_BLOCKS), st.sampled_from((1, 2, 1_000, 5_000))), max_size=3).map(
    lambda parts: b"".join(block * count for block, count in parts)
)
_gifs = st.builds(
    lambda width, height, blocks, frame: build.gif(width, height, blocks=blocks, frame=frame),
    _sides_of_16_bits,
    _sides_of_16_bits,
    _gif_blocks,
    st.one_of(st.none(), st.tuples(*[_sides_of_16_bits] * 4)),
)
_bmps = st.builds(build.bmp_of_runs, _sides, _sides, st.sampled_from((0, 10, 10_000, 300_000, 2**21)))

_all: tuple[st.SearchStrategy[Any], ...] = (
    *(_jpegs, _jpeg_heads, _pngs, _pngs_of_other_sizes, _webps, _gifs, _bmps, directories, _tiffs, _tiled),
)
hostile = st.one_of(*_all)
"""Files of every format that ask for much."""
