"""Decodes image files and raw pixels to 8-bit RGB, within limits on size and on the time that damaged files take.

The functions keep no state and may run in any number of threads.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from PIL import ExifTags, Image

from kestrel_runtime.api.errors import ImageError, KestrelError
from kestrel_runtime.api.images import Image as RequestImage
from kestrel_runtime.api.images import RawImage, RemoteImage
from kestrel_runtime.imaging.formats import check_size, check_structure, read_header
from kestrel_runtime.imaging.header import ImageHeader, simple_header, undecodable

MAX_IMAGE_PIXELS: int = Image.MAX_IMAGE_PIXELS or 2**31
"""Pillow only warns of larger images, and applications may hide warnings. So they are refused first."""

# Conversions that need copies of the image work on this many pixels at a time.
_STRIP_PIXELS = 2**18

# How to undo each EXIF orientation. 1 and anything undefined mean upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def inspect_image(data: RequestImage, *, max_image_pixels: int) -> ImageHeader:
    """Reads the header of an image, in a bounded time that does not depend on its length. Raises `ImageError`."""
    most = min(max_image_pixels, MAX_IMAGE_PIXELS)
    if not isinstance(data, RawImage | RemoteImage):
        return read_header(data, max_image_pixels=most)
    header = simple_header("RAW", data.width_px, data.height_px)
    check_size(header, max_image_pixels=most)
    return header


def decode_image(
    data: bytes | RawImage, *, max_image_pixels: int, check_wanted: Callable[[], None] = lambda: None
) -> Image.Image:
    """Decode an image to 8-bit RGB: transparency over white, the first frame of a file, upright.

    Size and structure are checked before any pixel is decoded. `check_wanted` is called between pieces of the file.
    It stops the decoding by raising a `KestrelError`, or a `BaseException` that is no `Exception`.
    Raises `ImageError`.
    """
    header = inspect_image(data, max_image_pixels=max_image_pixels)
    if isinstance(data, RawImage):
        check_wanted()
        return _to_rgb(_loaded(data))
    try:
        file = _Pieces(data, check_structure(data, header), check_wanted)
        image, turn = _load(file, header)
        return image if turn is None else image.transpose(turn)
    except KestrelError:
        raise
    except Exception as error:  # hostile bytes make the decoders raise almost anything
        raise undecodable() from error


class _Pieces(io.BytesIO):
    """An encoded file that decoders read in pieces, none of which reaches past the next position in `ends`."""

    def __init__(self, data: bytes, ends: Sequence[int], check_wanted: Callable[[], None]) -> None:
        super().__init__(data)
        self._ends = ends
        self._check_wanted = check_wanted

    def read(self, size: int | None = -1, /) -> bytes:
        self._check_wanted()
        if self._ends and size is not None and size > 0:
            position = self.tell()
            place = bisect_right(self._ends, position)
            if place < len(self._ends):
                size = min(size, self._ends[place] - position)
        return super().read(size)


def _loaded(raw: RawImage) -> Image.Image:
    """The pixels as an image, without the padding of rows."""
    layout, pixel_bytes = raw.format.value[1], raw.format.pixel_bytes
    mode = "RGB" if layout == "BGR" else layout
    pixels = raw.pixels
    if raw.row_stride_bytes != raw.width_px * pixel_bytes:
        # Pillow needs the padding of the last row, which may be missing, so it gets the rows without padding.
        shape, strides = (raw.height_px, raw.width_px, pixel_bytes), (raw.row_stride_bytes, pixel_bytes, 1)
        pixels = np.ndarray(shape, np.uint8, raw.pixels, strides=strides).tobytes()
    return Image.frombytes(mode, (raw.width_px, raw.height_px), pixels, "raw", layout, 0, 1)


def _load(file: io.BytesIO, header: ImageHeader) -> tuple[Image.Image, Image.Transpose | None]:
    """The image in RGB, and how to turn it upright. All other memory of the decoder is freed on return."""
    with Image.open(file, formats=(header.format,)) as image:
        # Pillow parses the header again. It must find the size for which memory has been reserved.
        if sorted(image.size) != sorted((header.width, header.height)):
            raise undecodable()
        if image.mode in ("I", "F"):
            raise ImageError("has 32 bits per channel; must have 8 or 16")
        image.load()
        turn = _turn(image)
        # Free the two canvases of a WebP decoder and the bytes of the frame that Pillow keeps.
        vars(image).pop("_decoder", None)
        image.fp = None
        return _to_rgb(image), turn


def _turn(image: Image.Image) -> Image.Transpose | None:
    # Read after loading: Pillow has then applied orientations that a format stores in a tag of its own.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are valid although the metadata is not
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _by_strips(image, _high_bytes)
    if image.has_transparency_data:
        return _by_strips(image, _over_white)
    # Converting RGB to RGB would copy it, which takes longer than decoding a JPEG.
    return image if image.mode == "RGB" else image.convert("RGB")


def _by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert to RGB in strips, without intermediate copies of a large image."""
    rows = max(1, _STRIP_PIXELS // image.width)
    if rows >= image.height:
        return convert(image)
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        result.paste(convert(image.crop((0, top, image.width, bottom))), (0, top))
    return result


def _high_bytes(image: Image.Image) -> Image.Image:
    # Pillow's conversion clips in some versions and shifts in others.
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", layer.size, "white")
    canvas.alpha_composite(layer)
    return canvas.convert("RGB")
