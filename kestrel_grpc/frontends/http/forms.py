"""Reads forms: `multipart/form-data` with a picture and fields as text, and a picture with fields in the address.

A form becomes the document that the JSON body would be. The body has been received as a whole, within the limits of
a message; a part is a piece of it, and nothing is written to a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from kestrel_grpc.frontends.http.bodies import Body, Problems, fields_of, nested_types
from kestrel_grpc.frontends.http.json_body import MAX_OTHER_BYTES, MAX_TEXTS, parse_value
from kestrel_runtime.api.errors import InvalidRequest, Violation

MAX_PARTS = 32
"""The most parts of a form, and parameters of its address."""
IMAGE = "image"
"""The name of the picture in a form; a text in its place is an `image_url`."""
IMAGE_URL = "image_url"
"""The name of the picture in the JSON body."""
_MAX_HEAD_BYTES = 4096
_MAX_NAME_CHARS = 64
_BOUNDARY = re.compile(r'boundary=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)
_BOUNDARY_CHARS = re.compile(r"[0-9A-Za-z'()+_,./:=?\- ]{0,69}[0-9A-Za-z'()+_,./:=?\-]")
# A quotation mark in a name is `%22` or, in forms of curl, `\"`.
_PARAMETER = re.compile(r';[ \t]*([A-Za-z*]+)=(?:"((?:\\"|[^"])*)"|([^\s;"]+))[ \t]*')
_PLAIN_ENCODINGS = frozenset(("binary", "8bit", "7bit"))


@dataclass(frozen=True, slots=True)
class Form:
    """Holds what the headers say of a form."""

    boundary: bytes | None
    """The boundary of the parts; None if the body is the picture itself."""
    parameters: Sequence[tuple[bytes, bytes]]
    """The names and values of the address's query, without escapes."""

    def document(self, body_type: type[Body], data: bytes, problems: Problems) -> tuple[dict[str, Any], str]:
        """Returns the document that the JSON body would be, and the name that the form has for its picture.

        The picture is bytes under `image_url`. Wrong fields are added to `problems`. Raises `InvalidRequest` if the
        form itself cannot be read.
        """
        if len(self.parameters) > MAX_PARTS:
            raise _invalid(f"the address has more than {MAX_PARTS} parameters")
        parts = [_Part(_text(name), value, is_file=False) for name, value in self.parameters]
        if self.boundary is None:
            parts.append(_Part(IMAGE, data, is_file=True))
        else:
            parts += _parts(data, self.boundary)
        return _Reader(body_type, problems).document(parts)


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary that the header of a form names. Raises `InvalidRequest`."""
    found = _BOUNDARY.findall(content_type)
    boundary = found[0][0] or found[0][1] if len(found) == 1 else ""
    if not _BOUNDARY_CHARS.fullmatch(boundary):
        raise InvalidRequest(
            (Violation("content-type", "must name the boundary of the parts, of 1 to 70 characters"),)
        )
    return boundary.encode()


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    data: bytes
    is_file: bool
    """True if the part has the name of a file or a media type other than text."""


def _parts(data: bytes, boundary: bytes) -> Iterator[_Part]:
    """Yields the parts of a form. Raises `InvalidRequest` unless the form is exactly as RFC 7578 has it."""
    delimiter = b"\r\n--" + boundary
    if not data.startswith(delimiter[2:]):
        raise _invalid("the form does not begin with its boundary")
    position = len(delimiter) - 2
    for number in range(MAX_PARTS + 1):
        after = data[position : position + 2]
        if after == b"--":
            if data[position + 2 :] not in (b"", b"\r\n"):
                raise _invalid("the form has bytes after its end")
            return
        if after != b"\r\n":
            raise _invalid(f"part {number} of the form does not end with a line that is its boundary")
        if number == MAX_PARTS:
            break
        head_end = data.find(b"\r\n\r\n", position, position + _MAX_HEAD_BYTES)
        if head_end < 0:
            raise _invalid(
                f"part {number + 1} of the form has no headers, or more than {_MAX_HEAD_BYTES} bytes of them"
            )
        start = head_end + 4
        # A part without content has the line break of its headers before its boundary.
        end = data.find(delimiter, start - 2)
        if end < 0:
            raise _invalid("the form ends before its last boundary")
        name, is_file = _described(_text(data[position + 2 : head_end]), number + 1)
        yield _Part(name, data[start:end], is_file)
        position = end + len(delimiter)
    raise _invalid(f"the form has more than {MAX_PARTS} parts")


def _described(head: str, number: int) -> tuple[str, bool]:
    """Returns the name in the headers of a part, and True if the part is a file."""
    found: dict[str, str] = {}
    for line in head.split("\r\n"):
        key, colon, value = line.partition(":")
        if not colon or key != key.strip() or not key or key.lower() in found:
            raise _invalid(f"part {number} of the form has a header that cannot be read, or has one twice")
        found[key.lower()] = value.strip()
    kind, parameters = _disposition(found.get("content-disposition", ""))
    if kind != "form-data" or "name" not in parameters:
        raise _invalid(f"part {number} of the form has no Content-Disposition with its name")
    if found.get("content-transfer-encoding", "binary").lower() not in _PLAIN_ENCODINGS:
        raise _invalid(f"part {number} of the form must not be encoded")
    media_type = found.get("content-type", "text/plain").partition(";")[0].strip().lower()
    return parameters["name"], media_type != "text/plain" or not parameters.keys().isdisjoint(_FILE_NAMES)


_FILE_NAMES = ("filename", "filename*")


def _disposition(header: str) -> tuple[str, dict[str, str]]:
    """Returns the kind and the parameters of a Content-Disposition; no kind if it cannot be read."""
    kind, found = header.partition(";")[0], dict[str, str]()
    position = len(kind)
    while position < len(header):
        parameter = _PARAMETER.match(header, position)
        if parameter is None or parameter[1].lower() in found:
            return "", {}
        found[parameter[1].lower()] = parameter[2] if parameter[3] is None else parameter[3]
        position = parameter.end()
    return kind.strip().lower(), found


class _Reader:
    """Makes the document of a form from its parts. Each field has one part."""

    def __init__(self, body_type: type[Body], problems: Problems) -> None:
        self._body_type = body_type
        self._problems = problems
        self._document: dict[str, Any] = {}
        self._num_left = MAX_OTHER_BYTES

    def document(self, parts: Iterable[_Part]) -> tuple[dict[str, Any], str]:
        image_name = IMAGE
        given: set[str] = set()
        for part in parts:
            is_image = part.name in (IMAGE, IMAGE_URL)
            key = IMAGE_URL if is_image else part.name
            if key in given:
                self._refuse(part.name, "is given more than once" if not is_image else "is a second picture")
                continue
            given.add(key)
            if is_image:
                image_name = part.name
                self._add_image(part)
            else:
                self._add(part)
        if IMAGE_URL not in self._document and fields_of(self._body_type)[IMAGE_URL].is_required():
            self._problems.add_unreadable((Violation(image_name, "is required"),), (IMAGE_URL,))
            self._document[IMAGE_URL] = b"?"
        return self._document, image_name

    def _add_image(self, part: _Part) -> None:
        if not part.data:  # such as of a form without a chosen file: a route that needs a picture then says so
            return
        self._document[IMAGE_URL] = part.data if part.is_file else self._decoded(part)

    def _add(self, part: _Part) -> None:
        self._num_left -= len(part.data) + len(part.name)
        if self._num_left < 0:
            raise _invalid(f"the form holds more than {MAX_OTHER_BYTES} bytes apart from its image")
        holder, name, known = self._document, part.name, fields_of(self._body_type)
        outer, dot, inner = part.name.partition(".")
        if dot and outer in known and (nested := nested_types(known[outer])):
            holder = self._document.setdefault(outer, {})
            name, known = inner, fields_of(*nested)
        if not isinstance(holder, dict) or name in holder:
            self._refuse(part.name, "is given more than once")
            return
        kinds = _kinds(known[name].annotation) if name in known else {"text"}
        value = self._decoded(part)
        if "text" not in kinds and not value:
            return
        if "value" in kinds:
            value = self._parsed(part, value, lists_only="text" in kinds)
        holder[name] = value

    def _parsed(self, part: _Part, text: str, *, lists_only: bool) -> Any:
        """Returns the value that a text is as JSON; the text if it is none, which the body then refuses."""
        if text.count('"') > 2 * MAX_TEXTS:
            raise _invalid(f"a field of the form holds more than {MAX_TEXTS} texts")
        try:
            value = parse_value(text, part.name, self._problems.add)
        except ValueError:
            return text
        return text if lists_only and not isinstance(value, list) else value

    def _decoded(self, part: _Part) -> str:
        try:
            return part.data.decode()
        except UnicodeDecodeError:
            self._refuse(part.name, "is not text in UTF-8")
            return "?"

    def _refuse(self, name: str, description: str) -> None:
        path = name[:_MAX_NAME_CHARS]
        self._problems.add_unreadable((Violation(path, description),), (path,))


def _kinds(annotation: Any) -> set[Literal["text", "value"]]:
    """Returns how the text of a form becomes a value of this type: as it is, or as JSON."""
    if annotation is NoneType:
        return set()
    if isinstance(annotation, type) and issubclass(annotation, str):
        return {"text"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"text"}
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin is None or (isinstance(origin, type) and issubclass(origin, list | dict)):
        return {"value"}
    return set().union(*map(_kinds, arguments))


def _text(data: bytes) -> str:
    """Returns the text of a name or of headers; what is not UTF-8 becomes a name that no field has."""
    return data.decode(errors="replace")


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("", description),))
