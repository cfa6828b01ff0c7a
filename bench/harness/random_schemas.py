"""Random JSON schemas within the bounds of the server, whose answers come to an end."""

import random
from typing import Any

_NAMES = ("name", "colour", "count", "box", "tags", "is open", "größe", 'say "hi"', "a/b", "x~y", "10", "")
_PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]+( [0-9]{1,3})?$", "^(red|green|blue)$", "[0-9]{4}", "^x*y?z{1,3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_MAX_DEPTH = 4


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """One schema. Texts, lists and further properties are bounded, so that few answers are cut short."""
    kinds = ["string", "integer", "number", "boolean", "null", "const", "enum"]
    if depth < _MAX_DEPTH:
        kinds += ["object", "object", "array", "array", "anyOf", "allOf", "ref", "nullable"]
    kind = "object" if depth == 0 and chance.random() < 0.7 else chance.choice(kinds)
    return _MAKERS[kind](chance, depth)


def _string(chance: random.Random, _: int) -> dict[str, Any]:
    form = chance.randrange(3)
    if form == 0:
        least = chance.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 12)}
    if form == 1:
        return {"type": "string", "pattern": chance.choice(_PATTERNS), "maxLength": 24}
    return {"type": "string", "format": chance.choice(_FORMATS)}


def _integer(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(-1000, 1000)
    bounds: dict[str, Any] = {"minimum": least, "maximum": least + chance.randint(0, 2000)}
    if chance.random() < 0.3:
        bounds = {"exclusiveMinimum": least, "exclusiveMaximum": least + chance.randint(2, 2000)}
    elif chance.random() < 0.3:
        return {"type": "integer", "multipleOf": chance.choice((1, 2, 5, 10, 7)), "minimum": 0, "maximum": 500}
    return {"type": "integer", **bounds}


def _number(chance: random.Random, _: int) -> dict[str, Any]:
    least = round(chance.uniform(-50, 50), chance.randint(0, 3))
    return {"type": "number", "minimum": least, "maximum": least + chance.choice((0.5, 1, 25, 1000))}


def _values(chance: random.Random) -> list[Any]:
    values = ("red", "blue", "", "ünïcode ✓", 'qu"ote\\', 0, -3, 2.5, True, None, [1, "a"], {"k": {"v": []}})
    return chance.sample(values, chance.randint(1, 5))


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(0, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }
    if chance.random() < 0.2:
        schema["title"], schema["description"] = "A title", "What it is."
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + chance.randint(0, 3)}
    if least and chance.random() < 0.4:
        first = [random_schema(chance, depth + 1) for _ in range(least)]
        return {**schema, "prefixItems": first, "items": random_schema(chance, depth + 1)}
    return {**schema, "items": random_schema(chance, depth + 1)}


def _ref(chance: random.Random, depth: int) -> dict[str, Any]:
    # Definitions stand where they are used: a reference is a pointer from the root, so only the root may have one.
    part = random_schema(chance, depth + 1)
    if depth:
        return part
    tree = {
        "type": "object",
        "properties": {"value": part, "children": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"t": tree}, "$ref": "#/$defs/t"}


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda chance, depth: {"type": "boolean"},
    "null": lambda chance, depth: {"type": "null"},
    "const": lambda chance, depth: {"const": _values(chance)[0]},
    "enum": lambda chance, depth: {"enum": _values(chance)},
    "object": _object,
    "array": _array,
    "anyOf": lambda chance, depth: {
        "anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]
    },
    "allOf": lambda chance, depth: {"allOf": [random_schema(chance, depth + 1)]},
    "ref": _ref,
    "nullable": lambda chance, depth: {"type": [chance.choice(("boolean", "integer")), "null"]},
}
