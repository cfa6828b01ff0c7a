"""Checks the numbers of complete answers under a schema, as exact integers and decimals.

The grammar library computes with doubles, so a worker compares the numbers of an answer with the schema again.
Python's `re` never runs the expressions of callers: patterns and formats are assumed to match.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

from kestrel_runtime.api.constraints import NUMBER_BOUNDS, decimal_of, pointed_at

_MAX_SHIFT = 1_000
"""The most decimal places between the last digits of a number and of `multipleOf`."""


def is_number(value: Any) -> bool:
    """Returns True if a JSON value is a number; booleans are not."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Returns True if a JSON value is a number without a fraction, such as 1, 1.0 or 1e3."""
    return is_number(value) and (isinstance(value, int) or value == value.to_integral_value())


def canonical(value: Any) -> Any:
    """Returns a hashable value that is the same for equal JSON values: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return ("object", frozenset((name, canonical(item)) for name, item in members.items()))
    if isinstance(value, list):
        return ("array", tuple(map(canonical, cast("list[Any]", value))))
    return ("number", value) if is_number(value) else (type(value), value)


def bounds_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yields the keyword, value and exclusiveness of each bound that is a number, draft 4's among them."""
    for name, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if is_number(schema.get(name)):
            yield name, schema[name], schema.get(other) is True
        if is_number(schema.get(other)):
            yield other, schema[other], True


