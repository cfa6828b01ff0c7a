"""Defines bodies of JSON requests as pydantic models, and describes their mistakes in our own words.

A refusal names every mistake of a body. If `read` finds wrong values, it omits them or replaces them by examples,
so that the engine's request can be made from the rest and its checks are reported as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic.fields import FieldInfo

from kestrel_grpc.calls.errors import MAX_VIOLATIONS
from kestrel_grpc.frontends.http.json_body import HALF, LongText
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation, did_you_mean
from kestrel_runtime.api.requests import MAX_TEXT_BYTES, Request


class Unusable(ValueError):
    """Raised by our validators; its text is for callers."""


_MAX_NAME_CHARS = 64
_CHOICE_ERROR = "text_or_list"
# Pydantic puts these between the names of a path.
_TEXT_TAG, _LIST_TAG, _KEY_MARK = "<text>", "<list>", "[key]"

# With a bound, so that pydantic also refuses half of a surrogate pair. The engine counts the bytes.
Text = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]
Item = TypeVar("Item")


def _tag(value: Any) -> str | None:
    return _LIST_TAG if isinstance(value, list) else _TEXT_TAG if isinstance(value, str | LongText) else None


TextOr = Annotated[
    Annotated[Text, Tag(_TEXT_TAG)] | Annotated[Item, Tag(_LIST_TAG)],
    Discriminator(_tag, custom_error_type=_CHOICE_ERROR, custom_error_message=""),
]
"""A text or another type, as `TextOr[list[X]]`. Mistakes are reported for the type that was sent."""


class Body(BaseModel):
    """Represents an object in JSON: no value is converted from another type, and unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if type(given) is dict and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


AnyBody = TypeVar("AnyBody", bound=Body)
_Error = Mapping[str, Any]
"""An item of `ValidationError.errors`."""


