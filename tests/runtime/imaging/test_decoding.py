import io
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.images import DecodedPixels, PixelFormat, RawImage
from kestrel_runtime.imaging.decoding import decode_image, image_of, inspect_image, pixel_parts
from kestrel_runtime.imaging.formats import MAX_SIDE_PX

MAX_PIXELS = 64_000_000
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def decode(data: bytes) -> Image.Image:
    return decode_image(data, max_image_pixels=MAX_PIXELS)


def encode(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def quarters() -> Image.Image:
    """A picture that is different in every orientation: red and green above, blue and white below."""
    image = Image.new("RGB", (48, 32), WHITE)
    image.paste(RED, (0, 0, 24, 16))
    image.paste(GREEN, (24, 0, 48, 16))
    image.paste(BLUE, (0, 16, 24, 32))
    return image


def corners(image: Image.Image) -> list[object]:
    right, bottom = image.width - 1, image.height - 1
    return [image.getpixel(at) for at in ((0, 0), (right, 0), (0, bottom), (right, bottom))]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


# Decoding


@pytest.mark.parametrize("size", [(1, 1), (37, 41), (801, 557), (4099, 4001)], ids=str)
def test_pixels_of_an_image_make_the_same_image_also_in_another_process(size):
    image = noise(*size)
    pixels = b"".join(pixel_parts(image))
    assert len(pixels) == 4 * image.width * image.height
    there = DecodedPixels(memoryview(pixels), *size)
    assert image_of(there).tobytes() == image.tobytes()


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG"])
def test_every_format_decodes_to_the_same_picture(image_format):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(image_format, {})
    image = decode(encode(quarters(), image_format, **options))
    assert image.mode == "RGB"
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(quarters()))
    assert difference.max() <= (3 if image_format == "JPEG" else 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("value", [0, 255])
def test_black_and_white_stay_so_in_every_mode(mode, value):
    image = Image.new("RGB", (5, 4), (value,) * 3).convert(mode)
    decoded = decode(encode(image, "TIFF"))
    assert decoded.getcolors() == [(20, (value,) * 3)]


def test_cmyk_jpeg_keeps_its_colours():
    decoded = decode(encode(quarters().convert("CMYK"), "JPEG", quality=100, subsampling=0))
    assert np.abs(np.asarray(decoded).astype(int) - np.asarray(quarters())).max() <= 3


def test_palette_image_keeps_its_colours():
    decoded = decode(encode(quarters().quantize(8), "PNG"))
    assert corners(decoded) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_keep_the_high_byte(image_format):
    values = np.array([[0, 255, 256, 0x7FFF], [0x8000, 0xABCD, 0xFF00, 0xFFFF]], dtype=np.uint16)
    decoded = decode(encode(Image.fromarray(values), image_format))
    grey = np.asarray(decoded)
    np.testing.assert_array_equal(grey[..., 0], values >> 8)
    assert decoded.mode == "RGB"
    assert (grey[..., :1] == grey).all()


def test_sixteen_bit_grey_is_turned_upright_too():
    values = np.array([[0x1000, 0x2000, 0x3000]], dtype=np.uint16)
    decoded = decode(encode(Image.fromarray(values), "PNG", exif=orientation(6)))
    assert decoded.size == (1, 3)
    assert [decoded.getpixel((0, y)) for y in range(3)] == [(0x10,) * 3, (0x20,) * 3, (0x30,) * 3]


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "TIFF"])
def test_transparency_lies_over_white(image_format):
    pixels = np.array([[[255, 0, 0, 0], [255, 0, 0, 255], [0, 0, 0, 128]]], dtype=np.uint8)
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}
    decoded = np.asarray(decode(encode(Image.fromarray(pixels), image_format, **options)))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[0, 1].tolist() == [255, 0, 0]
    assert np.abs(decoded[0, 2].astype(int) - 127).max() <= 1


