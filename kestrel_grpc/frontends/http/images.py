"""Images in JSON requests: base64, `data:` URIs, addresses, and handles of stored images. Fetches nothing."""

from __future__ import annotations

from typing import NamedTuple

from kestrel_grpc.frontends.http.json_body import LongText
from kestrel_grpc.images.data_uris import decode_base64
from kestrel_grpc.images.stored_images import ImageHandle, ImageReference, ImageUri
from kestrel_runtime.api.errors import ImageError

PLACEHOLDER = b"?"
"""In place of an image that the request only names."""
_ADDRESSES = ("http://", "https://")
_DATA = b"data:"
_BASE64 = b";base64"
_MAX_HEAD_BYTES = 256


class GivenImage(NamedTuple):
    """`reference` is None where `data` is the image, else what names the image, and `data` is a placeholder."""

    data: bytes
    reference: ImageReference | None = None


def read_image(value: str | LongText, max_bytes: int) -> GivenImage:
    """The image that a field holds. Raises `ImageError`."""
    if isinstance(value, str) and value[:8].lower().startswith(_ADDRESSES):
        return GivenImage(PLACEHOLDER, ImageUri(value))
    if isinstance(value, str) and (handle := ImageHandle.parse(value)) is not None:
        return GivenImage(PLACEHOLDER, handle)
    try:
        text = value.ascii_bytes() if isinstance(value, LongText) else value.encode("ascii")
    except ValueError:
        raise ImageError("is neither base64 nor a data URL") from None
    start = 0
    if text[: len(_DATA)].lower() == _DATA:
        head, comma, _ = text[:_MAX_HEAD_BYTES].partition(b",")
        if not comma or not head.lower().endswith(_BASE64):
            raise ImageError("is a data URL that is not in base64")
        start = len(head) + 1
    if (len(text) - start) * 3 // 4 > max_bytes + 2:
        raise ImageError(f"is larger than {max_bytes} bytes", too_large=True)
    try:
        data = decode_base64(memoryview(text)[start:]) if len(text) > start else b""
    except ValueError:
        raise ImageError("is not base64") from None
    if len(data) > max_bytes:
        raise ImageError(f"is larger than {max_bytes} bytes", too_large=True)
    return GivenImage(data)
