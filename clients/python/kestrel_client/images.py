"""Converts what callers may pass as an image to what is sent. Decodes no image format and needs no imaging library.

Mistakes raise `InvalidRequest`, whose message never has the image in it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib
import io
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeGuard, get_args
from urllib.parse import unquote_to_bytes

from kestrel_client import pil_images
from kestrel_client.errors import InvalidRequest, invalid_argument
from kestrel_client.v1 import image_service_pb2, media_pb2, vision_service_pb2

if TYPE_CHECKING:
    from PIL.Image import Image

PixelLayout = Literal["rgb8", "bgr8", "rgba8", "gray8"]
"""The channels of a pixel in their order, 8 bits each."""


@dataclass(frozen=True, slots=True)
class RawImage:
    """Pixels without a file: rows from the top, each from the left.

    Args:
        pixels: The bytes of all rows.
        width_px: Width in pixels.
        height_px: Height in pixels.
        layout: The channels of a pixel, such as "bgr8" for what OpenCV reads.
        row_stride_bytes: From the start of a row to that of the next; None where there is no padding.
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
    """The time at which the server drops it at the latest."""
    pinned: bool


class ReadableFile(Protocol):
    """A file object that is open for reading bytes, such as `io.BytesIO`."""

    def read(self) -> bytes:
        """Returns everything from its position to its end."""
        ...


class Array(Protocol):
    """A NumPy array of uint8: height x width for grey, height x width x 3 for RGB, height x width x 4 for RGBA."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the size of each dimension."""
        ...

    @property
    def dtype(self) -> Any:
        """Returns the type of the elements."""
        ...

    def tobytes(self) -> bytes:
        """Returns the elements in C order."""
        ...


_File: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | ReadableFile"
ImageInput: TypeAlias = "_File | Image | Array | RawImage | StoredImage"
"""The bytes of an image file, its path, a file object, a `data:` URL, a PIL image, a NumPy array (RGB), pixels, an
address that the server fetches (`https://…`), or a stored image or its name (`sha256:…`). Files and PIL images are
turned upright by their EXIF orientation, so coordinates refer to the upright image. PIL images may have any mode.
Numbers of mode I are brightness of 8 bits if the largest is at most 255, else of 16 bits. Floats of mode F are
brightness of 0 to 1, 0 to 255 or 0 to 65,535: the least range whose end they exceed by at most a quarter."""

_ADDRESSES = ("https://", "http://")
_DATA_URL = "data:"
_STORED = "sha256:"
_NAME = re.compile(f"{_STORED}(?P<digest>[0-9a-f]{{64}})", re.ASCII)
# How the image formats begin in base64: a text that begins so and is the path of no file is not meant as a path.
_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0A")
_LAYOUTS: dict[int, PixelLayout] = {1: "gray8", 3: "rgb8", 4: "rgba8"}


def put_reference(message: media_pb2.Image, image: ImageInput) -> bool:
    """Puts an image into a message that is not sent as a file: its address, its name or its pixels.

    Returns False where the image is sent as a file.
    """
    if _is_array(image):
        image = _pixels_of(image)
    if is_address(image):
        try:
            message.uri = image
        except ValueError:
            raise _invalid("an address is sent as UTF-8, which has no halves of surrogate pairs") from None
    elif isinstance(image, StoredImage):
        message.image_id = image.image_id
    elif _is_name(image):
        message.image_id = image
    elif isinstance(image, RawImage):
        _check_layout(image)
        try:
            raw = media_pb2.RawImage(
                pixels=bytes(image.pixels),
                width_px=image.width_px,
                height_px=image.height_px,
                format=f"PIXEL_FORMAT_{image.layout.upper()}",
                row_stride_bytes=image.row_stride_bytes,
            )
        except (TypeError, ValueError):
            raise _invalid("the pixels of a RawImage are bytes, and its sizes are small integers") from None
        message.raw.CopyFrom(raw)
    else:
        return False
    return True


def name_of(data: bytes) -> str:
    """Returns the name under which a server stores a file: `sha256:` and its SHA-256 in lower-case hexadecimal
    digits."""
    return f"{_STORED}{hashlib.sha256(data).hexdigest()}"


