"""Converts PIL images of every mode to one that PNG has, and to the pixels that the model sees. Needs Pillow."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, cast

from kestrel_client.errors import invalid_argument

if TYPE_CHECKING:
    from PIL.Image import Image

_PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})
_WITH_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_ORIENTATION = 0x0112
_XMP = ("xmp", "XML:com.adobe.xmp")
_BITS, _PHOTOMETRIC, _MAX_VALUE = 258, 262, 281
_WHITE_IS_ZERO = 0
_PNG_BITS = 24
"""The position of the bits per channel in a PNG file."""
_MAX_16_BITS = 2**16 - 1


def png_of(image: Image) -> bytes:
    """Returns the image as a PNG file, upright.

    Raises `InvalidRequest` for numbers that have no meaning as brightness.
    """
    file = io.BytesIO()
    # Without EXIF data, so that the server does not turn the image again.
    _in_png_mode(upright(_as_meant(image))).save(file, format="PNG", compress_level=1, exif=b"")
    return file.getvalue()


def open_file(data: bytes) -> Image:
    """Opens an image file. Raises `OSError` for what Pillow does not decode."""
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.info.pop("xmp", None)  # Pillow turns a TIFF by it while it loads
    image.load()
    if image.format == "PNG" and "transparency" in image.info:
        # Pillow scales pixels to 8 bits, and not the transparent colour.
        bits, colour = data[_PNG_BITS], image.info["transparency"]
        if image.mode == "L" and bits < 8:
            image.info["transparency"] = colour * (255 // (2**bits - 1))
        elif image.mode == "RGB" and bits == 16:
            image.info["transparency"] = tuple(value >> 8 for value in colour)
    return image


def shown(image: Image) -> Image:
    """Returns a copy in 8-bit RGB as the model sees it: upright, transparency over white."""
    from PIL import Image

    image = _in_png_mode(upright(_as_meant(image)))
    if image.mode == "I;16":
        return _high_bytes(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _as_meant(image: Image) -> Image:
    """Returns an image with the meaning that its file gives it. Pillow leaves some numbers as they are stored."""
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith("I;16") and tags:
        image.load()
        bits = tags.get(_BITS, (16,))[0]
        declared = max(tags.get(_MAX_VALUE, (0,)))
        _, highest = _extrema(image)
        is_part = 0 < declared < 2**bits and not declared & (declared + 1) and highest <= declared
        scale = _MAX_16_BITS / (declared if is_part else 2**bits - 1)
        is_inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        if scale == 1 and not is_inverted:
            return image
        factor, offset = (-scale, _MAX_16_BITS) if is_inverted else (scale, 0)
        return image.convert("I").point(lambda value: value * factor + offset).convert("I;16")
    if image.format == "BMP" and image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")
    return image


def _high_bytes(image: Image) -> Image:
    from PIL import ImageChops

    numbers = image.convert("I")
    result = numbers.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        # Conversion to 8 bits clips at 0: both differences are 0 where the number is the transparent one.
        above = numbers.point(lambda value: value * 1 - clear).convert("L")
        below = numbers.point(lambda value: value * -1 + clear).convert("L")
        result.paste("white", mask=ImageChops.add(above, below).point(lambda value: 255 * (value == 0)))
    return result


def upright(image: Image) -> Image:
    """Returns a copy that is turned by its EXIF orientation, as the server turns files.

    An orientation in XMP alone, which Pillow would apply, is not applied.
    """
    from PIL import Image, ImageOps

    if not any(image.info.get(key) for key in _XMP):
        return ImageOps.exif_transpose(image)
    image.load()
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    plain = image.copy()
    for key in _XMP:
        plain.info.pop(key, None)
    return ImageOps.exif_transpose(plain) if _ORIENTATION in exif else plain


def _in_png_mode(image: Image) -> Image:
    if image.mode in _PNG_MODES:
        return image
    if image.mode.startswith("I;16"):
        return image.convert("I").convert("I;16")
    if image.mode in ("I", "F"):
        return _of_numbers(image)
    try:
        return image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
    except (OSError, ValueError):
        raise invalid_argument("image", f"a PIL image of mode {image.mode} has no meaning as RGB") from None


def _of_numbers(image: Image) -> Image:
    """Returns a grey image of integers or floats: of 8 bits if the largest is at most 255, else of 16."""
    low, high = _extrema(image)
    if image.mode == "I":
        if low < 0 or high > _MAX_16_BITS:
            raise _out_of_range(image)
        return image.convert("L" if high <= 255 else "I;16")
    if not math.isfinite(sum(memoryview(image.tobytes()).cast("f"))):
        raise invalid_argument("image", "a PIL image of mode F must have finite values")
    # Filters that sharpen edges leave values a little beyond the range of the picture.
    full = next((full for full in (1, 255, _MAX_16_BITS) if high <= 1.25 * full), None)
    if full is None or low < -0.25 * full:
        raise _out_of_range(image)
    if full == _MAX_16_BITS:
        return image.point(lambda value: value * 1 + 0.5).convert("I").convert("I;16")
    scale = 255 / full
    return image.point(lambda value: value * scale + 0.5).convert("L")


def _extrema(image: Image) -> tuple[float, float]:
    """Returns the smallest and the largest number of an image with one channel."""
    return cast("tuple[float, float]", image.getextrema())


def _out_of_range(image: Image) -> Exception:
    low, high = _extrema(image)
    return invalid_argument(
        "image",
        f"a PIL image of mode {image.mode} must have values of 0 to {_MAX_16_BITS}, not {low:g} to {high:g}; "
        "scale them",
    )
