"""Rewrites schemas for the grammar library, which computes with doubles and supports a part of JSON schema only.

Annotations are dropped. Bounds are rounded to doubles inwards and never outwards, since the library compares
doubles and their decimals. `oneOf` becomes `anyOf` if its parts exclude each other; expressions with look-around
that pydantic and zod write become equal ones without. A schema that cannot be rewritten is a problem with its
place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from kestrel_runtime.api.constraints import (
    LISTS,
    MAX_PROPERTIES,
    NAMED,
    NUMBER_BOUNDS,
    SUBSCHEMAS,
    is_annotation,
    pointed_at,
    pointer_step,
    regex_violation,
)
from kestrel_runtime.constraints.answer_check import Validator, bounds_of, canonical, is_number, is_whole
from kestrel_runtime.constraints.exact_grammar import EXACT, literal, whole_numbers
from kestrel_runtime.constraints.json_answer import MAX_FRACTION_DIGITS

_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_SIZES = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_INT = 2**63 - 1024
"""The largest double that is an int64. Larger bounds are lowered to it."""
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_UNREACHED = Decimal("1e117")
"""A number that is larger than any number of an answer."""
_DIGITS_OF_DOUBLES = 15
"""The number of digits that a double always preserves, however it is read."""
_MAX_FRACTIONAL = 10**_DIGITS_OF_DOUBLES
_MAX_SCALE = 308
_MAX_STEPS = 20_000
"""The most steps of the search for alternatives that exclude each other: about 50 ms."""
_MAX_DEPTH = 8
_CANNOT = "is a number that the grammar cannot express exactly"
_OVERLAPS = "cannot be used: its parts must exclude each other, such as by type or by a const that is required"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        # Decimal of pydantic 2.12 and 2.13.
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
        # z.email() of zod 4.0.
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
            r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
        ),
        # z.emoji(), z.hostname() without the limit of its length, and z.iso.duration() of zod 4.6.
        (
            r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
            r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$"
        ): (
            r"^[\p{Emoji_Component}]*[\p{Extended_Pictographic}\p{Regional_Indicator}\x{20E3}]"
            r"[\p{Extended_Pictographic}\p{Emoji_Component}]*$"
        ),
        (
            r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
            r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
        ): (
            r"^[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
            r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
        ),
        (
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
        ): rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$",
    }
)


class LibrarySchema(NamedTuple):
    """A schema for the library, and the problems: a JSON pointer and a description each.

    `inexact`: numbers that the library does not support, but `exact_rules` may. `is_narrowed`: the library supports
    the bounds, and excludes some numbers next to them that `exact_rules` may allow.
    """

    schema: dict[str, Any]
    problems: list[str]
    inexact: list[str]
    is_narrowed: bool


def library_schema(schema: dict[str, Any], *, may_narrow: bool = False) -> LibrarySchema:
    """Rewrites a schema whose floats are decimals, and in which `schema_problems` finds no problem.

    With `may_narrow`, bounds are left to the library wherever it supports them.
    """
    rewriter = _Rewriter(schema, may_narrow=may_narrow)
    rewritten = rewriter.rewritten(schema, "")
    if rewriter.definitions:
        rewritten["$defs"] = {**rewritten.get("$defs", {}), **rewriter.definitions}
    return LibrarySchema(rewritten, rewriter.problems, rewriter.inexact, rewriter.is_narrowed)


class _Rewriter:
    def __init__(self, root: dict[str, Any], *, may_narrow: bool) -> None:
        self.problems: list[str] = []
        self.inexact: list[str] = []
        self.is_narrowed = False
        self._may_narrow = may_narrow
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._apart = _Apartness(root)

    def rewritten(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        own = cast("dict[str, Any]", schema)
        if own.get("not", False) is not False:  # of every value: others are refused before
            return {"anyOf": []}
        made = {
            name: self._value(name, value, path)
            for name, value in own.items()
            if not is_annotation(name) and name not in NUMBER_BOUNDS and name not in _DROPPED
        }
        if path == "":
            made.pop("$id", None)
        kept_format = own.get("format")
        if kept_format in _FORMATS and kept_format is not None:
            made["format"] = kept_format
        self._rewrite_constants(own, made, path)
        self._rewrite_numbers(own, made, path)
        if own.get("nullable") is True and isinstance(own.get("type"), str):
            made["type"] = [own["type"], "null"]
        self._rewrite_names(own, made, path)
        self._rewrite_one_of(own, made, path)
        return made

    def _value(self, name: str, value: Any, path: str) -> Any:
        """Returns the value of a keyword, with the schemas in it rewritten."""
        below = f"{path}/{name}"
        if name in NAMED and isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return {key: self.rewritten(part, f"{below}/{pointer_step(key)}") for key, part in members.items()}
        if name in LISTS and isinstance(value, list):
            return [self.rewritten(part, f"{below}/{index}") for index, part in enumerate(cast("list[Any]", value))]
        if name in SUBSCHEMAS:
            return self.rewritten(value, below)
        if name in _SIZES and is_whole(value):
            return int(value)
        if name == "pattern" and isinstance(value, str):
            return _PATTERNS.get(value, value)
        return value

    # Numbers

    def _rewrite_constants(self, own: dict[str, Any], made: dict[str, Any], path: str) -> None:
        """Writes numbers exactly. Their type is left out, since the library rounds large numbers by it."""
        for name in ("const", "enum"):
            values = [own[name]] if name == "const" and name in own else own.get(name)
            if not isinstance(values, list):
                continue
            places = [f"{path}/{name}" + ("" if name == "const" else f"/{index}") for index in range(len(values))]
            siblings = {key: own[key] for key in ("type", "nullable", *NUMBER_BOUNDS) if key in own}
            num_inexact = len(self.inexact)
            kept = [
                self._exact(value, place)
                for value, place in zip(cast("list[Any]", values), places, strict=True)
                if Validator(siblings).is_valid(siblings, value)
            ]
            if kept:
                made.pop("type", None)
                made[name] = kept[0] if name == "const" else kept
            if len(self.inexact) > num_inexact:
                made[EXACT] = [literal(value) for value in values if Validator(siblings).is_valid(siblings, value)]

    def _exact(self, value: Any, path: str) -> Any:
        """Returns a constant with numbers that the library spells without change."""
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return {key: self._exact(item, f"{path}/{pointer_step(key)}") for key, item in members.items()}
        if isinstance(value, list):
            return [self._exact(item, f"{path}/{index}") for index, item in enumerate(cast("list[Any]", value))]
        if not is_number(value):
            return value
        if is_whole(value) and abs(value) <= _MAX_INT and float(value) == value:
            return int(value)
        double = float(value)
        if Decimal(repr(double)) == value and _as_read(double) == double:
            return double
        self.inexact.append(f"{path} {_CANNOT}")
        return 0

    def _rewrite_numbers(self, own: dict[str, Any], made: dict[str, Any], path: str) -> None:
        listed = own.get("type", ["number"])
        types = cast("list[Any]", listed) if isinstance(listed, list) else [listed]
        is_named = "type" in own and "type" not in made
        if is_named or not {"integer", "number"} & set(_texts(types)):
            return  # no number, or one of those that are named
        step: Any = own.get("multipleOf")
        if is_number(step):
            if not _is_taken_as_step(float(step)):
                self.problems.append(f"{path}/multipleOf {_CANNOT}")
            made["multipleOf"] = int(step) if is_whole(step) else float(step)
        lower, upper = _Bound.tightest(own, "inimum"), _Bound.tightest(own, "aximum")
        is_integer = "number" not in types
        for bound, sign in ((lower, -1), (upper, 1)):
            if bound is not None and sign * bound.value < -_MAX_INT:
                problem = f"{path}/{bound.name} {_CANNOT}"
                self._bound_exactly(own, made, lower, upper, problem)
                return
        least, most = _rounded(lower, upper, is_integer=is_integer)
        is_left_empty = least is not None and most is not None and least > most
        if is_left_empty and lower and upper and not _is_empty(lower, upper, is_integer=is_integer):
            problem = f"{path}/{upper.name} {_CANNOT}: it finds none between the bounds"
            self._bound_exactly(own, made, lower, upper, problem)
            return
        for name, value in (("minimum", least), ("maximum", most)):
            if value is not None:
                made[name] = value
        if not self._may_narrow and is_integer and step is None and _is_narrower(lower, upper, least, most):
            self.is_narrowed = True
            self._write_range(own, made, *_whole(lower, upper))

    def _bound_exactly(
        self, own: dict[str, Any], made: dict[str, Any], lower: _Bound | None, upper: _Bound | None, problem: str
    ) -> None:
        """Writes int64 bounds that are not doubles for our own rules; other bounds are a problem."""
        types = {own.get("type")} if isinstance(own.get("type"), str) else set(_texts(own.get("type")))
        least, most = _whole(lower, upper)
        is_outside = (lower is not None and lower.value > _MAX_INT64) or (
            upper is not None and upper.value < _MIN_INT64
        )
        if not types <= {"integer", "null"} or "multipleOf" in own or is_outside or least > most:
            self.problems.append(problem)
            return
        self.inexact.append(problem)
        self._write_range(own, made, least, most)

    @staticmethod
    def _write_range(own: dict[str, Any], made: dict[str, Any], least: int, most: int) -> None:
        given = own.get("type")
        has_null = "null" in (given if isinstance(given, list) else [given]) or own.get("nullable") is True
        made[EXACT] = [whole_numbers(least, most), *(['"null"'] if has_null else [])]

    # Objects and alternatives

    def _rewrite_names(self, own: dict[str, Any], made: dict[str, Any], path: str) -> None:
        """Writes the names that `propertyNames` allows as properties, or as a pattern of them."""
        parts = list(self._apart.parts_of(own.get("propertyNames", True)))
        if any(part is False for part in parts):
            made["maxProperties"] = 0
            return
        rules: dict[str, Any] = {}
        for part in parts:
            rules |= cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        rules = {name: value for name, value in rules.items() if not is_annotation(name)}
        if rules.keys() - _RULES_OF_NAMES - _NO_RULES_OF_NAMES:
            self.problems.append(f"{path}/propertyNames may have enum, const, pattern, minLength and maxLength")
            return
        patterns = _patterns_of_names(rules)
        num_rules = len(patterns) + len({"enum", "const"} & rules.keys())
        if num_rules == 0:
            return
        if num_rules > 1 or {"properties", "patternProperties"} & own.keys():
            self.problems.append(f"{path}/propertyNames is one rule of names, in objects that name no properties")
            return
        others = made.pop("additionalProperties", True)
        reference: Any = others
        if isinstance(others, dict):
            name = f"values of {path}"
            self.definitions[name] = others
            reference = {"$ref": f"#/$defs/{_quoted(name)}"}
        if patterns:
            if regex_violation(patterns[0]) is not None:
                self.problems.append(f"{path}/propertyNames is too large")
            made["patternProperties"] = {_PATTERNS.get(patterns[0], patterns[0]): reference}
        else:
            names = [rules["const"]] if "const" in rules else rules["enum"]
            listed = cast("list[Any]", names) if isinstance(names, list) else []
            if len(listed) > MAX_PROPERTIES:
                self.problems.append(f"{path}/propertyNames must be at most {MAX_PROPERTIES} names")
                return
            made["properties"] = {key: reference for key in listed if isinstance(key, str)}
        made["additionalProperties"] = False

    def _rewrite_one_of(self, own: dict[str, Any], made: dict[str, Any], path: str) -> None:
        listed = own.get("oneOf")
        if not isinstance(listed, list):
            return
        parts, discriminator = cast("list[Any]", listed), own.get("discriminator")
        is_apart = self._apart.all_apart(parts)
        if not is_apart and isinstance(discriminator, dict):
            # By OpenAPI the property that distinguishes them is there, also where it has a default.
            name = cast("dict[str, Any]", discriminator).get("propertyName")
            is_apart = isinstance(name, str) and self._apart.are_distinguished_by(name, parts)
            if is_apart:
                made["required"] = [*made.get("required", ()), name]
        if not is_apart:
            self.problems.append(f"{path}/oneOf {_OVERLAPS}")
        alternatives = made.pop("oneOf")
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": alternatives}]
        else:
            made["anyOf"] = alternatives


_DROPPED = frozenset(("format", "not", "nullable", "propertyNames", "uniqueItems"))
_RULES_OF_NAMES = frozenset(("const", "enum", "pattern", "minLength", "maxLength"))
_NO_RULES_OF_NAMES = frozenset(("type", "format", "$ref", "allOf"))


def _patterns_of_names(rules: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if isinstance(rules.get("pattern"), str):
        found.append(rules["pattern"])
    least, most = rules.get("minLength", 0), rules.get("maxLength")
    if (is_whole(least) and least > 0) or is_whole(most):
        found.append(f"^(?s:.{{{int(least)},{'' if most is None else int(most)}}})$")
    return found


def _quoted(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


# Bounds


class _Bound(NamedTuple):
    name: str
    value: Decimal
    is_exclusive: bool

    @classmethod
    def tightest(cls, schema: dict[str, Any], ending: str) -> _Bound | None:
        """Returns the tightest of two bounds: `minimum` and `exclusiveMinimum`, or the other two."""
        found = [cls(name, Decimal(value), hard) for name, value, hard in bounds_of(schema) if ending in name]
        if ending == "inimum":
            return max(found, key=lambda bound: (bound.value, bound.is_exclusive), default=None)
        return min(found, key=lambda bound: (bound.value, not bound.is_exclusive), default=None)


def _whole(lower: _Bound | None, upper: _Bound | None) -> tuple[int, int]:
    """Returns the least and the most whole number within bounds; a missing or wider bound is that of int64."""
    least, most = _MIN_INT64, _MAX_INT64
    if lower is not None and _MIN_INT64 <= lower.value <= _MAX_INT64:
        whole = int(lower.value.to_integral_value(ROUND_CEILING))
        least = whole + (lower.is_exclusive and whole == lower.value)
    if upper is not None and _MIN_INT64 <= upper.value <= _MAX_INT64:
        whole = int(upper.value.to_integral_value(ROUND_FLOOR))
        most = whole - (upper.is_exclusive and whole == upper.value)
    return least, most


def _is_narrower(lower: _Bound | None, upper: _Bound | None, least: float | None, most: float | None) -> bool:
    """Returns True if doubles exclude whole numbers that the bounds allow.

    The last numbers of int64 do not count: its whole range is far more common than an answer that needs them.
    """
    first, last = _whole(lower, upper)
    return (lower is not None and abs(lower.value) <= _MAX_INT and least is not None and least != first) or (
        upper is not None and abs(upper.value) <= _MAX_INT and most is not None and most != last
    )


def _rounded(lower: _Bound | None, upper: _Bound | None, *, is_integer: bool) -> tuple[float | None, float | None]:
    """Returns the least and the most number, both allowed; None for a missing bound.

    All bounds become inclusive: the library does not apply exclusive bounds that have the same whole part.
    """
    least = None if lower is None else _least(lower.value, lower.is_exclusive, is_integer=is_integer)
    most = None if upper is None else _least(upper.value.copy_negate(), upper.is_exclusive, is_integer=is_integer)
    if most is not None:
        most = -most
    # The library takes no single bound of so many digits.
    if least is not None and most is None and least >= 10**18:
        most = _MAX_INT
    if most is not None and least is None and most <= -(10**18):
        least = -_MAX_INT
    return least, most


def _least(bound: Decimal, is_exclusive: bool, *, is_integer: bool) -> float | None:
    """Returns the least number at or above the bound that the library reads exactly; whole numbers as an int.

    Returns None if every number of an answer is above the bound.
    """
    if bound < -_MAX_INT:
        if not is_integer and bound <= -_UNREACHED:
            return None
        bound, is_exclusive = Decimal(-_MAX_INT), False
    if not is_integer and abs(bound) < _MAX_FRACTIONAL:
        digits_before = bound.adjusted() + 1 if bound else 0
        step = Decimal(1).scaleb(-min(MAX_FRACTION_DIGITS, _DIGITS_OF_DOUBLES - digits_before))
        found = bound.quantize(step, ROUND_CEILING)
        found += step if is_exclusive and found == bound else 0
        return int(found) if is_whole(found) else float(found)
    whole = bound.to_integral_value(ROUND_CEILING)
    least = int(whole) + (is_exclusive and whole == bound)
    # The library writes out the double itself where it bounds integers, and its shortest decimal otherwise.
    double = float(least)
    while int(double) < least or (not is_integer and int(Decimal(repr(double))) < least):
        double = math.nextafter(double, math.inf)
    return int(double)


def _is_empty(lower: _Bound, upper: _Bound, *, is_integer: bool) -> bool:
    least, most = lower.value, upper.value
    if not is_integer:
        return least > most or (least == most and (lower.is_exclusive or upper.is_exclusive))
    first, last = least.to_integral_value(ROUND_CEILING), most.to_integral_value(ROUND_FLOOR)
    return first + (lower.is_exclusive and first == least) > last - (upper.is_exclusive and last == most)


def _as_read(value: float) -> float:
    """Returns the double that the library reads for the decimal that Python writes: it rounds twice."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    scale = float(f"1e{abs(cast(int, exponent))}") if abs(cast(int, exponent)) <= _MAX_SCALE else math.nan
    whole = math.copysign(float(int("".join(map(str, digits)))), value)
    return whole * scale if cast(int, exponent) >= 0 else whole / scale


