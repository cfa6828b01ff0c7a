"""What callers may pass as an image."""

import base64
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from kestrel_client import InvalidRequest, RawImage, draw
from kestrel_client.images import image_bytes, is_address, is_on_server, put_reference
from kestrel_client.v1 import media_pb2


def test_bytes_of_any_kind_go_as_they_are():
    for image in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert image_bytes(image) == b"abc"


def test_a_path_of_either_kind_is_read(tmp_path: Path):
    path = tmp_path / "kite.jpg"
    path.write_bytes(b"abc")
    assert image_bytes(path) == image_bytes(str(path)) == b"abc"


def test_a_missing_file_is_reported_as_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        image_bytes(tmp_path / "none.jpg")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_a_pil_image_goes_as_a_png_of_its_pixels(mode: str):
    image = Image.new("RGB", (3, 2), (0, 255, 0)).convert(mode)
    sent = Image.open(io.BytesIO(image_bytes(image)))
    assert (sent.format, sent.size) == ("PNG", (3, 2))
    assert sent.convert("RGB").getpixel((2, 1)) == image.convert("RGB").getpixel((2, 1))


RAMP = np.linspace(0, 1, 45).reshape(5, 9)
GREY = Image.fromarray(np.round(RAMP * 255).astype(np.uint8))
COLOURS = Image.merge("RGB", (GREY, GREY.rotate(180), GREY.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
CLEAR = Image.merge("RGBA", (*COLOURS.split(), GREY))


def numbers(mode: str, values: np.ndarray, kind: str) -> Image.Image:
    return Image.frombytes(mode, (9, 5), values.astype(kind).tobytes())


def over_white(image: Image.Image) -> np.ndarray:
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def with_clear_colour(image: Image.Image, colour: Any) -> Image.Image:
    image = image.copy()
    image.info["transparency"] = colour
    return image


FULL = RAMP * 65535
# Each mode of Pillow with an image, and what a person sees of it.
MODES = {
    "1": (GREY.convert("1"), GREY.convert("1")),
    "L": (GREY, GREY),
    "LA": (CLEAR.convert("LA"), CLEAR.convert("LA")),
    "La": (CLEAR.convert("LA").convert("La"), CLEAR.convert("LA")),
    "P": (COLOURS.quantize(8), COLOURS.quantize(8)),
    "P, a clear entry": (with_clear_colour(COLOURS.quantize(8), 3), with_clear_colour(COLOURS.quantize(8), 3)),
    "P, alpha in the palette": (CLEAR.quantize(16), CLEAR.quantize(16)),
    "PA": (CLEAR.convert("PA"), CLEAR.convert("PA")),
    "RGB": (COLOURS, COLOURS),
    "RGBA": (CLEAR, CLEAR),
    "RGBa": (CLEAR.convert("RGBa"), CLEAR),
    "RGBX": (COLOURS.convert("RGBX"), COLOURS),
    "CMYK": (COLOURS.convert("CMYK"), COLOURS),
    "YCbCr": (COLOURS.convert("YCbCr"), COLOURS),
    "LAB": (COLOURS.convert("LAB"), COLOURS.convert("LAB").convert("RGB")),
    "HSV": (COLOURS.convert("HSV"), COLOURS.convert("HSV").convert("RGB")),
    "I;16": (numbers("I;16", FULL, "<u2"), GREY),
    "I;16L": (numbers("I;16L", FULL, "<u2"), GREY),
    "I;16B": (numbers("I;16B", FULL, ">u2"), GREY),
    "I;16N": (numbers("I;16N", FULL, "=u2"), GREY),
    "I, 16 bits": (numbers("I", FULL, "=i4"), GREY),
    "I, 8 bits": (GREY.convert("I"), GREY),
    "F to 1": (numbers("F", RAMP, "=f4"), GREY),
    "F to 1, a little beyond": (numbers("F", 1.2 * RAMP - 0.1, "=f4"), Image.eval(GREY, lambda v: v * 1.2 - 25.5)),
    "F to 255": (GREY.convert("F"), GREY),
    "F to 65,535": (numbers("F", FULL, "=f4"), GREY),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_pil_image_of_every_mode_is_sent_and_drawn_as_it_looks(mode: str):
    image, looks = MODES[mode]
    sent = Image.open(io.BytesIO(image_bytes(image)))
    seen = np.asarray(sent) >> 8 if sent.mode == "I;16" else over_white(sent)
    wanted = over_white(looks)
    np.testing.assert_allclose(seen, wanted[..., 0] if seen.ndim == 2 else wanted, atol=3)
    np.testing.assert_allclose(np.asarray(draw(image)), wanted, atol=3)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (numbers("I", FULL - 1, "=i4"), "mode I must have values of 0 to 65535, not -1 to 65534"),
        (numbers("I", FULL * 2, "=i4"), "mode I must have values of 0 to 65535, not 0 to 131070"),
        (numbers("F", FULL * 2, "=f4"), "mode F must have values of 0 to 65535"),
        (numbers("F", RAMP - 0.5, "=f4"), "mode F must have values of 0 to 65535, not -0.5 to 0.5"),
        (numbers("F", np.where(RAMP > 0.5, np.nan, RAMP), "=f4"), "mode F must have finite values"),
    ],
)
def test_numbers_that_are_no_brightness_are_refused(image: Image.Image, why: str):
    for convert in (image_bytes, draw):
        with pytest.raises(InvalidRequest, match=why):
            convert(image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pil_image_is_turned_upright_as_its_file_is(orientation: int):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = Image.new("RGB", (3, 2))
    pixels.putpixel((0, 0), (255, 0, 0))
    pixels.save(file, format="PNG", exif=exif)
    sent = Image.open(io.BytesIO(image_bytes(Image.open(file))))
    upright = ImageOps.exif_transpose(Image.open(file))
    assert (sent.size, sent.tobytes()) == (upright.size, upright.tobytes())
    assert 0x0112 not in sent.getexif()


def avif(picture: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "AVIF", **options)
    return file.getvalue()


def test_an_avif_file_goes_as_a_png_that_is_upright():
    turned = Image.Exif()
    turned[274] = 6
    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    for options, size in (({}, (40, 30)), ({"exif": turned}, (30, 40))):
        sent = Image.open(io.BytesIO(image_bytes(avif(picture, **options))))
        assert (sent.format, sent.size) == ("PNG", size)
        assert sent.getexif().get(274) is None


@pytest.mark.parametrize(("length", "why"), [(40, "no AVIF file that Pillow reads"), (-20, "file is damaged")])
def test_a_damaged_avif_file_is_refused(length: int, why: str):
    data = avif(Image.new("RGB", (40, 30), "red"))
    with pytest.raises(InvalidRequest, match=why):
        image_bytes(data[:length])


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_a_heic_file_goes_as_a_png_where_a_library_reads_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(InvalidRequest, match="`pip install pillow-heif` converts HEIC"):
        image_bytes(HEIC)

    class Found:
        def to_pillow(self) -> Image.Image:
            return Image.new("RGB", (4, 3), "red")

    library = SimpleNamespace(read_heif=lambda file: Found() if file.read() == HEIC else None)
    monkeypatch.setitem(sys.modules, "pillow_heif", library)
    assert Image.open(io.BytesIO(image_bytes(HEIC))).size == (4, 3)
    library.read_heif = lambda file: 1 // 0
    with pytest.raises(InvalidRequest, match="is damaged"):
        image_bytes(HEIC)


def test_a_file_object_is_sent_from_its_position(tmp_path: Path):
    assert image_bytes(io.BytesIO(b"abc")) == b"abc"
    path = tmp_path / "kite.jpg"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        file.seek(1)
        assert image_bytes(file) == b"bc"


@pytest.mark.parametrize(
    ("file", "why"), [(io.BytesIO(b""), "at its end"), (io.StringIO("abc"), "open for reading bytes")]
)
def test_a_file_object_without_bytes_is_refused(file: Any, why: str):
    with pytest.raises(InvalidRequest, match=why):
        image_bytes(file)


def test_a_file_that_is_open_for_writing_is_refused(tmp_path: Path):
    with (tmp_path / "new").open("wb") as file, pytest.raises(InvalidRequest, match="open for reading bytes"):
        image_bytes(file)


@pytest.mark.parametrize(
    ("shape", "pixel_format"),
    [
        ((2, 3), media_pb2.PIXEL_FORMAT_GRAY8),
        ((2, 3, 1), media_pb2.PIXEL_FORMAT_GRAY8),
        ((2, 3, 3), media_pb2.PIXEL_FORMAT_RGB8),
        ((2, 3, 4), media_pb2.PIXEL_FORMAT_RGBA8),
    ],
)
def test_an_array_goes_as_its_pixels(shape: tuple[int, ...], pixel_format: int):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    message = media_pb2.Image()
    assert put_reference(message, array)
    raw = message.raw
    assert (raw.width_px, raw.height_px, raw.format) == (3, 2, pixel_format)
    assert raw.pixels == bytes(range(array.size))


def test_the_pixels_of_a_view_go_in_the_order_of_the_view():
    array = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    message = media_pb2.Image()
    assert put_reference(message, array[::-1, :, ::-1])
    assert message.raw.pixels == array[::-1, :, ::-1].copy().tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3, 3)),
        np.zeros((2, 3, 3), np.float32),
        np.zeros((3, 2, 5), np.uint8),
        np.zeros(3, np.uint8),
        np.zeros((1, 2, 3, 3), np.uint8),
    ],
)
def test_an_array_that_is_no_image_is_refused_by_its_shape_and_type(array: Any):
    with pytest.raises(InvalidRequest, match=f"not {array.dtype} of {'x'.join(map(str, array.shape))}"):
        put_reference(media_pb2.Image(), array)


