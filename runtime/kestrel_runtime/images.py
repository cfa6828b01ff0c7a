"""An image's bytes in, overlapping crops out.

`decode_image` turns an encoded file into 8-bit RGB, `make_crops` cuts that into the crops the vision encoder
reads, and `leave_uncut` prepares it for being cut where the encoder runs. Every size comes from the model's
configuration. Knows nothing about tensors, models or requests, keeps no state, and may run in any number of
threads.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from kestrel_runtime.errors import ImageError
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.pixels_in_place import pixels_in_place

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_SIDE_PX = 65_536
"""A resize keeps weights for every pixel along a side: those of a line of 64 million would take gigabytes."""

# What waits uncut holds all its pixels: 24 MB at most, which a screen of 3840 × 2160 just about needs.
_MAX_UNCUT_PIXELS = 2**23
# The first pass of a resize may stretch a line of pixels into an image as wide as all crops side by side.
_MAX_UNCUT_SIDE_PX = 2**14

# Pillow warns from this many declared pixels on. Filters belong to the whole process, and changing them for
# the time of a call is not safe in threads; so the warning is an error for good, and limits end here.
MAX_IMAGE_PIXELS: int = Image.MAX_IMAGE_PIXELS or 0
warnings.simplefilter("error", Image.DecompressionBombWarning)

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


@dataclass(frozen=True, slots=True, eq=False)
class Crops:
    """What the vision encoder reads of one image.

    `pixels` is uint8 [1 + rows * columns, crop_size, crop_size, 3]: first the whole image, then the tiles,
    which overlap, row by row.
    """

    pixels: np.ndarray
    rows: int
    columns: int

    @property
    def num_crops(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True, slots=True, eq=False)
class UncutImage:
    """An image whose crops are yet to be made.

    `pixels` is uint8 [height, width, 3 or 4], not to be written to; a fourth lane is padding.
    """

    pixels: np.ndarray
    rows: int
    columns: int

    @property
    def num_crops(self) -> int:
        return 1 + self.rows * self.columns


def decode_image(data: bytes, *, max_image_pixels: int) -> Image.Image:
    """Decode an encoded file to upright 8-bit RGB: the first frame, transparency over white.

    The size that the header declares is checked before any pixel is decoded. Raises `ImageError`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            num_pixels = image.width * image.height
            if num_pixels > max_image_pixels:
                raise _too_large(max_image_pixels)
            if max(image.size) > MAX_SIDE_PX:
                raise ImageError(f"must be at most {MAX_SIDE_PX} pixels wide and high", too_large=True)
            image.load()
            return _to_rgb(_upright(image))
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(min(max_image_pixels, MAX_IMAGE_PIXELS)) from None
    except Exception as error:  # hostile bytes make the decoders raise almost anything
        names = ", ".join(FORMATS)
        raise ImageError(f"cannot be decoded; must be a complete file in one of {names}") from error


def select_tiling(height_px: int, width_px: int, vision: VisionConfig) -> tuple[int, int]:
    """How many rows and columns of tiles cover an image of this size: at most `max_crops` together."""
    margins = crop_margins_px(vision)
    window = vision.crop_size - margins
    max_tiles = vision.max_crops
    height, width = max(1, height_px - margins), max(1, width_px - margins)
    if height <= window or width <= window:
        return 1, 1
    rows, columns = math.ceil(height / window), math.ceil(width / window)
    if rows * columns > max_tiles:
        # Too large to tile at full resolution: shrink, keeping the shape.
        shrink = math.sqrt(max_tiles / (rows * columns))
        rows, columns = max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
    else:
        # Room to spare: as many tiles of the image's own shape as fit.
        rows = max(rows, math.floor(math.sqrt(max_tiles * height / width)))
        columns = max(columns, math.floor(math.sqrt(max_tiles * width / height)))
    # Neither case bounds the longer side of a long thin image by itself.
    if columns > rows:
        return rows, min(columns, max_tiles // rows)
    return min(rows, max_tiles // columns), columns


def make_crops(image: Image.Image, vision: VisionConfig) -> Crops:
    """Cut an RGB image into the crops that the model reads. The shape is not kept: tiles are square."""
    rows, columns = select_tiling(image.height, image.width, vision)
    size, margins = vision.crop_size, crop_margins_px(vision)
    stride = size - margins
    pixels = np.empty((1 + rows * columns, size, size, 3), dtype=np.uint8)
    pixels[0] = _resize(image, size, size)
    canvas = _resize(image, rows * stride + margins, columns * stride + margins)
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            pixels[1 + row * columns + column] = canvas[top : top + size, left : left + size]
    return Crops(pixels, rows, columns)


def leave_uncut(image: Image.Image, vision: VisionConfig) -> UncutImage | Crops:
    """Prepare an RGB image for being cut later; one that is much larger than its crops is cut at once."""
    if image.width * image.height > _MAX_UNCUT_PIXELS or max(image.size) > _MAX_UNCUT_SIDE_PX:
        return make_crops(image, vision)
    try:
        pixels = pixels_in_place(image)
    except ValueError:
        pixels = np.asarray(image)
    return UncutImage(pixels, *select_tiling(image.height, image.width, vision))


def crop_margins_px(vision: VisionConfig) -> int:
    """Both margins of a crop together: the part that it shares with its neighbours."""
    return 2 * vision.overlap_margin * vision.enc_patch_size


def _too_large(max_image_pixels: int) -> ImageError:
    return ImageError(f"must have at most {max_image_pixels} pixels", too_large=True)


def _upright(image: Image.Image) -> Image.Image:
    # Read after loading: formats that store the orientation as their own tag have applied it by then.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # metadata that does not parse says nothing; the pixels are good
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow's own conversion has clipped in some versions and shifted in others.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ImageError("has 32 bits per channel; must have 8 or 16")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, "white")
        canvas.alpha_composite(layer)
        return canvas.convert("RGB")
    # A conversion to what it is already would be a copy, which takes longer than decoding a JPEG.
    return image if image.mode == "RGB" else image.convert("RGB")


def _resize(image: Image.Image, height_px: int, width_px: int) -> np.ndarray:
    return np.asarray(image.resize((width_px, height_px), Image.Resampling.LANCZOS))
