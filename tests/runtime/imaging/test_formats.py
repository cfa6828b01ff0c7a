"""Headers of image files, and the limits on their structure: each is met by a file that asks for much."""

import contextlib
import io
import struct
import time
import zlib

import pytest
from PIL import Image

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging import bmp, formats, jpeg
from kestrel_runtime.imaging import header as headers
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.imaging.formats import FORMATS, check_structure, read_header
from tests import hostile_images as hostile
from tests.fuzzing.images import seeds

MAX_PIXELS = 64_000_000
LONG, SHORT, RATIONAL = hostile.LONG, hostile.SHORT, hostile.RATIONAL


def refusal(data: bytes) -> ImageError:
    """How a file is refused before it is decoded."""
    with pytest.raises(ImageError) as caught:
        check_structure(data, read_header(data, max_image_pixels=MAX_PIXELS))
    return caught.value


def is_accepted(data: bytes) -> bool:
    check_structure(data, read_header(data, max_image_pixels=MAX_PIXELS))
    return True


@pytest.mark.parametrize("file", seeds(), ids=range(len(seeds())))
def test_a_good_file_is_accepted_with_its_format_and_size(file: bytes):
    header = read_header(file, max_image_pixels=MAX_PIXELS)
    with Image.open(io.BytesIO(file)) as image:
        assert header.format == ("JPEG" if image.format == "MPO" else image.format)
        assert sorted((header.width, header.height)) == sorted(image.size)
    assert header.decoding_bytes >= 8 * header.width * header.height
    assert is_accepted(file)
    assert header.format in FORMATS


def test_a_header_cut_off_anywhere_is_refused_and_raises_nothing_else():
    for file in seeds():
        for length in range(min(len(file), 400)):
            with contextlib.suppress(ImageError):
                read_header(file[:length], max_image_pixels=MAX_PIXELS)


# JPEG


def test_a_jpeg_of_thirty_thousand_scans_is_refused_before_it_is_decoded():
    file = hostile.progressive_jpeg(4000, 4000, 30_000)
    began = time.process_time()
    error = refusal(file)
    assert time.process_time() - began < 0.5
    assert error.too_large
    assert error.violations[0].description == "has more than 64 JPEG scans"


def test_a_jpeg_may_have_as_many_scans_as_the_limit_and_stops_are_between_them():
    file = hostile.progressive_jpeg(64, 64, jpeg.MAX_SCANS)
    stops = check_structure(file, read_header(file, max_image_pixels=MAX_PIXELS))
    assert len(stops) == jpeg.MAX_SCANS - 1
    assert {file[stop : stop + 2] for stop in stops} == {b"\xff\xda"}


def test_a_jpeg_that_is_complete_in_its_first_scan_is_not_decoded_further():
    file = io.BytesIO()
    Image.new("L", (800, 800)).save(file, "JPEG")
    once = file.getvalue()
    scan = once[once.rindex(b"\xff\xda") : -2]
    for num_scans in (1, 2, 10_000):
        data = once[:-2] + scan * (num_scans - 1) + hostile.END_OF_JPEG
        header = read_header(data, max_image_pixels=MAX_PIXELS)
        assert header.is_cost_known
        began = time.process_time()
        with contextlib.suppress(ImageError):
            decode_image(data, max_image_pixels=MAX_PIXELS)
        assert time.process_time() - began < 0.5  # 10,000 scans would take at least 10 s


def test_scans_of_thumbnails_and_of_pictures_that_follow_are_not_counted():
    thumbnail = hostile.progressive_jpeg(8, 8, 60)
    file = hostile.progressive_jpeg(64, 64, 10, segments=hostile.jpeg_segment(0xE1, thumbnail)) + thumbnail
    assert len(check_structure(file, read_header(file, max_image_pixels=MAX_PIXELS))) == 9


def test_a_marker_is_found_across_windows_of_the_search():
    window_bytes = 2**20
    for shift in range(-3, 4):
        padding = window_bytes - len(hostile.jpeg_head(64, 64)) + shift
        head = (
            hostile.jpeg_head(64, 64) + b"\xff\xda" + struct.pack(">HB", 12, 3) + bytes([1, 0, 2, 0, 3, 0, 0, 0, 0])
        )
        file = head + bytes(padding) + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00" + hostile.END_OF_JPEG
        assert jpeg.check_structure(file) == [len(head) + padding]


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("JPEG segments", hostile.progressive_jpeg(64, 64, 1, segments=hostile.jpeg_segment(0xFE, b"") * 1100)),
        (
            "bytes of EXIF metadata",
            hostile.progressive_jpeg(
                64, 64, 1, segments=hostile.jpeg_segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 17
            ),
        ),
    ],
)
def test_a_jpeg_of_too_many_segments_is_refused(what: str, file: bytes):
    error = refusal(file)
    assert error.too_large
    assert what in error.violations[0].description


