"""Writes grammars of schemas with numbers that the library would change by rounding.

The library accepts rules around its own schemas. So the objects, lists and alternatives that lead to such a number
become rules here, and everything else remains a schema for the library.
"""

from __future__ import annotations

import json
from typing import Any, cast

from kestrel_runtime.api.constraints import pointed_at

EXACT = "x-exact"
"""The keyword of a schema for the library that holds the expressions of its values, in the syntax of rules."""
_MAX_CHARS, _MAX_RULES = 2**18, 512
"""The largest size of a grammar, in characters and in rules."""
_MAX_PART = 64
"""The most items of a list that are written out."""
_DEFINITIONS = ("$defs", "definitions")
_CHARACTER = r'(\\["\\bfnrt]|[^"\\\x00-\x1F\x7F])'


class NotExpressibleError(Exception):
    """A schema has keywords next to such a number, or around it, that only the library supports."""


def exact_rules(schema: dict[str, Any], form: dict[str, Any]) -> str:
    """Returns the rules of a schema for the library in which some schemas have `EXACT`.

    `form` defines the separators that the library writes. Raises `NotExpressibleError`.
    """
    writer = _Writer(schema, form)
    start = writer.rule(schema)
    rules = "\n".join((f"start: {start}", *writer.rules))
    if len(rules) > _MAX_CHARS or len(writer.rules) > _MAX_RULES:
        raise NotExpressibleError
    return rules


def whole_numbers(least: int, most: int) -> str:
    """Returns an expression of the whole numbers from `least` to `most`."""
    parts = [f"-{part}" for part in _ranges(max(1, -most), -least)] if least < 0 else []
    return "/(" + "|".join([*parts, *_ranges(max(0, least), most)]) + ")/"