class Validator:
    """Validates values under the schemas within `root`, except for patterns, formats and names of properties.

    Since these are assumed to match, no valid value is called invalid. Values and schemas must outlive the
    validator.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, int], bool] = {}  # by the identities of schema and value
        self._enums: dict[int, frozenset[Any]] = {}  # by the identity of the list

    def is_valid(self, schema: Any, value: Any) -> bool:
        """Returns True if the value is valid, as far as this class checks."""
        if not isinstance(schema, dict):
            return schema is not False
        key = (id(cast(Any, schema)), id(value))
        if key not in self._known:
            self._known[key] = True  # for a schema that refers to itself without looking into the value
            own = cast("dict[str, Any]", schema)
            self._known[key] = self._is_own_valid(own, value) and all(
                any(self.is_valid(part, item) for part in parts) for parts, item, _ in self._parts(own, value)
            )
        return self._known[key]

    def pointer(self, schema: Any, value: Any) -> str:
        """Returns the JSON pointer, within an invalid value, of the part that is invalid."""
        if isinstance(schema, dict) and self._is_own_valid(cast("dict[str, Any]", schema), value):
            for parts, item, step in self._parts(cast("dict[str, Any]", schema), value):
                if not any(self.is_valid(part, item) for part in parts):
                    return step + (self.pointer(parts[0], item) if len(parts) == 1 else "")
        return ""

    def _parts(self, schema: dict[str, Any], value: Any) -> Iterator[tuple[list[Any], Any, str]]:
        """Yields groups of alternatives: schemas of which one must hold for a part of the value, that part, and the
        step to it."""
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                yield schema[name], value, ""
        for part in schema.get("allOf", ()):
            yield [part], value, ""
        if isinstance(schema.get("$ref"), str):
            yield [pointed_at(self._root, schema["$ref"])], value, ""
        if isinstance(value, dict):
            named = schema.get("properties", {})
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            for name, item in cast("dict[str, Any]", value).items():
                yield [named.get(name, others)], item, "/" + name.replace("~", "~0").replace("/", "~1")
        elif isinstance(value, list):
            items = schema.get("items", True)
            first, rest = schema.get("prefixItems", []), items
            if isinstance(items, list):
                first, rest = cast("list[Any]", items), schema.get("additionalItems", True)
            for index, item in enumerate(cast("list[Any]", value)):
                yield [first[index] if index < len(first) else rest], item, f"/{index}"

    def _is_own_valid(self, schema: dict[str, Any], value: Any) -> bool:
        """Returns True if the value is valid under the keywords that hold no schemas."""
        types = schema.get("type")
        if types is not None:
            names = cast("list[Any]", types) if isinstance(types, list) else [types]
            if not any(_is_of_type(name, value) for name in names) and not (
                value is None and schema.get("nullable") is True
            ):
                return False
        if "const" in schema and canonical(schema["const"]) != canonical(value):
            return False
        listed = schema.get("enum")
        if isinstance(listed, list):
            if id(cast(Any, listed)) not in self._enums:
                self._enums[id(cast(Any, listed))] = frozenset(map(canonical, cast("list[Any]", listed)))
            if canonical(value) not in self._enums[id(cast(Any, listed))]:
                return False
        if is_number(value):
            return _is_within(schema, value)
        sized = {str: "Length", list: "Items", dict: "Properties"}.get(type(value))
        if sized is None:
            return True
        if isinstance(value, dict) and any(name not in value for name in schema.get("required", ())):
            return False
        least, most = schema.get(f"min{sized}", 0), schema.get(f"max{sized}", len(value))
        return least <= len(value) <= most


def _is_of_type(name: Any, value: Any) -> bool:
    if name in ("number", "integer"):
        return is_number(value) and (name == "number" or is_whole(value))
    kinds = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    return name in kinds and isinstance(value, kinds[name])


def _is_within(schema: dict[str, Any], value: int | Decimal) -> bool:
    for name, bound, is_exclusive in bounds_of(schema):
        if value == bound:
            if is_exclusive:
                return False
        elif (value < bound) == name.endswith("inimum"):
            return False
    step = schema.get("multipleOf")
    return not is_number(step) or _is_multiple(Decimal(value), Decimal(cast(Any, step)))


def _is_multiple(value: Decimal, step: Decimal) -> bool:
    if not value or not step:
        return not value
    (_, digits, exponent), (_, step_digits, step_exponent) = value.as_tuple(), step.as_tuple()
    shift = cast(int, exponent) - cast(int, step_exponent)
    if abs(shift) > _MAX_SHIFT:
        return False
    whole, step_whole = _joined(digits), _joined(step_digits)
    return whole * 10 ** max(shift, 0) % (step_whole * 10 ** max(-shift, 0)) == 0


def _joined(digits: tuple[int, ...]) -> int:
    return int("".join(map(str, digits)))


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_numbers, cast("dict[str, Any]", value).values()))
    return any(map(_has_numbers, cast("list[Any]", value))) if isinstance(value, list) else is_number(value)


def _bounds_numbers(schema: Any) -> bool:
    """Returns True if a schema, or one within it, restricts numbers. Data within it count as schemas."""
    if isinstance(schema, list):
        return any(map(_bounds_numbers, cast("list[Any]", schema)))
    if not isinstance(schema, dict):
        return False
    own = cast("dict[str, Any]", schema)
    return any(
        is_number(value) if name in NUMBER_BOUNDS else name in ("const", "enum") and _has_numbers(value)
        for name, value in own.items()
    ) or any(map(_bounds_numbers, own.values()))


class AnswerCheck:
    """Checks the numbers that a schema allows, for any number of answers and in any thread."""

    def __init__(self, schema: dict[str, Any]) -> None:
        """Creates a check. `schema`: as the caller wrote it, with decimals instead of floats."""
        self._schema = schema

    @classmethod
    def of(cls, schema: dict[str, Any]) -> AnswerCheck | None:
        """Returns the check of answers under the schema, or None if the schema does not restrict numbers."""
        return cls(schema) if _bounds_numbers(schema) else None

    def miss(self, answer: str) -> str | None:
        """Returns the JSON pointer of the first part of a complete answer that is not valid, or None.

        Raises ValueError if the answer is not JSON.
        """
        value = json.loads(answer, parse_float=decimal_of)
        validator = Validator(self._schema)
        return None if validator.is_valid(self._schema, value) else validator.pointer(self._schema, value)