@pytest.mark.parametrize("garbage", [bytes(2**17), b"\xff" * 2**17, b"\xff\x00" * 2**16, b"\xff\xd0" * 2**16])
def test_a_jpeg_with_much_between_its_segments_is_refused(garbage: bytes):
    comment = hostile.jpeg_segment(0xFE, b"")
    assert not refusal(hostile.progressive_jpeg(64, 64, 1, segments=comment + garbage)).too_large
    assert is_accepted(hostile.progressive_jpeg(64, 64, 1, segments=comment + garbage[:1000]))


@pytest.mark.parametrize("unit", [b"\0", b"\xff", b"\xff\0"])
def test_a_header_is_read_in_a_time_that_does_not_depend_on_the_file(unit: bytes):
    comment = hostile.jpeg_segment(0xFE, b"")
    file = hostile.progressive_jpeg(64, 64, 1, segments=comment + unit * (2**24 // len(unit)))
    used_s = []
    for _ in range(9):  # the least counts: other processes make some of them slower
        began = time.process_time()
        with pytest.raises(ImageError):
            read_header(file, max_image_pixels=MAX_PIXELS)
        used_s.append(time.process_time() - began)
    assert min(used_s) < 0.02  # it would take 0.2 s to look through


@pytest.mark.parametrize("sampling", ["444", "420"])
def test_a_progressive_jpeg_needs_room_for_its_coefficients(sampling: str):
    file = io.BytesIO()
    subsampling = {"444": 0, "420": 2}[sampling]
    Image.new("RGB", (320, 160)).save(file, "JPEG", progressive=True, subsampling=subsampling)
    header = read_header(file.getvalue(), max_image_pixels=MAX_PIXELS)
    assert header.decoding_bytes / (320 * 160) == {"444": 10, "420": 8}[sampling]


def test_a_jpeg_with_two_sizes_is_refused():
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, 8, 8, 1) + bytes([1, 0x11, 0])
    assert not refusal(hostile.progressive_jpeg(64, 64, 1, segments=frame)).too_large


# PNG


@pytest.mark.parametrize(
    ("what", "chunks"),
    [
        ("PNG chunks", hostile.png_chunk(b"tEXt", b"a\0b") * (formats.MAX_PNG_CHUNKS + 1)),
        ("compressed texts", hostile.png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20), 9)) * 17),
        ("compressed texts", hostile.png_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(2**20), 9)) * 17),
        ("metadata tags", hostile.png_chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + bytes(1000))),
        (
            "numbers in its metadata tags",
            hostile.png_chunk(b"eXIf", hostile.directory({274: (RATIONAL, 10**6, 8)}, data=bytes(8 * 10**6))),
        ),
    ],
)
def test_a_png_of_too_many_parts_is_refused(what: str, chunks: bytes):
    error = refusal(hostile.png(8, 8, chunks=chunks))
    assert error.too_large
    assert what in error.violations[0].description


def test_a_png_in_many_pieces_with_many_texts_is_accepted():
    texts = hostile.png_chunk(b"iTXt", b"a\0\0\0\0\0text") * 100 + hostile.png_chunk(b"tEXt", b"a\0text") * 100
    assert is_accepted(hostile.png(800, 600, chunks=texts, num_pixel_chunks=1000))


# WebP


def test_a_webp_of_a_few_bytes_declares_its_canvas():
    header = read_header(hostile.webp_canvas(8000, 7000), max_image_pixels=MAX_PIXELS)
    assert (header.width, header.height) == (8000, 7000)
    assert header.decoding_bytes == 16 * 8000 * 7000
    with pytest.raises(ImageError, match="at most 64000000 pixels"):
        read_header(hostile.webp_canvas(8001, 8000), max_image_pixels=MAX_PIXELS)


def test_a_webp_of_too_many_frames_is_refused():
    frames = [(b"ANMF", bytes(16))] * (formats.MAX_WEBP_CHUNKS + 1)
    error = refusal(hostile.webp_canvas(8, 8, *frames, flags=2))
    assert error.violations[0].description == "has more than 16384 WebP chunks"


# GIF


@pytest.mark.parametrize(
    "blocks",
    [
        b"!\xfe" + b"\x01a" * 5000 + b"\0",
        b"!\xff\x0bNETSCAPE2.0" + b"\x01a" * 5000 + b"\0",
        b"!\xfe\0" * 5000,
        bytes(5000),
    ],
    ids=["a comment", "an extension", "extensions", "nothing"],
)
def test_a_gif_with_too_much_before_its_image_is_refused(blocks: bytes):
    error = refusal(hostile.gif(8, 8, blocks=blocks))
    assert error.too_large
    assert str(formats.MAX_BLOCKS_BEFORE_IMAGE) in error.violations[0].description


def test_the_first_frame_of_a_gif_may_be_larger_than_its_screen():
    header = read_header(hostile.gif(8, 8, frame=(10, 0, 30, 20)), max_image_pixels=MAX_PIXELS)
    assert (header.width, header.height) == (40, 20)
    assert refusal(hostile.gif(8, 8, frame=(0, 0, 65_535, 65_535))).too_large


# BMP


def test_a_bmp_of_too_many_runs_is_refused():
    assert is_accepted(hostile.bmp_of_runs(4000, 4000, 2_000_000))
    error = refusal(hostile.bmp_of_runs(4000, 4000, bmp.MAX_RUN_LENGTH_BYTES))
    assert error.too_large