def digest_of(name: str) -> str | None:
    """Returns the digest in the name of a stored image; None where it is no such name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match["digest"]


def fields_of(message: Any) -> list[media_pb2.Image]:
    """Returns the fields of a request that hold its images, in their order."""
    if isinstance(message, vision_service_pb2.ChatRequest | vision_service_pb2.CompleteChatRequest):
        return [part.image for turn in message.messages for part in turn.parts if part.HasField("image")]
    return [message.image] if "image" in message.DESCRIPTOR.fields_by_name else []


def invalid_image(message: Any, place: int, error: InvalidRequest) -> InvalidRequest:
    """Returns the error of the image at this place among those of a request, with its path in a conversation."""
    if not isinstance(message, vision_service_pb2.ChatRequest | vision_service_pb2.CompleteChatRequest):
        return error
    paths = [
        f"messages[{index}].images[{number}]"
        for index, turn in enumerate(message.messages)
        for number in range(sum(part.HasField("image") for part in turn.parts))
    ]
    return invalid_argument(paths[place], error.violations[0].description)


def bytes_in(message: Any) -> bytes | None:
    """Returns the first image that a request holds: a file or pixels. None where it holds none, or names one."""
    if isinstance(message, image_service_pb2.PutImageRequest):
        return message.data
    for image in fields_of(message)[:1]:
        source = image.WhichOneof("source")
        return image.raw.pixels if source == "raw" else image.data if source == "data" else None
    return None


def names_in(message: Any) -> list[str]:
    """Returns the name of each image of a request that is stored; "" for another one."""
    if isinstance(message, image_service_pb2.GetImageRequest | image_service_pb2.DeleteImageRequest):
        return [message.image_id]
    return [image.image_id for image in fields_of(message)]


def is_address(image: ImageInput) -> TypeGuard[str]:
    """Returns True if an image is given by an address that the server fetches."""
    return isinstance(image, str) and image.lower().startswith(_ADDRESSES)


def is_on_server(image: ImageInput) -> TypeGuard[str]:
    """Returns True if an image is given as a text by which the server finds it: an address, or a stored image's
    name."""
    return is_address(image) or _is_name(image)


def image_bytes(image: ImageInput) -> bytes:
    """Returns the file of an image, in a format that the server decodes.

    PIL images, pixels, AVIF and HEIC become PNG.

    Raises `InvalidRequest` for what is no image or is on the server, and `OSError` for a file that cannot be read.
    """
    data = _file_of(image)
    return _png_of_iso_file(data) if data[4:8] == b"ftyp" and data[8:12] in _ISO_BRANDS else data


def _file_of(image: ImageInput) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, StoredImage) or is_on_server(image):
        raise _invalid("an address or a stored image is no file")
    if isinstance(image, str) and image[: len(_DATA_URL)].lower() == _DATA_URL:
        return _data_of(image)
    if isinstance(image, str | os.PathLike):
        return _file_at(image)
    if _is_array(image):
        image = _pixels_of(image)
    if isinstance(image, RawImage):
        _check_layout(image)
        try:
            return png(image)
        except (TypeError, ValueError) as error:
            raise _invalid(f"not the pixels of a RawImage: {error}") from None
    if _is_pil(image):
        return pil_images.png_of(image)
    if hasattr(image, "read"):
        return _rest_of(image)
    raise _invalid(
        "takes bytes, a path, a file object, a data: URL, a PIL image, a NumPy array, a RawImage or a StoredImage, "
        f"not {type(image).__name__}"
    )


def _invalid(description: str) -> Exception:
    return invalid_argument("image", description)


def _is_name(image: ImageInput) -> TypeGuard[str]:
    return isinstance(image, str) and image.startswith(_STORED)


def _is_pil(image: object) -> TypeGuard[Image]:
    # PIL is optional: only a caller that has imported it can pass a PIL image. NumPy likewise.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def _is_array(image: object) -> TypeGuard[Array]:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(image, numpy.ndarray)


def _pixels_of(array: Array) -> RawImage:
    channels = 1 if len(array.shape) == 2 else array.shape[-1] if len(array.shape) == 3 else 0
    if str(array.dtype) != "uint8" or channels not in _LAYOUTS:
        shape = "x".join(str(size) for size in array.shape)
        raise _invalid(
            f"an array must be uint8 of height x width or height x width x 3 or 4, not {array.dtype} of {shape}"
        )
    return RawImage(array.tobytes(), array.shape[1], array.shape[0], _LAYOUTS[channels])


def _check_layout(image: RawImage) -> None:
    if image.layout not in get_args(PixelLayout):
        raise _invalid(f"the layout of a RawImage is one of {', '.join(get_args(PixelLayout))}")


def _data_of(url: str) -> bytes:
    """Returns the file in a `data:` URL, in base64 or percent-encoded."""
    head, comma, body = url.partition(",")
    if not comma:
        raise _invalid("a data: URL needs a comma before its data")
    data = unquote_to_bytes(body)
    if not re.search(r";\x20*base64\s*$", head, re.ASCII | re.IGNORECASE):
        return data
    try:
        # Line breaks are common in base64, and padding is often left out.
        compact = data.translate(None, b" \t\r\n\f").rstrip(b"=")
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except ValueError:
        raise _invalid("the data of the data: URL are not base64") from None


def _file_at(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (ValueError, OSError) as error:
        # These would print the whole text.
        too_long = isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG
        if too_long or str(path).startswith(_BASE64_BEGINNINGS):
            raise _invalid(
                f"a text of {len(str(path))} characters is not the path of a file; give an image in base64 as "
                "bytes, decoded, or as a URL: data:image/png;base64,…"
            ) from None
        raise


def _rest_of(file: Any) -> bytes:
    try:
        data: object = file.read()
    except (UnicodeDecodeError, io.UnsupportedOperation):
        data = None
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _invalid("a file object must be open for reading bytes, as by open(path, 'rb')")
    if not data:
        raise _invalid("the file object is at its end; call its seek(0) to send it from the start")
    return bytes(data)


def _png_of_iso_file(data: bytes) -> bytes:
    """Returns an AVIF or HEIC file as PNG. Pillow reads AVIF, pillow-heif both."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise _invalid("the server does not decode AVIF and HEIC; `pip install pillow` converts AVIF") from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            return pil_images.png_of(image)
    except UnidentifiedImageError:
        pass
    except (OSError, SyntaxError, ValueError):
        raise _invalid("the AVIF or HEIC file is damaged") from None
    try:
        # Not registered with Pillow: that would change what the whole program opens.
        image = importlib.import_module("pillow_heif").read_heif(io.BytesIO(data)).to_pillow()
    except ImportError:
        raise _invalid("no AVIF file that Pillow reads; `pip install pillow-heif` converts HEIC") from None
    except Exception:  # the library documents no errors of damaged files
        raise _invalid("the AVIF or HEIC file is damaged") from None
    return pil_images.png_of(image)