def _is_taken_as_step(step: float) -> bool:
    """Returns True if the library finds the digits of a step. It multiplies by ten until no fraction is left."""
    while step != math.floor(step):
        step *= 10
    return step < 2**32


# Alternatives


class _GaveUpError(Exception):
    pass


class _Apartness:
    """Finds out if schemas exclude each other, within a bounded number of steps."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._validator = Validator(root)
        self._num_steps = 0

    def all_apart(self, schemas: list[Any]) -> bool:
        """Returns True if no value is valid under two of the schemas, as far as this class can see."""
        try:
            required = [self._required(self._dicts_of(schema)) for schema in schemas]
            return any(
                self.are_distinguished_by(name, schemas) for name in set[str].intersection(*required or [set()])
            ) or all(
                self._are_apart(one, other, 0)
                for index, one in enumerate(schemas)
                for other in schemas[index + 1 :]
            )
        except _GaveUpError:
            return False

    def parts_of(self, schema: Any) -> Iterator[Any]:
        """Yields schemas that must hold together: this one, and those that it refers to or that `allOf` lists."""
        waiting, met = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            self._num_steps += 1
            if id(part) in met:
                continue
            met.add(id(part))
            yield part
            if isinstance(part, dict):
                own = cast("dict[str, Any]", part)
                if isinstance(own.get("$ref"), str):
                    waiting.append(pointed_at(self._root, own["$ref"]))
                if isinstance(own.get("allOf"), list):
                    waiting += own["allOf"]

    def are_distinguished_by(self, name: str, schemas: list[Any]) -> bool:
        """Returns True if all are schemas of objects that list the values of this property, and share none."""
        found: list[Any] = []
        for schema in schemas:
            parts = self._dicts_of(schema)
            values = self._values_of(list(self._schemas_of(name, parts)))
            if self._num_steps > _MAX_STEPS or values is None or _types_of(parts) != {"object"}:
                return False
            self._num_steps += len(values)
            found += set(map(canonical, values))
        return len(set(found)) == len(found)

    def _schemas_of(self, name: str, parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                yield from self._dicts_of(cast("dict[str, Any]", properties)[name])

    def _required(self, parts: list[dict[str, Any]]) -> set[str]:
        """Returns the required properties. Raises `_GaveUpError` after too many steps."""
        found = {name for part in parts for name in _texts(part.get("required"))}
        self._num_steps += len(found)
        if self._num_steps > _MAX_STEPS:
            raise _GaveUpError
        return found

    def _dicts_of(self, schema: Any) -> list[dict[str, Any]]:
        return [cast("dict[str, Any]", part) for part in self.parts_of(schema) if isinstance(part, dict)]

    def _values_of(self, parts: list[dict[str, Any]]) -> list[Any] | None:
        """Returns the values that a schema lists, or None if it lists none."""
        for part in parts:
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return part["enum"]
        return None

    def _are_apart(self, one: Any, other: Any, depth: int) -> bool:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise _GaveUpError
        if depth > _MAX_DEPTH:
            return False
        all_parts = list(self.parts_of(one)), list(self.parts_of(other))
        if False in (*all_parts[0], *all_parts[1]):
            return True
        first, second = (
            [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict)] for parts in all_parts
        )
        if not _types_of(first) & _types_of(second):
            return True
        for parts, schema in ((first, other), (second, one)):
            values = self._values_of(parts)
            self._num_steps += len(values or ())
            if values is not None and not any(self._validator.is_valid(schema, value) for value in values):
                return True
            for part in parts:
                for name in ("anyOf", "oneOf"):
                    if isinstance(part.get(name), list) and all(
                        self._are_apart(each, schema, depth + 1) for each in part[name]
                    ):
                        return True
        are_objects = _types_of(first) & _types_of(second) == {"object"}
        return are_objects and self._have_apart_properties(first, second, depth)

    def _have_apart_properties(self, first: list[dict[str, Any]], second: list[dict[str, Any]], depth: int) -> bool:
        required = self._required([*first, *second])
        return any(
            self._are_apart(one, other, depth + 1)
            for name in sorted(required)
            for one in _schemas_of_property(first, name)
            for other in _schemas_of_property(second, name)
        )


def _schemas_of_property(parts: list[dict[str, Any]], name: str) -> Iterator[Any]:
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield cast("dict[str, Any]", properties)[name]
        elif "patternProperties" not in part:
            yield part.get("additionalProperties", True)


def _texts(names: Any) -> Iterator[str]:
    if isinstance(names, list):
        yield from (name for name in cast("list[Any]", names) if isinstance(name, str))


def _types_of(parts: list[dict[str, Any]]) -> set[str]:
    """Returns the types of values that may be valid under all parts; `number` stands for those with a fraction."""
    possible = set(_TYPES)
    for part in parts:
        listed = part.get("type")
        if listed is not None:
            names = set(_texts(listed)) if isinstance(listed, list) else {listed}
            names |= {"integer"} if "number" in names else set()
            possible &= names | ({"null"} if part.get("nullable") is True else set())
    return possible
