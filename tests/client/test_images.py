"""What callers may pass as an image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel_client.images import image_bytes, is_address, put_image
from kestrel_client.v1 import media_pb2


def test_bytes_of_any_kind_go_as_they_are() -> None:
    for image in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert image_bytes(image) == b"abc"


def test_a_path_of_either_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kite.jpg"
    path.write_bytes(b"abc")
    assert image_bytes(path) == image_bytes(str(path)) == b"abc"


def test_a_missing_file_is_reported_as_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        image_bytes(tmp_path / "none.jpg")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_a_pil_image_goes_as_a_png_of_its_pixels(mode: str) -> None:
    image = Image.new("RGB", (3, 2), (0, 255, 0)).convert(mode)
    sent = Image.open(io.BytesIO(image_bytes(image)))
    assert (sent.format, sent.size) == ("PNG", (3, 2))
    assert sent.convert("RGB").getpixel((2, 1)) == image.convert("RGB").getpixel((2, 1))


def test_a_pil_image_leaves_its_orientation_behind() -> None:
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (3, 2)).save(turned, format="JPEG", exif=exif)
    sent = Image.open(io.BytesIO(image_bytes(Image.open(turned))))
    assert sent.size == (3, 2)
    assert 0x0112 not in sent.getexif()


def test_anything_else_is_refused_by_name() -> None:
    wrong: Any = 7
    with pytest.raises(TypeError, match="not int"):
        image_bytes(wrong)


@pytest.mark.parametrize("address", ["https://example.com/a.png", "HTTP://example.com/a.png", "data:,abc"])
def test_an_address_goes_as_one_for_the_server_to_fetch(address: str) -> None:
    message = media_pb2.Image()
    put_image(message, address)
    assert (message.WhichOneof("source"), message.uri) == ("uri", address)


@pytest.mark.parametrize("image", [b"https://example.com/a.png", Path("https://example.com/a.png"), "https.png"])
def test_nothing_but_a_text_with_a_scheme_is_an_address(image: bytes | Path | str) -> None:
    assert not is_address(image)


def test_bytes_go_into_a_message_as_they_are() -> None:
    message = media_pb2.Image()
    put_image(message, b"abc")
    assert (message.WhichOneof("source"), message.data) == ("data", b"abc")