_ISO_BRANDS = frozenset((b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

_COLOUR_TYPES = {"gray8": 0, "rgb8": 2, "bgr8": 2, "rgba8": 6}
_CHANNELS = {"gray8": 1, "rgb8": 3, "bgr8": 3, "rgba8": 4}


def png(image: RawImage) -> bytes:
    """Returns the file. Raises ValueError where the pixels do not fill the rows."""
    header = struct.pack(">IIBBBBB", image.width_px, image.height_px, 8, _COLOUR_TYPES[image.layout], 0, 0, 0)
    # Level 1, since the time of the caller matters more than the size of the message.
    body = zlib.compress(b"".join(_rows(image)), 1)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _rows(image: RawImage) -> Iterator[bytes]:
    """Yields each row, behind the number of its filter: none."""
    pixels = memoryview(image.pixels).cast("B")
    size = image.width_px * _CHANNELS[image.layout]
    stride = image.row_stride_bytes or size
    if stride < size or len(pixels) < stride * (image.height_px - 1) + size:
        raise ValueError(f"{len(pixels)} bytes are too few for {image.width_px}x{image.height_px} {image.layout}")
    for start in range(0, stride * image.height_px, stride):
        row = bytearray(pixels[start : start + size])
        if image.layout == "bgr8":
            row[0::3], row[2::3] = row[2::3], row[0::3]
        yield b"\0" + row


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
