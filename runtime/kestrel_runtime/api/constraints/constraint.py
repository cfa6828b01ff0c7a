"""What an answer must look like: one of several texts, a regular expression, or a JSON schema.

The bounds keep the work that a constraint causes small before anything is compiled. Knows no tokens and no library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from kestrel_runtime.api.constraints.regex_size import MAX_REGEX_CHARS, regex_violation
from kestrel_runtime.api.errors import Violation

MAX_CHOICES = 256
MAX_CHOICE_CHARS = 512
MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_NODES = 4_096
"""Objects, lists, names and values in the text of a schema."""
MAX_ENUM_VALUES = 1_024
MAX_NAME_CHARS = 32
_PATTERNS = "patternProperties"
_KEYWORDS = frozenset(
    (
        *("$anchor", "$comment", "$defs", "$id", "$ref", "$schema"),
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "const"),
        *("default", "definitions", "deprecated", "description", "enum", "example", "examples"),
        *("exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum"),
        *("minItems", "minLength", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties"),
        *("prefixItems", "properties", "readOnly", "required", "title", "type", "writeOnly"),
        *("maxProperties", "minProperties", "nullable"),
    )
)
_SUBSCHEMAS = frozenset(("additionalItems", "additionalProperties", "items"))
_LISTS_OF_SUBSCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED_SUBSCHEMAS = frozenset(("$defs", "definitions", "properties", _PATTERNS))
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Constraint:
    """Exactly one of the three.

    `choices`: the answer is one of these texts. `regex`: all of it matches, in the syntax of Rust's `regex`, which
    has neither look-around nor back references. `json_schema`: it is JSON, with one space after each comma and
    colon, that is valid under this schema, which is given as text.
    """

    choices: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: str | None = None

    def violations(self) -> Iterator[Violation]:
        """Every breach, with paths below `constraint`."""
        if bool(self.choices) + (self.regex is not None) + (self.json_schema is not None) != 1:
            yield Violation("constraint", "must be exactly one of choices, regex and json_schema")
        yield from self._choice_violations()
        if self.regex is not None:
            problem = "must not be empty" if not self.regex else regex_violation(self.regex)
            if problem is not None:
                yield Violation("constraint.regex", problem)
        if self.json_schema is not None:
            for problem in _schema_problems(self.json_schema):
                yield Violation("constraint.json_schema", problem)

    def _choice_violations(self) -> Iterator[Violation]:
        if len(self.choices) > MAX_CHOICES:
            yield Violation("constraint.choices", f"must be at most {MAX_CHOICES} texts")
            return
        for index, choice in enumerate(self.choices):
            if not 1 <= len(choice) <= MAX_CHOICE_CHARS:
                yield Violation(f"constraint.choices[{index}]", f"must be 1 to {MAX_CHOICE_CHARS} characters long")


def _schema_problems(text: str) -> Iterator[str]:
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        yield f"must be at most {MAX_SCHEMA_BYTES} bytes long"
        return
    if _nesting(text) > MAX_SCHEMA_DEPTH:
        yield f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep"
        return
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        yield "must be JSON"
        return
    if not isinstance(schema, dict):
        yield "must be an object"
        return
    if _num_nodes(schema) > MAX_SCHEMA_NODES:
        yield f"must have at most {MAX_SCHEMA_NODES} names and values"
        return
    walk = _Walk()
    walk.schema(cast("dict[str, Any]", schema), "")
    yield from walk.problems[:_MOST_PROBLEMS]


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _nesting(text: str) -> int:
    """How deep brackets are nested, also in texts, so that nothing recursive reads deeper ones."""
    depth = most = 0
    for character in text:
        if character in "[{":
            depth += 1
            most = max(most, depth)
        elif character in "]}":
            depth -= 1
    return most


def _num_nodes(value: Any) -> int:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return 1 + len(members) + sum(map(_num_nodes, members.values()))
    if isinstance(value, list):
        return 1 + sum(map(_num_nodes, cast("list[Any]", value)))
    return 1


class _Walk:
    """Looks at each schema within a schema once, and collects what is wrong, with JSON pointers."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def schema(self, schema: Any, path: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._add(path, "must be an object or a boolean")
            return
        for name, value in cast("dict[str, Any]", schema).items():
            self._keyword(name, value, f"{path}/{_shown(name)}")

    def _keyword(self, name: str, value: Any, path: str) -> None:
        if name not in _KEYWORDS:
            self._add(path, "is not supported")
        elif name == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            self._add(path, "must begin with #: other documents are not read")
        elif name == "enum" and isinstance(value, list) and len(cast("list[Any]", value)) > MAX_ENUM_VALUES:
            self._add(path, f"must be at most {MAX_ENUM_VALUES} values")
        elif name == "pattern" and isinstance(value, str):
            self._pattern(value, path)
        elif name in _NAMED_SUBSCHEMAS:
            self._named(name, value, path)
        elif name in _LISTS_OF_SUBSCHEMAS and isinstance(value, list):
            for index, item in enumerate(cast("list[Any]", value)):
                self.schema(item, f"{path}/{index}")
        elif name in _SUBSCHEMAS:
            self.schema(value, path)

    def _named(self, name: str, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            self._add(path, "must be an object")
            return
        for key, item in cast("dict[str, Any]", value).items():
            own = f"{path}/{_shown(key)}"
            if name == _PATTERNS:
                self._pattern(key, own)
            self.schema(item, own)

    def _pattern(self, pattern: str, path: str) -> None:
        problem = regex_violation(pattern)
        if problem is not None:
            self._add(path, problem)

    def _add(self, path: str, problem: str) -> None:
        self.problems.append(f"{path or '/'} {problem}")


def _shown(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…"


__all__ = ["MAX_REGEX_CHARS", "Constraint"]
