"""Decodes images in `data:` URIs, with limits on size and form, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import binascii
from urllib.parse import unquote_to_bytes

from kestrel_grpc.images.image_uris import ImageFetchFailed
from kestrel_runtime.api.errors import ImageError

_DATA = "data:"
_MAX_HEAD_CHARS = 256
"""Of a `data:` URI, up to its comma: the type of the content."""
_MAX_ESCAPES = 1024
_PIECE_BYTES = 2**20  # a multiple of four, so that a piece is whole groups of base64


def is_embedded(uri: str) -> bool:
    """Whether a URI holds its content itself, as `data:` URIs do."""
    return uri[: len(_DATA)].lower() == _DATA


class DataUris:
    """Decodes one URI at a time, of at most `max_bytes` of content. Belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._decoding = asyncio.Lock()

    async def decode(self, uri: str) -> bytes:
        """The content. Raises `ImageFetchFailed`, or `ImageError` where it is too large."""
        self._require_fit((len(uri) - _MAX_HEAD_CHARS - 2 * _MAX_ESCAPES) * 3 // 4)
        head, comma, _ = uri[:_MAX_HEAD_CHARS].partition(",")
        if not comma:
            raise ImageFetchFailed(f"has no comma within {_MAX_HEAD_CHARS} characters")
        async with self._decoding:
            content = await asyncio.to_thread(_decode, uri, len(head) + 1, head.lower().endswith(";base64"))
        self._require_fit(len(content))
        return content

    def _require_fit(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ImageError(f"is larger than {self._max_bytes} bytes", too_large=True)


def _decode(uri: str, start: int, is_base64: bool) -> bytes:
    """The content of a `data:` URI from `start` on."""
    if uri.count("%", start) > _MAX_ESCAPES:
        raise ImageFetchFailed(f"holds more than {_MAX_ESCAPES} escaped characters; use base64")
    if not uri.isascii():
        raise ImageFetchFailed("holds characters that must be escaped")
    text = uri[start:].encode()
    if "%" in uri:
        text = unquote_to_bytes(text)
    if not is_base64:
        return text
    try:
        return decode_base64(text)
    except ValueError:
        raise ImageFetchFailed("holds data that is not base64") from None


def decode_base64(text: bytes | memoryview) -> bytes:
    """Decodes base64, in pieces, since other threads wait during each. Raises `ValueError`."""
    pieces = [
        binascii.a2b_base64(text[position : position + _PIECE_BYTES], strict_mode=True)
        for position in range(0, len(text), _PIECE_BYTES)
    ]
    # Only the last piece may contain padding.
    if any(len(piece) < _PIECE_BYTES * 3 // 4 for piece in pieces[:-1]):
        raise ValueError("padding before the end")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