class Problems:
    """Collects all mistakes of one request."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []
        self._image_errors: list[ImageError] = []
        self._repaired_paths: set[str] = set()
        self._leads_to_repaired: set[str] = set()

    def add(self, field: str, description: str) -> None:
        """Reports a value that `read` has accepted."""
        if field not in self._leads_to_repaired and self._repaired_paths.isdisjoint(_prefixes(field)):
            self._violations.append(Violation(field, description))

    def checked(self, name: Callable[[str], str], new_request: Callable[[], Request]) -> Request:
        """Returns the request of the engine.

        Raises `InvalidRequest` with all mistakes; those that the request finds have their `name` in the body.
        """
        request: Request | None = None
        try:
            request = new_request()
        except InvalidRequest as error:
            for violation in error.violations:
                self.add(name(violation.field), violation.description)
        self.require_none()
        assert request is not None
        return request

    def add_unreadable(self, violations: Iterable[Violation], repaired: Iterable[str]) -> None:
        """Reports the values that `read` refuses, and records the paths at which it has repaired the body."""
        self._violations += violations
        self._repaired_paths.update(repaired)
        self._leads_to_repaired.update(prefix for path in self._repaired_paths for prefix in _prefixes(path))

    def add_image_error(self, error: ImageError, path: str) -> None:
        """Reports that the image at this path cannot be used."""
        error.rename(lambda _: path)
        self._image_errors.append(error)

    def require_none(self) -> None:
        """Raises `InvalidRequest` if there is a mistake, or the first `ImageError` if images alone are wrong."""
        of_images = tuple(item for error in self._image_errors for item in error.violations)
        if self._violations:
            raise InvalidRequest((*self._violations, *of_images))
        if self._image_errors:
            first, *_ = self._image_errors
            first.violations = of_images
            raise first


def read(body_type: type[AnyBody], document: Mapping[str, Any], problems: Problems) -> AnyBody:
    """Returns the body without its wrong values, which are added to `problems`."""
    try:
        return body_type.model_validate(document)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    paths = [_path(error) for error in errors]
    problems.add_unreadable(_violations(body_type, errors, paths), paths)
    try:
        return body_type.model_validate(_repaired(body_type, document, errors))
    except ValidationError:  # a part of the repaired body depends on a value that was left out
        return body_type.model_validate(example(body_type))


def example(body_type: type[Body]) -> dict[str, Any]:
    """Returns the smallest valid document."""
    fields = fields_of(body_type)
    return {name: _example(field) for name, field in fields.items() if field.is_required()}


def _example(field: FieldInfo) -> Any:
    assert field.examples, "every required field has an example"
    return field.examples[0]


def _repaired(body_type: type[Body], document: Mapping[str, Any], errors: Iterable[_Error]) -> Mapping[str, Any]:
    """Returns the document with each wrong value replaced by an example, or removed."""
    repaired = _copied(document, 3)
    for error in errors:
        name, *below = _place(error)
        holder, known = repaired, fields_of(body_type)
        if below and isinstance(repaired.get(name), dict) and (nested := nested_types(known[name])):
            holder = repaired[name]
            (name, *below), known = below, fields_of(*nested)
        field = known.get(name)
        if field is not None and field.examples and below and isinstance(holder[name], list):
            holder[name][below[0]] = field.examples[0][0]
        elif field is not None and (field.is_required() or (field.examples and isinstance(holder.get(name), list))):
            holder[name] = _example(field)
        else:
            holder.pop(name, None)
    return repaired


def _copied(value: Any, num_levels: int) -> Any:
    """Returns a copy of the outermost `num_levels` levels of objects and lists."""
    if num_levels and isinstance(value, dict):
        return {name: _copied(item, num_levels - 1) for name, item in value.items()}
    return list(value) if num_levels and isinstance(value, list) else value


def _violations(body_type: type[Body], errors: Sequence[_Error], paths: Sequence[str]) -> Iterator[Violation]:
    for error, path in zip(errors[:MAX_VIOLATIONS], paths, strict=False):
        description = _description(error)
        if error["type"] == "extra_forbidden":
            description += did_you_mean(str(error["loc"][-1])[:_MAX_NAME_CHARS], _sibling_names(body_type, error))
        yield Violation(path, description)
    for path in paths[MAX_VIOLATIONS:]:  # answers list no more, and a search is slow
        yield Violation(path, "is not valid")


def _description(error: _Error) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error" and isinstance(context["error"], Unusable):
        return str(context["error"])
    if error["loc"][-1:] == (_KEY_MARK,):
        return "is not the id of a token"
    if kind == "string_type" and isinstance(error["input"], LongText):
        kind = "string_too_long"
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        return f"must be one of {', '.join(choices)}"
    if kind == "too_long":
        return f"must have at most {context['max_length']} items"
    return _DESCRIPTIONS.get(kind, "is not valid")


_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "is required",
        "extra_forbidden": "is not a field of this request",
        "string_type": "must be a text",
        "string_too_long": f"must be at most {MAX_TEXT_BYTES} bytes long",
        "string_unicode": HALF,
        "bool_type": "must be true or false",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "list_type": "must be a list",
        "too_short": "must not be empty",
        _CHOICE_ERROR: "must be a text or a list",
        "dict_type": "must be an object",
        "model_type": "must be an object",
    }
)


def _path(error: _Error) -> str:
    """Returns the path of an error, such as `messages[0].content`."""
    names = _place(error)
    if names[-1:] == [_KEY_MARK]:
        *names, key, _ = names
        return f"{_joined(names)}[{str(key)[:_MAX_NAME_CHARS]}]"
    return _joined(names)


def _joined(names: Iterable[str | int]) -> str:
    path = "".join(f"[{name}]" if isinstance(name, int) else f".{name[:_MAX_NAME_CHARS]}" for name in names)
    return path.removeprefix(".")


def _place(error: _Error) -> list[Any]:
    """Returns the names and indices that lead to an error."""
    return [name for name in error["loc"] if name not in (_TEXT_TAG, _LIST_TAG)]


def _sibling_names(body_type: type[Body], error: _Error) -> Iterable[str]:
    """Returns the known names at the place of an unknown one."""
    known = fields_of(body_type)
    for name in _place(error)[:-1]:
        if isinstance(name, str):
            known = fields_of(*nested_types(known[name]))
    return known


@cache
def fields_of(*body_types: type[Body]) -> dict[str, FieldInfo]:
    """Returns the fields by their names in JSON."""
    return {field.alias or name: field for kind in body_types for name, field in kind.model_fields.items()}


def nested_types(field: FieldInfo) -> list[type[Body]]:
    """Returns the models of the objects that the value of a field is or contains."""
    return list(_body_types_in(field.annotation))


def _body_types_in(annotation: Any) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from _body_types_in(part)


def _prefixes(path: str) -> Iterator[str]:
    """Yields the path and its prefixes: for `a.b[1]` also `a` and `a.b`."""
    yield from (path[: found.start()] for found in re.finditer(r"[.\[]", path))
    yield path
