"""Converts what callers may pass as an image to the bytes of an image file. Decodes nothing."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from kestrel_client.v1 import media_pb2

if TYPE_CHECKING:
    from PIL.Image import Image

ImageInput: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | Image"
"""The bytes of an image file, the path of one, its address (`https://…`), or a PIL image."""

_SCHEMES = ("https://", "http://", "data:")


def put_image(message: media_pb2.Image, image: ImageInput) -> None:
    """Put an image into a message: its bytes, or its address for the server to fetch."""
    if is_address(image):
        message.uri = image
    else:
        message.data = image_bytes(image)


def is_address(image: ImageInput) -> TypeGuard[str]:
    """Whether an image is given as a URI."""
    return isinstance(image, str) and image.lower().startswith(_SCHEMES)


def image_bytes(image: ImageInput) -> bytes:
    """The bytes to send. A PIL image is sent as a PNG of its pixels, so coordinates in the answer refer to them."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    # PIL is optional: only a caller that has imported it can pass a PIL image.
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(image, pil.Image):
        return _png(image)
    raise TypeError(f"an image is bytes, a path or a PIL image, not {type(image).__name__}")


_PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})


def _png(image: Image) -> bytes:
    pixels = image if image.mode in _PNG_MODES else image.convert("RGB")
    file = io.BytesIO()
    # Without the EXIF orientation, since the server would rotate the image and its coordinates by it.
    pixels.save(file, format="PNG", compress_level=1, exif=b"")
    return file.getvalue()
