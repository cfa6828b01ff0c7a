"""Converts what callers may pass as an image to what is sent. Decodes nothing."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard

from kestrel_client.v1 import media_pb2

if TYPE_CHECKING:
    from PIL.Image import Image

PixelLayout = Literal["rgb8", "bgr8", "rgba8", "gray8"]
"""The channels of a pixel in their order, 8 bits each."""


@dataclass(frozen=True, slots=True)
class RawImage:
    """Pixels without a file: rows from the top, each from the left.

    `row_stride_bytes` is from the start of a row to that of the next; None where there is no padding.
    """

    pixels: bytes | bytearray | memoryview
    width_px: int
    height_px: int
    layout: PixelLayout = "rgb8"
    row_stride_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that the server keeps; pass it, or its `image_id`, in place of the image. Sizes are of its file."""

    image_id: str
    size_bytes: int
    media_type: str
    width_px: int
    height_px: int
    expires: datetime
    """When the server drops it at the latest."""
    pinned: bool


ImageInput: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | Image | RawImage | StoredImage"
"""The bytes of an image file, the path of one, its address (`https://…`), the name of a stored one (`sha256:…`), a
PIL image, pixels, or a stored image."""

_SCHEMES = ("https://", "http://", "data:")
_STORED = "sha256:"


def put_reference(message: media_pb2.Image, image: ImageInput) -> bool:
    """Put an image into a message that is not sent as a file: its address, its name or its pixels.

    False where the image is sent as a file.
    """
    if is_address(image):
        message.uri = image
    elif isinstance(image, StoredImage):
        message.image_id = image.image_id
    elif _is_name(image):
        message.image_id = image
    elif isinstance(image, RawImage):
        message.raw.CopyFrom(
            media_pb2.RawImage(
                pixels=bytes(image.pixels),
                width_px=image.width_px,
                height_px=image.height_px,
                format=f"PIXEL_FORMAT_{image.layout.upper()}",
                row_stride_bytes=image.row_stride_bytes,
            )
        )
    else:
        return False
    return True


def put_image(message: media_pb2.Image, image: ImageInput) -> None:
    """Put an image into a message, as a file where it is nothing else."""
    if not put_reference(message, image):
        message.data = image_bytes(image)


def is_address(image: ImageInput) -> TypeGuard[str]:
    """Whether an image is given as a URI."""
    return isinstance(image, str) and image.lower().startswith(_SCHEMES)


def is_on_server(image: ImageInput) -> TypeGuard[str]:
    """Whether an image is given as a text by which the server finds it: a URI, or the name of a stored image."""
    return is_address(image) or _is_name(image)


def _is_name(image: ImageInput) -> TypeGuard[str]:
    return isinstance(image, str) and image.startswith(_STORED)


def image_bytes(image: ImageInput) -> bytes:
    """The bytes to send. A PIL image is sent as a PNG of its pixels, so coordinates in the answer refer to them."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    # PIL is optional: only a caller that has imported it can pass a PIL image.
    pil = sys.modules.get("PIL.Image")
    if pil is not None and not isinstance(image, RawImage | StoredImage) and isinstance(image, pil.Image):
        return _png(image)
    raise TypeError(f"a file is bytes, a path or a PIL image, not {type(image).__name__}")


_PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})


def _png(image: Image) -> bytes:
    pixels = image if image.mode in _PNG_MODES else image.convert("RGB")
    file = io.BytesIO()
    # Without the EXIF orientation, since the server would rotate the image and its coordinates by it.
    pixels.save(file, format="PNG", compress_level=1, exif=b"")
    return file.getvalue()