def test_transparent_palette_entry_lies_over_white():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 0, 0])
    for image_format in ("PNG", "GIF"):
        assert decode(encode(image, image_format, transparency=1)).getcolors() == [(16, WHITE)]
        assert decode(encode(image, image_format, transparency=0)).getcolors() == [(16, (0, 0, 0))]


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animation_shows_its_first_frame(image_format):
    frames = [Image.new("RGB", (20, 10), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3  # pyrefly: ignore[missing-attribute]
    assert decode(data).getcolors() == [(200, RED)]


def orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif.tobytes()


@pytest.mark.parametrize(
    ("value", "turned"),
    [
        (1, None),
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_270),
        (0, None),
        (99, None),
    ],
)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_undone(image_format, value, turned):
    upright = quarters()
    stored = upright if turned is None else upright.transpose(turned)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(image_format, {})
    decoded = decode(encode(stored, image_format, exif=orientation(value), **options))
    assert decoded.size == upright.size
    assert np.abs(np.asarray(decoded).astype(int) - np.asarray(upright)).max() <= 3


def test_exif_that_does_not_parse_is_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoded = decode(encode(quarters(), "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"))
    assert decoded.size == quarters().size


# Refusals


def png_header(width: int, height: int) -> bytes:
    """The first chunk of a PNG that declares this size and holds nothing."""
    data = bytearray(encode(Image.new("L", (1, 1)), "PNG"))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (10_000, 9_000), (8_001, 8_000)])
def test_declared_size_over_the_limit_is_refused_before_decoding(width, height):
    with pytest.raises(ImageError) as caught:
        decode(png_header(width, height))
    assert caught.value.too_large
    assert caught.value.violations[0].description == "must have at most 64000000 pixels"


@pytest.mark.parametrize("size", [(MAX_SIDE_PX + 1, 1), (1, MAX_SIDE_PX + 1)])
def test_a_line_of_pixels_is_refused_however_few_they_are(size):
    with pytest.raises(ImageError) as caught:
        decode(encode(Image.new("RGB", size), "PNG"))
    assert caught.value.too_large
    assert caught.value.violations[0].description == "must be at most 65536 pixels wide and high"


def test_a_side_may_be_as_long_as_the_limit():
    assert decode(encode(Image.new("L", (MAX_SIDE_PX, 2)), "PNG")).size == (MAX_SIDE_PX, 2)


def test_an_image_that_is_rgb_already_is_not_copied(monkeypatch):
    data = encode(noise(20, 10), "PNG")
    monkeypatch.setattr(Image.Image, "copy", None)
    assert decode(data).mode == "RGB"