# TIFF


def test_a_tiff_with_a_tile_much_larger_than_itself_is_refused():
    error = refusal(hostile.tiff_of_one_tile(64, 64, 26_000))
    assert error.too_large
    assert error.violations[0].description == "is a TIFF whose tiles are much larger than the image"
    assert is_accepted(hostile.tiff_of_one_tile(64, 64, 1024))


def test_tiles_that_reach_far_past_the_image_together_are_refused():
    # Each has as many pixels as the image, and it takes 62 of them to cover it.
    tiles = {322: (LONG, 1, 16), 323: (LONG, 1, 62_500), 324: (LONG, 62, 0), 325: (LONG, 62, 0)}
    assert refusal(hostile.tiff(1000, 1000, tiles)).too_large


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("metadata tags", b"II*\0\x08\0\0\0\xff\xff" + bytes(1000)),
        ("numbers in its metadata tags", hostile.tiff(8, 8, {273: (LONG, 2**19, 0)})),
        ("numbers in its metadata tags", hostile.tiff(8, 8, {40_000: (RATIONAL, 2**30, 0)})),
        (
            "strips or tiles",
            hostile.tiff(60_000, 1000, {322: (LONG, 1, 16), 323: (LONG, 1, 16), 324: (LONG, 9, 0)}),
        ),
    ],
)
def test_a_tiff_of_too_many_parts_is_refused(what: str, file: bytes):
    error = refusal(file)
    assert error.too_large
    assert what in error.violations[0].description


@pytest.mark.parametrize("parent", [34665, 34853])
def test_directories_within_a_tiff_are_looked_at_too(parent: int):
    inner = hostile.directory({1: (RATIONAL, 10**6, 8)})[8:]
    tags = {273: (LONG, 1, 0), 279: (LONG, 1, 0), parent: (LONG, 1, 8 + 2 + 12 * 8 + 4)}
    assert "numbers in its metadata" in refusal(hostile.tiff(8, 8, tags, data=inner)).violations[0].description
    nested = hostile.directory({40965: (LONG, 1, 8 + 2 + 12 * 8 + 4 + 2 + 12 + 4)})[8:] + inner
    if parent == 34665:
        assert "numbers in its metadata" in refusal(hostile.tiff(8, 8, tags, data=nested)).violations[0].description


@pytest.mark.parametrize(
    "tags",
    [
        {273: (LONG, 40, 0), 278: (LONG, 1, 4)},  # more strips than the image has rows for
        {273: (LONG, 1, 0), 324: (LONG, 1, 0)},
        {},
        {322: (LONG, 1, 0), 323: (LONG, 1, 0), 324: (LONG, 1, 0)},
        {273: (RATIONAL, 1, 0), 278: (RATIONAL, 1, 4)},
        {273: (LONG, 1, 0), 277: (SHORT, 1, 0)},
        {273: (LONG, 1, 0), 277: (SHORT, 1, 7)},
    ],
)
def test_a_tiff_that_contradicts_itself_is_refused(tags: hostile.Tags):
    assert not refusal(hostile.tiff(64, 64, tags)).too_large


def test_a_tag_that_is_there_twice_is_refused():
    file = bytearray(hostile.tiff(64, 64, {273: (LONG, 1, 0)}))
    file[10 + 12 : 10 + 14] = file[10:12]
    assert not refusal(bytes(file)).too_large


@pytest.mark.parametrize("compression", [6, 34925, 50000, 50001, 34676])
def test_compressions_without_bounds_are_refused_by_number(compression: int):
    error = refusal(hostile.tiff(64, 64, {273: (LONG, 1, 0)}, compression=compression))
    assert f"compression {compression}" in error.violations[0].description


def test_scans_of_a_jpeg_within_a_tiff_are_counted():
    inner = hostile.progressive_jpeg(64, 64, 100)
    tags = {273: (LONG, 1, 8 + 2 + 12 * 7 + 4), 279: (LONG, 1, len(inner))}
    error = refusal(hostile.tiff(64, 64, tags, compression=7, data=inner))
    assert error.violations[0].description == "has more than 4 JPEG scans"


def test_a_part_of_a_tiff_counts_as_memory():
    rows = {273: (LONG, 1, 0), 278: (LONG, 1, 2000), 279: (LONG, 1, 0)}
    upright, turned = ({**rows, 274: (SHORT, 1, turn)} for turn in (1, 6))
    sizes = [
        read_header(hostile.tiff(2000, 2000, tags), max_image_pixels=MAX_PIXELS).decoding_bytes
        for tags in (upright, turned)
    ]
    assert sizes == [8 * 2000 * 2000, 9 * 2000 * 2000]


def test_metadata_that_does_not_parse_says_nothing():
    for block in (b"", b"II", b"MM\0*\xff\xff\xff\xff", b"nothing of the kind", b"II*\0\x08\0\0\0\x05\0"):
        headers.check_exif(block)


def test_a_tiff_with_pointers_of_64_bits_is_refused():
    assert not refusal(b"II+\0\x08\0\0\0" + bytes(100)).too_large