@pytest.mark.parametrize("layout", ["gray8", "rgb8", "bgr8", "rgba8"])
def test_pixels_become_a_png_where_a_file_is_needed(layout: Any):
    channels = {"gray8": 1, "rgba8": 4}.get(layout, 3)
    rows = [bytes(range(10 * y, 10 * y + 3 * channels)) for y in range(2)]
    padded = RawImage(b"".join(row + b"pad" for row in rows), 3, 2, layout, 3 * channels + 3)
    dense = RawImage(b"".join(rows), 3, 2, layout)
    for image in (padded, dense):
        read = Image.open(io.BytesIO(image_bytes(image)))
        wanted = np.frombuffer(dense.pixels, np.uint8).reshape(2, 3, channels)
        assert read.size == (3, 2)
        assert np.array_equal(
            np.asarray(read).reshape(2, 3, channels), wanted[..., ::-1] if layout == "bgr8" else wanted
        )


@pytest.mark.parametrize(
    "image",
    [
        RawImage(b"ab", 3, 2),
        RawImage(b"abc", 1, 1, "rgb8", 2),
        RawImage(b"abc", 1, 1, "rgb9"),  # pyrefly: ignore[bad-argument-type]
        RawImage("abc", 1, 1),  # pyrefly: ignore[bad-argument-type]
    ],
)
def test_pixels_that_are_none_are_refused(image: RawImage):
    with pytest.raises(InvalidRequest):
        image_bytes(image)


