"""Parses the JSON of a request body. Images in it are long texts of base64.

Long texts are cut out before the rest is parsed: the parser neither copies them nor searches them for escapes. The
rest must be small, since a body as large as an image could hold millions of values, each of which takes many times
its length in memory.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from kestrel_runtime.api.constraints import decimal_of, escaped_halves
from kestrel_runtime.api.errors import InvalidRequest, Violation

MAX_OTHER_BYTES = 2**20
"""The most bytes of a body apart from its long texts."""
MAX_TEXTS = 20_000
"""The most texts, names included, in a body of more than `_UNCHECKED_BYTES`."""
_UNCHECKED_BYTES = 128 * 1024
"""The size up to which a body is not checked: it is parsed quickly, whatever it holds."""
_LONG_BYTES = 64 * 1024
_LONG_GAP = re.compile(b'"[^"]{%d}' % _LONG_BYTES)
_EXACT_CHARS = 16
"""The length of a point and 15 digits, which a double keeps unless it is subnormal, zero or infinite."""
_MAX_DIGITS = 400
"""The most digits of a whole number, more than any double has. The time to read it grows with their square."""
HALF = "holds half of a surrogate pair"
"""The problem of a text or a name that is not Unicode. Only an escape can write one."""
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_NAME_CHARS = 64
_PIECE_BYTES = 2**20
_ESCAPE_BYTES = 6  # the longest, such as \u000a
_MAX_ESCAPED_BYTES = 4096
"""The most bytes without six bytes between two escapes. Base64 has lines, and other text is not divided."""


class LongText:
    """Represents a text of more than 64 KiB as it is written in the JSON: with escapes, without quotes.

    It is `body[start:end]`, and copied once it is read: most texts that are no images are refused for their length.
    """

    __slots__ = ("_body", "_end", "_start")

    def __init__(self, body: bytes, start: int = 0, end: int | None = None) -> None:
        self._body, self._start, self._end = body, start, len(body) if end is None else end

    def ascii_bytes(self) -> bytes:
        """Returns the characters as bytes. Raises `ValueError` unless all are ASCII."""
        raw = self._body[self._start : self._end]
        if b"\\" in raw:
            return b"".join(json.loads(b'"%b"' % piece).encode("ascii") for piece in _pieces_of(raw))
        if not raw.isascii():
            raise ValueError("not ASCII")
        return raw


def _pieces_of(raw: bytes) -> Iterator[bytes]:
    """Yields a text in pieces, none of which ends within an escape. Other threads wait while a piece is parsed."""
    start = 0
    while start < len(raw):
        ends = range(start + _PIECE_BYTES, start + _PIECE_BYTES + _MAX_ESCAPED_BYTES)
        end = next((end for end in ends if b"\\" not in raw[end - _ESCAPE_BYTES : end]), len(raw))
        yield raw[start:end]
        start = end


class WrittenFloat(float):
    """Represents a number that no double is exactly, with the text that the caller wrote."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Makes the nearest double."""
        made = super().__new__(cls, text)
        made.text = text
        return made


def _float(text: str) -> float:
    value = float(text)
    is_exact = len(text) <= _EXACT_CHARS and sys.float_info.min <= abs(value) < math.inf
    is_exact = is_exact or Decimal(repr(value)) == decimal_of(text)
    return value if is_exact else WrittenFloat(text)


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _invalid(f"the body holds a number of more than {_MAX_DIGITS} digits")
    return int(text)


