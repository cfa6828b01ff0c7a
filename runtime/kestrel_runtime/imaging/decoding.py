"""Decodes image files and raw pixels to 8-bit RGB, within limits on size and on the time that damaged files take.

The functions keep no state and may run in any number of threads.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import ExifTags, Image

from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.images import DecodedPixels, RawImage, RemoteImage
from kestrel_runtime.api.images import Image as RequestImage
from kestrel_runtime.imaging import bmp, tiff, tiff_samples
from kestrel_runtime.imaging.crops import pixels_in_place
from kestrel_runtime.imaging.formats import check_size, check_structure, first_frame_box, read_header
from kestrel_runtime.imaging.header import ImageHeader, simple_header, undecodable

MAX_IMAGE_PIXELS: int = Image.MAX_IMAGE_PIXELS or 2**31
"""Pillow only warns of larger images, and applications may hide warnings. So they are refused first."""

# Conversions that need copies of the image work on this many pixels at a time.
_STRIP_PIXELS = 2**18

_SMALL_BYTES, _MAX_SMALL = 4096, 64
"""The least size of a piece behind which a request may be cancelled, and the most smaller parts that make one."""

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
    data: bytes | RawImage,
    *,
    max_image_pixels: int,
    check_wanted: Callable[[], None] = lambda: None,
    header: ImageHeader | None = None,
) -> Image.Image:
    """Decodes an image to 8-bit RGB: transparency over white, the first frame of a file, upright.

    Size and structure are checked before any pixel is decoded. `check_wanted` is called between pieces of the file.
    It stops the decoding by raising a `KestrelError`, or a `BaseException` that is no `Exception`. `header`: what
    `inspect_image` has returned for the image, if it was called before. Raises `ImageError`.
    """
    header = header or inspect_image(data, max_image_pixels=max_image_pixels)
    if isinstance(data, RawImage):
        check_wanted()
        return _to_rgb(_loaded(data))
    try:
        ends = check_structure(data, header)

        def open_file(content: bytes) -> io.BytesIO:
            return _Pieces(content, ends if content is data else (), check_wanted)

        image, turn = _decode_file(data, header, open_file)
        return image if turn is None else image.transpose(turn)
    except KestrelError:
        raise
    except Exception as error:  # hostile bytes make the decoders raise almost anything
        raise undecodable() from error


def pixel_parts(image: Image.Image) -> Iterator[memoryview]:
    """Yields the pixels of an RGB image from top to bottom, in four bytes each, as `DecodedPixels` has them.

    They are copied only where Pillow keeps them in several blocks of memory, and then a part at a time.
    """
    try:
        whole = pixels_in_place(image).data
    except ValueError:
        num_rows = max(1, _STRIP_PIXELS // image.width)
        for top in range(0, image.height, num_rows):
            part = image.crop((0, top, image.width, min(top + num_rows, image.height)))
            yield memoryview(part.tobytes("raw", "RGBX"))
    else:
        yield whole


def image_of(decoded: DecodedPixels) -> Image.Image:
    """Returns the RGB image that has these pixels, as a copy."""
    return Image.frombytes("RGB", (decoded.width_px, decoded.height_px), decoded.pixels, "raw", "RGBX", 0, 1)


class _Pieces(io.BytesIO):
    """An encoded file that decoders read in pieces, none of which reaches past the next position in `ends`."""

    def __init__(self, data: bytes, ends: Sequence[int], check_wanted: Callable[[], None]) -> None:
        super().__init__(data)
        self._ends = ends
        self._check_wanted = check_wanted
        self._num_small = _MAX_SMALL - 1  # the first read asks

    def read(self, size: int | None = -1, /) -> bytes:
        # A header is read in dozens of parts of a few bytes.
        self._num_small += 1
        if size is None or not 0 <= size < _SMALL_BYTES or self._num_small == _MAX_SMALL:
            self._num_small = 0
            self._check_wanted()
        if self._ends and size is not None and size > 0:
            position = self.tell()
            place = bisect_right(self._ends, position)
            if place < len(self._ends):
                size = min(size, self._ends[place] - position)
        return super().read(size)


def _loaded(raw: RawImage) -> Image.Image:
    """Returns the pixels as an image, without the padding of rows."""
    layout, pixel_bytes = raw.format.value[1], raw.format.pixel_bytes
    mode = "RGB" if layout == "BGR" else layout
    pixels = raw.pixels
    if raw.row_stride_bytes != raw.width_px * pixel_bytes:
        # Pillow needs the padding of the last row, which may be missing, so it gets the rows without padding.
        shape, strides = (raw.height_px, raw.width_px, pixel_bytes), (raw.row_stride_bytes, pixel_bytes, 1)
        pixels = np.ndarray(shape, np.uint8, raw.pixels, strides=strides).tobytes()
    return Image.frombytes(mode, (raw.width_px, raw.height_px), pixels, "raw", layout, 0, 1)


def _decode_file(
    data: bytes, header: ImageHeader, open_file: Callable[[bytes], io.BytesIO]
) -> tuple[Image.Image, Image.Transpose | None]:
    """Returns the image in RGB, and how to turn it upright. All other memory of the decoder is freed on return."""
    if header.format == "TIFF":
        directory = tiff.first_directory(data)
        samples = tiff.samples_of(directory)
        if samples is not None:
            turn = _UPRIGHT.get(directory.first(tiff.ORIENTATION, 1))
            return tiff_samples.decode(data, samples, open_file), turn
        if tiff.is_wrapped(directory):
            data = tiff_samples.rewrapped(data)
    elif header.format == "BMP":
        fields = bmp.bit_fields(data)
        if fields is not None:
            return bmp.decode(data, fields, header), None
        data = bmp.as_pillow_reads(data)
    image, turn = _load(data, header, open_file)
    box = first_frame_box(data, header)
    if box is not None:
        # The rest of the canvas is transparent; Pillow fills it with a colour of the palette, or with black.
        frame = image.crop(box)
        image.paste("white", (0, 0, *image.size))
        image.paste(frame, box)
    return image, turn


def _load(
    data: bytes, header: ImageHeader, open_file: Callable[[bytes], io.BytesIO]
) -> tuple[Image.Image, Image.Transpose | None]:
    image = _read(open_file(data), header)
    turn = _turn(image)
    if header.format == "PNG" and "transparency" in image.info and image.mode != "P":
        bits = data[24]
        if bits == 16:
            low = None if image.mode == "I;16" else _low_bytes(open_file(data))
            return _without_colour(image, low), turn
        if bits in (2, 4):  # Pillow scales the pixels to 8 bits, and not the colour
            image.info["transparency"] *= 255 // (2**bits - 1)
    elif header.format == "BMP" and image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        # Programs without alpha leave the byte 0. A picture that cannot be seen would not have been stored.
        return image.convert("RGB"), turn
    elif header.format == "TIFF" and image.mode in ("P", "PA"):
        palette = tiff.palette_of_bytes(tiff.first_directory(data))
        if palette is not None:
            image.putpalette(palette)
    return _to_rgb(image), turn


def _read(file: io.BytesIO, header: ImageHeader) -> Image.Image:
    """Reads the first frame of a file in the mode that it has there."""
    with Image.open(file, formats=(header.format,)) as image:
        # Pillow parses the header again. It must find the size for which memory has been reserved.
        if sorted(image.size) != sorted((header.width, header.height)):
            raise undecodable()
        # Pillow turns a TIFF by its XMP metadata while it loads.
        image.info.pop("xmp", None)
        image.load()
        # Free the bytes of the frame that Pillow keeps.
        image.fp = None
        # The image of a WebP file keeps two canvases of the decoder as long as it exists; a copy has none.
        return image.copy() if header.format == "WEBP" else image


def _turn(image: Image.Image) -> Image.Transpose | None:
    # Pillow's `getexif` would also take the orientation from XMP and from a text of a PNG, which other decoders
    # ignore. A TIFF, whose orientation is a tag of its own, is upright by now.
    block = image.info.get("exif")
    if not block:
        return None
    exif = Image.Exif()
    try:
        exif.load(block)
        orientation = exif.get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are valid although the metadata is not
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _low_bytes(file: io.BytesIO) -> Image.Image:
    """Returns the lower bytes of the samples of a PNG of 16 bits per channel: Pillow keeps the higher ones."""
    image = Image.open(file, formats=("PNG",))
    image.tile = [part._replace(args="RGB;16L") for part in image.tile]
    image.load()
    return image


def _without_colour(image: Image.Image, low_bytes: Image.Image | None) -> Image.Image:
    """Converts a PNG of 16 bits per channel to RGB. Its transparent colour, also of 16 bits, becomes white."""
    clear = np.array(image.info.pop("transparency"), np.uint16)
    result = image if image.mode == "RGB" else Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        part = image.crop(box)
        samples = np.asarray(part).astype(np.uint16)
        if low_bytes is not None:
            samples = samples << 8 | np.asarray(low_bytes.crop(box))
        is_clear = (samples.reshape(*samples.shape[:2], -1) == clear).all(axis=2)
        shown = _to_rgb(part)
        shown.paste("white", mask=Image.fromarray(is_clear))
        result.paste(shown, box)
    return result


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _by_strips(image, _high_bytes)
    if image.has_transparency_data:
        return _by_strips(image, _over_white)
    # Converting RGB to RGB would copy it, which takes longer than decoding a JPEG.
    return image if image.mode == "RGB" else image.convert("RGB")


def _by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Converts to RGB in strips, without intermediate copies of a large image."""
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
