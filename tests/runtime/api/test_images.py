"""Images as pixels: every breach of their shape, and digests that tell shapes apart."""

import hashlib
import itertools

import pytest

from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.images import HashedImage, PixelFormat, RawImage, image_digest
from kestrel_runtime.api.requests import Caption, Query
from kestrel_runtime.engine.poison_requests import fingerprint_of

RGB8, GRAY8 = PixelFormat.RGB8, PixelFormat.GRAY8


def fields(image: RawImage) -> list[str]:
    return [violation.field for violation in image.violations()]


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_a_packed_image_is_well_formed(pixel_format: PixelFormat):
    image = RawImage.packed(bytes(6 * pixel_format.pixel_bytes), 3, 2, pixel_format)
    assert fields(image) == []
    assert len(image) == 6 * pixel_format.pixel_bytes


@pytest.mark.parametrize("num_bytes", [16 + 6, 16 + 16])
def test_the_padding_of_the_last_row_may_be_missing(num_bytes: int):
    assert fields(RawImage(bytes(num_bytes), 2, 2, RGB8, 16)) == []


@pytest.mark.parametrize(
    ("image", "wrong"),
    [
        (RawImage(b"", 0, 0, RGB8, 0), ["width_px", "height_px"]),
        (RawImage(b"", -1, 2, RGB8, -3), ["width_px"]),
        (RawImage(b"", 2, 0, RGB8, 5), ["height_px", "row_stride_bytes"]),
        (RawImage(bytes(12), 2, 2, RGB8, -6), ["row_stride_bytes"]),
        (RawImage(bytes(11), 2, 2, RGB8, 6), ["pixels"]),
        (RawImage(bytes(13), 2, 2, RGB8, 6), ["pixels"]),
        (RawImage(bytes(13), 2, 2, RGB8, 8), ["pixels"]),
        (RawImage(bytes(17), 2, 2, RGB8, 8), ["pixels"]),
        (RawImage(bytes(12), 2**31 - 1, 2**31 - 1, RGB8, 2**33), ["pixels"]),
    ],
)
def test_every_breach_is_told(image: RawImage, wrong: list[str]):
    assert fields(image) == [f"image.raw.{name}" for name in wrong]


def test_a_request_tells_them_with_its_own():
    with pytest.raises(InvalidRequest) as caught:
        Query("", RawImage(b"", 0, 1, RGB8, 0))
    assert [violation.field for violation in caught.value.violations] == ["question", "image.raw.width_px"]
    assert Caption(RawImage.packed(bytes(3), 1, 1, RGB8)).image


def test_equal_bytes_of_another_shape_or_format_have_another_digest():
    pixels = bytes(range(24))
    images = [
        RawImage.packed(pixels, 4, 2, RGB8),
        RawImage.packed(pixels, 2, 4, RGB8),
        RawImage.packed(pixels, 8, 1, RGB8),
        RawImage.packed(pixels, 4, 2, PixelFormat.BGR8),
        RawImage.packed(pixels, 3, 2, PixelFormat.RGBA8),
        RawImage.packed(pixels, 6, 4, GRAY8),
        RawImage.packed(pixels, 24, 1, GRAY8),
        RawImage(pixels, 5, 4, GRAY8, 6),
        RawImage(pixels[:-1] + b"x", 4, 2, RGB8, 12),
    ]
    for one, other in itertools.combinations(images, 2):
        assert one.digest() != other.digest()
    assert images[0].digest() == RawImage.packed(bytes(range(24)), 4, 2, RGB8).digest()
    assert len(images[0].digest()) == 32


DATA = b"an image"


def test_the_digest_is_that_which_came_with_the_image():
    assert image_digest(HashedImage(DATA, b"d" * 32)) == b"d" * 32


def test_an_image_and_its_bytes_are_the_same_request():
    hashed = HashedImage(DATA, hashlib.sha256(DATA).digest())
    assert hashed == DATA
    assert image_digest(hashed) == image_digest(DATA)
    assert fingerprint_of(Caption(hashed)) == fingerprint_of(Caption(DATA))