def parse_json(body: bytes, report: Callable[[str, str], object]) -> dict[str, Any]:
    """Returns the object in a body. Long texts become `LongText`.

    Raises `InvalidRequest`. Numbers that no double is exactly become `WrittenFloat`. Halves of surrogate pairs stay
    as their escapes. `report` is called with the place of each text or name that has one, such as
    `messages[0].content`, and with the problem.
    """
    long_texts: dict[str, LongText] = {}
    if len(body) > _UNCHECKED_BYTES:
        body, long_texts = _without_long_texts(body)

    def replaced(value: Any) -> Any:
        if type(value) is str:
            return long_texts.get(value, value)
        return [replaced(item) for item in value] if type(value) is list else value  # objects have been replaced

    def replace(found: dict[str, Any]) -> dict[str, Any]:
        if not long_texts.keys().isdisjoint(found):
            raise _invalid(f"the body holds a name of more than {_LONG_BYTES} bytes")
        return {name: replaced(value) for name, value in found.items()}

    try:
        decoder = _DECODER
        if long_texts:
            decoder = json.JSONDecoder(**_NUMBERS, object_hook=replace)
        document = decoder.decode(body.decode("utf-8"))
        if _ESCAPED_HALF.search(body):
            document = _without_halves(document, "", report)
    except RecursionError:
        raise _invalid("the JSON is nested too deeply") from None
    except ValueError:
        raise _invalid("the body is not valid JSON in UTF-8") from None
    if not isinstance(document, dict):
        raise _invalid("the body must be a JSON object")
    return document


def parse_value(text: str, path: str, report: Callable[[str, str], object]) -> Any:
    """Returns the value that a text is as JSON, as `parse_json` does for a field at `path`. Raises `ValueError`."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _without_halves(value, path, report) if _ESCAPED_HALF.search(text.encode()) else value


def _without_halves(value: Any, path: str, report: Callable[[str, str], object]) -> Any:
    """Returns a value with halves of surrogate pairs written as their escapes."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for name, item in value.items():
            written = escaped_halves(name)
            place = f"{path}.{written[:_MAX_NAME_CHARS]}".removeprefix(".")
            if written != name:
                report(place, HALF)
            found[written] = _without_halves(item, place, report)
        return found
    if isinstance(value, list):
        return [_without_halves(item, f"{path}[{index}]", report) for index, item in enumerate(value)]
    if isinstance(value, str) and (written := escaped_halves(value)) != value:
        report(path, HALF)
        return written
    return value


def _without_long_texts(body: bytes) -> tuple[bytes, dict[str, LongText]]:
    """Returns the JSON with a short text in place of each long one, and the long texts by the short ones."""
    # In most bodies without an image every quote begins or ends a text, which is found out in a tenth of the time.
    if len(body) <= MAX_OTHER_BYTES and b'\\"' not in body and _LONG_GAP.search(body) is None:
        if body.count(b'"') > 2 * MAX_TEXTS:
            raise _too_many_texts()
        return body, {}
    pieces: list[bytes] = []
    found: dict[str, LongText] = {}
    nonce = secrets.token_hex(8)  # no text of the body can equal a name that its author cannot guess
    num_texts = position = kept_to = 0
    while (start := body.find(b'"', position)) >= 0:
        num_texts += 1
        if num_texts > MAX_TEXTS:
            raise _too_many_texts()
        end = _end_of_text(body, start)
        if end - start > _LONG_BYTES:
            name = f"{nonce}-{len(found)}"
            pieces += (body[kept_to:start], b'"%b"' % name.encode())
            found[name] = LongText(body, start + 1, end)
            kept_to = end + 1
        position = end + 1
    pieces.append(body[kept_to:])
    if sum(map(len, pieces)) > MAX_OTHER_BYTES:
        raise _invalid(f"the body holds more than {MAX_OTHER_BYTES} bytes apart from its image")
    return b"".join(pieces), found


def _end_of_text(body: bytes, start: int) -> int:
    """Returns the index of the closing quote of the text that opens at `start`."""
    before, num_quotes = start, 0
    while (quote := body.find(b'"', before + 1)) >= 0:
        num_backslashes = quote - before - 1 - len(body[before + 1 : quote].rstrip(b"\\"))
        if num_backslashes % 2 == 0:
            return quote
        num_quotes += 1
        if num_quotes > MAX_TEXTS:
            raise _invalid(f"a text of the body holds more than {MAX_TEXTS} quotes")
        before = quote
    raise _invalid("the body is not valid JSON in UTF-8")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_NUMBERS: Mapping[str, Any] = MappingProxyType(
    {"parse_float": _float, "parse_int": _int, "parse_constant": _refuse_constant}
)
_DECODER = json.JSONDecoder(**_NUMBERS)


def _too_many_texts() -> InvalidRequest:
    return _invalid(f"the body holds more than {MAX_TEXTS} texts")


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("", description),))
