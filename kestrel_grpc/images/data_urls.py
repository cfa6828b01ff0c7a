"""Decodes images in base64, alone or in a `data:` URL, as browsers do.

The rules are those of the WHATWG: "data: URL processor" of its standard Fetch, "forgiving-base64 decode" of Infra.
Text is handled in pieces, since other threads wait during each.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

_PIECE_BYTES = 2**20  # a multiple of four, so that a piece is whole groups of base64
_MAX_HEAD_BYTES = 256
"""The bound of the part of a `data:` URL up to its comma, which names the type of the content."""
_MAX_ESCAPES = 1024
"""The most escapes of a text, each of which takes many times its length in memory. In base64 those of
`_COMMON_ESCAPES` do not count."""
_BEGIN = re.compile(rb"[\x00-\x20]*data:", re.IGNORECASE)
_ENDS_WITH_BASE64 = re.compile(rb";\x20*base64[\t\n\f\r\x20]*\Z", re.IGNORECASE)
_NO_PART_OF_URLS = b"\t\n\r"
_WHITESPACE = b"\t\n\f\r "
# The escapes that encoders of URLs write for base64 with line breaks.
_COMMON_ESCAPES: Mapping[bytes, bytes] = MappingProxyType(
    {escape: b"%c" % byte for byte in b"+/=" + _WHITESPACE for escape in (b"%%%02X" % byte, b"%%%02x" % byte)}
)


class DataUnreadable(ValueError):
    """The text does not have the form; the message is for callers."""


class DataTooLarge(Exception):
    """The data are larger than allowed."""


def is_data_url(text: bytes) -> bool:
    """Returns True if a text is meant as a `data:` URL. Its first 256 bytes are enough."""
    return _BEGIN.match(text) is not None


def decode_data_url(url: bytes, max_bytes: int, *, needs_base64: bool = False) -> bytes:
    """Returns the content of a `data:` URL, of at most `max_bytes`.

    With `needs_base64` every other form is refused. Raises `DataUnreadable` and `DataTooLarge`, the latter before
    anything is decoded.
    """
    begin, comma = _BEGIN.match(url), url.find(b",", 0, _MAX_HEAD_BYTES)
    assert begin is not None, "called for data: URLs only"
    if comma < 0:
        raise DataUnreadable(f"has no comma within {_MAX_HEAD_BYTES} characters")
    media_type = url[begin.end() : comma].translate(None, _NO_PART_OF_URLS)
    fragment = url.find(b"#", comma)
    body = url[comma + 1 : len(url) if fragment < 0 else fragment]
    if _ENDS_WITH_BASE64.search(media_type) is not None:
        return decode_base64(body, max_bytes, is_escaped=True)
    if needs_base64:
        raise DataUnreadable("is a data URL that is not in base64")
    body = body.translate(None, _NO_PART_OF_URLS)
    num_escapes = body.count(b"%")
    if len(body) - 2 * num_escapes > max_bytes:
        raise DataTooLarge
    return _unescaped(body, num_escapes)


def decode_base64(text: bytes, max_bytes: int, *, is_escaped: bool = False) -> bytes:
    """Returns the bytes that base64 encodes, at most `max_bytes`. Whitespace is skipped, and padding may be absent.

    `is_escaped`: bytes may be written as in URLs, such as `%2B`. Raises `DataUnreadable` and `DataTooLarge`, the
    latter before anything is decoded.
    """
    num_escapes = 0
    if is_escaped and b"%" in text:
        text = b"".join(_without_common_escapes(text))
        num_escapes = text.count(b"%")
    if any(byte in text for byte in _WHITESPACE):
        text = b"".join(piece.translate(None, _WHITESPACE) for piece in _pieces(text))
    num_padding = len(text[-2:]) - len(text[-2:].rstrip(b"="))
    if (len(text) - 2 * num_escapes) * 3 // 4 - num_padding > max_bytes:
        raise DataTooLarge
    if num_escapes:
        text = _unescaped(text, num_escapes)
    if missing := -len(text) % 4:
        if num_padding or missing == 3:
            raise DataUnreadable(_fault_of(text))
        text += b"=" * missing
    try:
        decoded = [binascii.a2b_base64(piece, strict_mode=True) for piece in _pieces(text)]
    except ValueError:
        raise DataUnreadable(_fault_of(text)) from None
    # Only the last piece may contain padding.
    if any(len(piece) < _PIECE_BYTES // 4 * 3 for piece in decoded[:-1]):
        raise DataUnreadable(_fault_of(text))
    return decoded[0] if len(decoded) == 1 else b"".join(decoded)


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[position : position + _PIECE_BYTES] for position in range(0, len(text), _PIECE_BYTES))


def _without_common_escapes(text: bytes) -> Iterator[bytes]:
    """Yields the pieces of base64 in a URL, none of which ends within an escape."""
    start = 0
    while start < len(text):
        end = start + _PIECE_BYTES
        if end < len(text) and (cut := text.rfind(b"%", end - 2, end)) >= 0:
            end = cut
        piece = text[start:end]
        for escape, byte in _COMMON_ESCAPES.items():
            piece = piece.replace(escape, byte)
        yield piece
        start = end


def _unescaped(text: bytes, num_escapes: int) -> bytes:
    if num_escapes > _MAX_ESCAPES:
        raise DataUnreadable(f"holds more than {_MAX_ESCAPES} escaped characters; use base64")
    return unquote_to_bytes(text)


def _fault_of(text: bytes) -> str:
    """Returns the reason why a text, without whitespace, is not base64."""
    if b"-" in text or b"_" in text:
        return "is not base64 but base64url: write + for - and / for _"
    if re.search(rb"=[^=]", text):
        return "is not base64: it goes on behind its padding"
    return "is not base64"