def literal(value: Any) -> str:
    """Returns an expression of a JSON value, divided as the library would write it."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        return '"{" ' + ' ", " '.join(f'{literal(name)} ": " {literal(item)}' for name, item in members) + ' "}"'
    if isinstance(value, list):
        return '"[" ' + ' ", " '.join(map(literal, cast("list[Any]", value))) + ' "]"'
    is_plain = value is None or isinstance(value, str | bool)
    return json.dumps(json.dumps(value, ensure_ascii=False) if is_plain else str(value), ensure_ascii=False)


def _ranges(least: int, most: int) -> list[str]:
    """Yields expressions without a sign of the whole numbers from `least`, which is not below 0, to `most`."""
    found: list[str] = []
    while least <= most:
        # The largest block of numbers that begin alike, from the least one on.
        size = 1
        while least % (size * 10) == 0 and least >= size * 10 and least + size * 10 - 1 <= most:
            size *= 10
        digit, num_free = least // size % 10, len(str(size)) - 1
        last = min(9, digit + (most - least + 1) // size - 1)
        head = str(least // size // 10) if least // size >= 10 else ""
        free = f"[0-9]{{{num_free}}}" if num_free else ""
        found.append(f"{head}[{digit}-{last}]{free}")
        least += (last - digit + 1) * size
    return found


class _Writer:
    def __init__(self, root: dict[str, Any], form: dict[str, Any]) -> None:
        self.rules: list[str] = []
        self._root = root
        self._form = form
        self._names: dict[int, str] = {}  # of rules, by the identity of the schema
        self._known: dict[int, bool] = {}
        self._of_texts: dict[str, str] = {}  # rules of schemas that are written alike

    def rule(self, schema: Any) -> str:
        """Returns the name of the rule of a schema."""
        name = self._names.get(id(schema))
        if name is None and not self._has_exact(schema):
            text = self._of_library(schema)
            if text not in self._of_texts:
                self._of_texts[text] = self._named(text)
            name = self._names[id(schema)] = self._of_texts[text]
        elif name is None:
            name = self._names[id(schema)] = f"r{len(self._names)}"
            self.rules.append("")  # reserves its position until the rules that it refers to are written
            place = len(self.rules) - 1
            self.rules[place] = f"{name}: {self._body(schema)}"
        return name

    def _body(self, own: dict[str, Any]) -> str:
        keywords = own.keys() - {*_DEFINITIONS, "$anchor"}
        if EXACT in own and keywords <= _NEXT_TO_EXACT and not {"const", "enum"} <= keywords:
            return " | ".join(own[EXACT])
        if keywords == {"$ref"}:
            return self.rule(pointed_at(self._root, own["$ref"]))
        if keywords in ({"anyOf"}, {"allOf"}) and ("anyOf" in own or len(own["allOf"]) == 1):
            return " | ".join(map(self.rule, own.get("anyOf", own.get("allOf"))))
        if own.get("type") == "object" and keywords <= _OF_OBJECTS:
            return self._object(own)
        if own.get("type") == "array" and keywords <= _OF_ARRAYS:
            return self._array(own)
        raise NotExpressibleError

    def _of_library(self, schema: Any) -> str:
        own: dict[str, Any] = {"anyOf": [schema]} if not isinstance(schema, dict) else {**schema}
        for name in _DEFINITIONS:
            if name in self._root and '"$ref"' in json.dumps(own, default=float):
                own[name] = {
                    key: part
                    for key, part in cast("dict[str, Any]", self._root[name]).items()
                    if not self._has_exact(part)
                }
        return f"%json {json.dumps({**own, 'x-guidance': self._form}, default=float)}"

    def _has_exact(self, schema: Any) -> bool:
        """Returns True if a schema, or one that it leads to, has `EXACT`. Definitions count at their references."""
        if isinstance(schema, list):
            return any(map(self._has_exact, cast("list[Any]", schema)))
        if not isinstance(schema, dict):
            return False
        if id(cast(Any, schema)) not in self._known:
            self._known[id(cast(Any, schema))] = False  # for one that leads to itself
            own = cast("dict[str, Any]", schema)
            ref = own.get("$ref")
            self._known[id(cast(Any, schema))] = (
                EXACT in own
                or (isinstance(ref, str) and self._has_exact(pointed_at(self._root, ref)))
                or any(self._has_exact(part) for name, part in own.items() if name not in _DEFINITIONS)
            )
        return self._known[id(cast(Any, schema))]

    def _object(self, schema: dict[str, Any]) -> str:
        properties = cast("dict[str, Any]", schema.get("properties", {}))
        required = cast("list[Any]", schema.get("required", []))
        others = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in required if name not in properties)]
        pairs = [
            (f'{literal(name)} ": " {self.rule(properties.get(name, others))}', name in required) for name in names
        ]
        if others is not False:
            taken = "".join(f" & ~/{_escaped(json.dumps(name, ensure_ascii=False))}/" for name in names)
            terminal = f"N{len(self.rules)}"
            self.rules.append(f'{terminal}: /"{_CHARACTER}*"/{taken}')
            pair = f'{terminal} ": " {self.rule(others)}'
            pairs.append((f'{pair} (", " {pair})*', False))
        return f'"{{" {self._sequence(pairs)} "}}"'

    def _sequence(self, pairs: list[tuple[str, bool]]) -> str:
        """Returns the expression of pairs in this order, of which those that are not required may be left out."""
        first, after = '""', '""'  # of the remaining pairs: if none, or one, is before them
        for pair, is_required in reversed(pairs):
            chosen = self._named(f"{pair} {after}")
            later = self._named(f'", " {chosen}')
            first = chosen if is_required else self._named(f"{chosen} | {first}")
            after = later if is_required else self._named(f"{later} | {after}")
        return first

    def _named(self, body: str) -> str:
        name = f"s{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _array(self, schema: dict[str, Any]) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = cast("list[Any]", rest), schema.get("additionalItems", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False:
            most = min(len(first), len(first) if most is None else most)
        if max(least, most or 0, len(first)) > _MAX_PART or (most is not None and least > most):
            raise NotExpressibleError
        num_written = most if most is not None else max(least, len(first))
        end = '""'
        if most is None:
            end = self._named(f'(", " {self.rule(rest)})*')
        for index in reversed(range(num_written)):
            comma = '", " ' if index else ""
            item = f"{comma}{self.rule(first[index] if index < len(first) else rest)} {end}"
            end = self._named(item if index < least else f'{item} | ""')
        if num_written == 0 and most is None:
            end = self._named(f'{self.rule(rest)} {end} | ""')
        return f'"[" {end} "]"'


_NEXT_TO_EXACT = frozenset((EXACT, "const", "enum", "type", "minimum", "maximum", "format"))
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", *_DEFINITIONS, "$anchor"))
_OF_ARRAYS = frozenset(("type", "items", "prefixItems", "additionalItems", "minItems", "maxItems", *_DEFINITIONS))


def _escaped(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):X}}}" for character in text)
