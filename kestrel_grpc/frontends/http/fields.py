"""The fields of JSON requests: declared once, for reading them and for the description of the API.

Reads types and names; ranges are checked by the engine's request types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kestrel_grpc.frontends.http.json_body import LongText
from kestrel_runtime.api.errors import InvalidRequest, Violation, did_you_mean
from kestrel_runtime.api.requests import MAX_TEXT_BYTES

_MAX_NAME_CHARS = 64


class Kind(Enum):
    """The type of a field; its value is what it is called in messages."""

    TEXT = "a text"
    BOOLEAN = "true or false"
    INTEGER = "a whole number"
    NUMBER = "a number"
    OBJECT = "an object"
    LIST = "a list"
    IMAGE = "a text with an image"
    TEXT_OR_LIST = "a text or a list"


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `fields` are those of an object; empty where any may be in it. `item` is the schema of a list's
    items, for the description alone."""

    name: str
    kind: Kind
    description: str
    is_required: bool = False
    choices: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    item: Mapping[str, Any] | None = None


def read(fields: Iterable[Field], document: Mapping[str, Any], violations: list[Violation], path: str = "") -> Any:
    """The values of the fields by name; what is absent, null or wrong is left out.

    Adds what is wrong to `violations`. Objects become dictionaries that have been read in the same way. Images stay
    as they are: `str` or `LongText`.
    """
    known = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    for name, value in document.items():
        field = known.get(name)
        place = f"{path}{name[:_MAX_NAME_CHARS]}"
        if field is None:
            violations.append(Violation(place, f"is not a field of this request{did_you_mean(name, known)}"))
        elif value is None:
            continue
        elif field.kind is Kind.OBJECT and field.fields and isinstance(value, dict):
            values[name] = read(field.fields, value, violations, f"{place}.")
        elif (problem := _problem(field, value)) is not None:
            violations.append(Violation(place, problem))
        else:
            values[name] = value
    violations.extend(
        Violation(f"{path}{field.name}", "is required")
        for field in known.values()
        if field.is_required and document.get(field.name) is None
    )
    return values


def require(violations: Sequence[Violation]) -> None:
    """Raise `InvalidRequest` where there are violations."""
    if violations:
        raise InvalidRequest(tuple(violations))


def _problem(field: Field, value: Any) -> str | None:
    """Why a value is none of this field."""
    if isinstance(value, LongText) and field.kind in (Kind.TEXT, Kind.TEXT_OR_LIST):
        return f"must be at most {MAX_TEXT_BYTES} bytes long"
    if not _is_of_kind(value, field.kind):
        return f"must be {field.kind.value}"
    if field.choices and value not in field.choices:
        return f"must be one of {', '.join(field.choices)}"
    if isinstance(value, str) and not value.isascii() and not _is_whole(value):
        return "holds half of a surrogate pair"
    return None


def _is_of_kind(value: Any, kind: Kind) -> bool:
    if kind is Kind.BOOLEAN:
        return isinstance(value, bool)
    if kind is Kind.INTEGER:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Kind.NUMBER:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


_TYPES: Mapping[Kind, tuple[type, ...]] = {
    Kind.TEXT: (str,),
    Kind.OBJECT: (dict,),
    Kind.LIST: (list,),
    Kind.IMAGE: (str, LongText),
    Kind.TEXT_OR_LIST: (str, list),
}


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
