"""What decoding an image may take: memory, time, and attention."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.imaging import decoding
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.imaging.formats import read_header
from tests import hostile_images
from tests.runtime.imaging.test_decoding import MAX_PIXELS, WHITE, decode, encode, noise, orientation, png_header


def test_images_of_any_size_are_converted_alike(monkeypatch):
    rgba = np.random.default_rng(0).integers(0, 256, (90, 70, 4), dtype=np.uint8)
    grey = np.random.default_rng(1).integers(0, 2**16, (90, 70), dtype=np.uint16)
    palette = noise(70, 90).quantize(16)
    files = [
        encode(Image.fromarray(rgba), "PNG"),
        encode(Image.fromarray(rgba), "WEBP", lossless=True, exact=True),
        encode(Image.fromarray(grey), "PNG", exif=orientation(6)),
        encode(palette, "PNG", transparency=3),
        encode(palette, "GIF", transparency=3),
        encode(noise(70, 90), "PNG", transparency=(1, 2, 3)),
    ]
    at_once = [np.asarray(decode(file)) for file in files]
    monkeypatch.setattr(decoding, "_STRIP_PIXELS", 1000)
    for file, wanted in zip(files, at_once, strict=True):
        np.testing.assert_array_equal(np.asarray(decode(file)), wanted)


def test_no_copy_of_a_large_image_has_transparency(monkeypatch):
    sizes, alpha_composite = [], Image.Image.alpha_composite

    def record(self, *arguments):
        sizes.append(self.width * self.height)
        return alpha_composite(self, *arguments)

    monkeypatch.setattr(Image.Image, "alpha_composite", record)
    decoded = decode(hostile_images.png(2000, 1000))
    assert decoded.getcolors() == [(2_000_000, WHITE)]
    assert sum(sizes) == 2_000_000
    assert max(sizes) <= 2**18


def test_a_decoder_that_pillow_lets_see_another_size_is_not_used(monkeypatch):
    monkeypatch.setattr(
        decoding, "read_header", lambda data, **_: replace(read_header(data, max_image_pixels=MAX_PIXELS), width=9)
    )
    with pytest.raises(ImageError):
        decode(encode(noise(10, 10), "PNG"))


class Unwanted(BaseException):
    """The caller has left."""


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "BMP"])
def test_decoding_of_a_cancelled_request_stops_within_the_file(image_format):
    data = encode(noise(900, 600), image_format)
    num_reads, most_reads = 0, 10**6

    def check():
        nonlocal num_reads
        num_reads += 1
        if num_reads == most_reads:
            raise Unwanted

    decode_image(data, max_image_pixels=MAX_PIXELS, check_wanted=check)
    most_reads, num_reads = num_reads - 4, 0
    with pytest.raises(Unwanted):
        decode_image(data, max_image_pixels=MAX_PIXELS, check_wanted=check)


def test_a_jpeg_is_read_scan_by_scan():
    reads = []

    def decode_scans(num_scans):
        reads.clear()
        file = hostile_images.progressive_jpeg(64, 64, num_scans)
        decode_image(file, max_image_pixels=MAX_PIXELS, check_wanted=lambda: reads.append(num_scans))
        return len(reads)

    assert decode_scans(50) - decode_scans(10) == 40


@pytest.mark.parametrize("file", [hostile_images.progressive_jpeg(100, 100, 65), hostile_images.png(8, 8)[:40]])
def test_nothing_is_decoded_of_a_file_beyond_the_limits(monkeypatch, file):
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(ImageError):
        decode(file)


def test_importing_this_changes_no_filter_of_warnings():
    program = (
        "import warnings, numpy, torch, PIL.Image\n"
        "before = list(warnings.filters)\n"
        "import kestrel_runtime.imaging.decoding\n"
        "assert warnings.filters == before, warnings.filters"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_file_in_a_format_that_the_client_converts_is_refused_with_that_hint():
    with pytest.raises(ImageError, match="AVIF, HEIC and videos are not decoded; convert the image"):
        decode(b"\0\0\0\x18ftypavif\0\0\0\0")


def test_an_image_that_pillow_would_warn_of_is_refused_without_a_warning():
    with pytest.raises(ImageError) as caught:
        decode_image(png_header(10_000, 9_000), max_image_pixels=10**9)
    assert caught.value.violations[0].description == "must have at most 89478485 pixels"