def test_wrong_pixels_are_refused_before_they_are_sent():
    wrong: list[tuple[Any, ...]] = [("abc", 1, 1), (b"abc", "1", 1), (b"abc", 1, 1, "rgb9")]
    for pixels in wrong:
        with pytest.raises(InvalidRequest):
            put_reference(media_pb2.Image(), RawImage(*pixels))


def test_anything_else_is_refused_by_name():
    wrong: Any = 7
    with pytest.raises(InvalidRequest, match="not int"):
        image_bytes(wrong)


def test_a_text_that_is_no_path_is_refused_and_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    png = io.BytesIO()
    Image.new("RGB", (64, 64)).save(png, format="PNG")
    text = base64.b64encode(png.getvalue()).decode()
    for wrong in (text, text * 100, text[:60], "a\0b"):
        with pytest.raises(InvalidRequest, match=f"a text of {len(wrong)} characters") as caught:
            image_bytes(wrong)
        assert len(str(caught.value)) < 200
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,YWJj",
        "DATA:image/png;BASE64,YW Jj\n",
        "data:;base64,YWJj",
        "data:,abc",
        "data:text/plain,a%62c",
    ],
)
def test_the_file_in_a_data_url_is_sent_as_bytes(url: str):
    assert not put_reference(media_pb2.Image(), url)
    assert image_bytes(url) == b"abc"
    assert not is_on_server(url)


def test_padding_may_be_left_out_of_a_data_url():
    assert image_bytes("data:;base64,YWI") == image_bytes("data:;base64,YWI=") == b"ab"


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:;base64,YW!j", "data:;base64,YWJjZ"])
def test_a_data_url_that_is_none_is_refused(url: str):
    with pytest.raises(InvalidRequest, match="data: URL"):
        image_bytes(url)


@pytest.mark.parametrize("image", ["https://example.com/a.png", "sha256:0"])
def test_what_is_on_a_server_is_no_file(image: str):
    with pytest.raises(InvalidRequest, match="no file"):
        image_bytes(image)


@pytest.mark.parametrize("address", ["https://example.com/a.png", "HTTP://example.com/a.png"])
def test_an_address_goes_as_one_for_the_server_to_fetch(address: str):
    message = media_pb2.Image()
    assert put_reference(message, address)
    assert (message.WhichOneof("source"), message.uri) == ("uri", address)


@pytest.mark.parametrize("image", [b"https://example.com/a.png", Path("https://example.com/a.png"), "https.png"])
def test_nothing_but_a_text_with_a_scheme_is_an_address(image: bytes | Path | str):
    assert not is_address(image)