def test_limit_is_what_the_caller_says():
    data = encode(Image.new("RGB", (20, 10)), "PNG")
    assert decode_image(data, max_image_pixels=200).size == (20, 10)
    with pytest.raises(ImageError) as caught:
        decode_image(data, max_image_pixels=199)
    assert caught.value.too_large


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"not an image",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"P6 1 1 255 abc",  # PPM: Pillow reads it, we do not offer it
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF\x00\x00\x00\x00WEBPVP8 ",
        png_header(0, 5),
    ],
)
def test_bytes_that_are_no_image_are_refused(data):
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert not caught.value.too_large


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_file_is_refused(image_format):
    data = encode(noise(100, 80), image_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (len(data) // 4, len(data) // 2, len(data) * 3 // 4):
            with pytest.raises(ImageError) as caught:
                decode(data[:length])
            assert not caught.value.too_large


def test_refusal_names_the_field_and_quotes_no_library():
    with pytest.raises(ImageError) as caught:
        decode(encode(noise(100, 80), "PNG")[:5000])
    (violation,) = caught.value.violations
    assert violation.field == "image"
    assert violation.description == (
        "cannot be decoded; must be a complete file in one of JPEG, PNG, WEBP, GIF, BMP, TIFF"
    )


def test_channels_of_32_bits_are_refused():
    with pytest.raises(ImageError, match="32 bits"):
        decode(encode(Image.new("F", (4, 4), 0.5), "TIFF"))


@settings(max_examples=150)
@given(
    image_format=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_file_decodes_or_is_refused_and_nothing_else(image_format, edits):
    data = bytearray(encode(quarters(), image_format))
    for position, value in edits:
        data[position % len(data)] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = decode_image(bytes(data), max_image_pixels=1_000_000)
        except ImageError:
            return
    assert image.mode == "RGB"


def test_many_threads_decode_at_once():
    data = [encode(noise(200 + index, 150), "PNG") for index in range(4)]
    images = [np.asarray(decode(item)) for item in data]
    with ThreadPoolExecutor(8) as pool:
        for index, found in enumerate(pool.map(decode, data * 8)):
            np.testing.assert_array_equal(np.asarray(found), images[index % 4])


# Raw images


def raw(
    image: Image.Image, pixel_format: PixelFormat, *, padding: int = 0, is_last_padded: bool = True
) -> RawImage:
    """The pixels of a picture, with so many bytes of noise after each row."""
    mode = {"BGR8": "RGB", "GRAY8": "L"}.get(pixel_format.name, pixel_format.name.removesuffix("8"))
    pixels = np.asarray(image.convert(mode)).reshape(image.height, -1)
    if pixel_format is PixelFormat.BGR8:
        pixels = pixels.reshape(image.height, image.width, 3)[:, :, ::-1].reshape(image.height, -1)
    rows = np.pad(pixels, ((0, 0), (0, padding)), constant_values=77)
    data = rows.tobytes()
    return RawImage(
        data if is_last_padded else data[: len(data) - padding], *image.size, pixel_format, rows.shape[1]
    )


@pytest.mark.parametrize("is_last_padded", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 13])
@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_raw_pixels_are_the_image_that_a_png_of_them_is(
    pixel_format: PixelFormat, padding: int, is_last_padded: bool
):
    picture = noise(37, 21)
    if pixel_format is PixelFormat.RGBA8:
        picture.putalpha(noise(37, 21).convert("L"))
    image = raw(picture, pixel_format, padding=padding, is_last_padded=is_last_padded)
    assert list(image.violations()) == []
    mode = {"RGBA8": "RGBA", "GRAY8": "L"}.get(pixel_format.name, "RGB")
    expected = decode(encode(picture.convert(mode), "PNG"))
    decoded = decode_image(image, max_image_pixels=MAX_PIXELS)
    assert (decoded.mode, decoded.size) == ("RGB", (37, 21))
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


def test_raw_pixels_are_bound_by_the_same_limits():
    with pytest.raises(ImageError) as caught:
        decode_image(RawImage.packed(bytes(300), 10, 10, PixelFormat.RGB8), max_image_pixels=99)
    assert caught.value.too_large
    with pytest.raises(ImageError) as caught:
        inspect_image(
            RawImage.packed(bytes(MAX_SIDE_PX + 1), MAX_SIDE_PX + 1, 1, PixelFormat.GRAY8),
            max_image_pixels=MAX_PIXELS,
        )
    assert caught.value.too_large
    header = inspect_image(RawImage.packed(bytes(6), 2, 3, PixelFormat.GRAY8), max_image_pixels=MAX_PIXELS)
    assert (header.width, header.height, header.is_cost_known) == (2, 3, False)


def test_the_padding_of_rows_takes_no_memory():
    image = RawImage(bytes(300), 100, 1, PixelFormat.RGB8, 2**28)
    assert list(image.violations()) == []
    tracemalloc.start()
    try:
        assert decode_image(image, max_image_pixels=MAX_PIXELS).size == (100, 1)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_raw_pixels_of_a_cancelled_request_are_not_decoded():
    class Unwanted(BaseException):
        pass

    def refuse() -> None:
        raise Unwanted

    with pytest.raises(Unwanted):
        decode_image(
            RawImage.packed(bytes(3), 1, 1, PixelFormat.RGB8), max_image_pixels=MAX_PIXELS, check_wanted=refuse
        )
