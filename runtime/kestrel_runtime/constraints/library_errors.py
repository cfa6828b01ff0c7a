"""Says why and where the grammar library refuses a constraint, in our words or in those of its known errors.

The library names no place. So the schemas within a refused one are compiled one after the other, until no schema
within the last is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import quote, unquote

from kestrel_runtime.api.constraints import LISTS, NAMED, SUBSCHEMAS, pointed_at, pointer_step

_GROUP, _MAX_TRIALS = 16, 64
_MAX_S = 0.3
"""The longest search for a place, in seconds: the request waits for a second at most."""
_ROOT = "x-root"
_HEAD = re.compile(r"at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_QUOTED_GRAMMAR = re.compile(r"\n +1 \| |\n<non-verbose/>")
_UNSATISFIABLE = "Unsatisfiable schema: "
_TOO_COMPLEX = "it is too complex"
# Messages that hold nothing but what the caller wrote, by what they begin with.
_KNOWN = re.compile(
    r"(?:"
    r"(?:min|max)(?:Items|Length|Properties) \(\d+\) is greater than .*"
    r"|(?:exclusiveM|m)inimum \(.*\) is (?:greater than|equal to) .*|integer interval .* contains no integer values"
    r"|range .* does not contain a multiple of .*|required property '.*' is unsatisfiable|required > maxProperties"
    r"|patternProperty regexes /.*/ and /.*/ are not disjoint"
    r"|(?:Expected|Invalid type|enum must be|anyOf must be|oneOf must be|allOf must be|type must be"
    r"|properties must be|prefixItems must be|\$ref must be|Value for 'multipleOf' has too many digits).*"
    r"|circular references with sibling keys are not supported.*|incompatible types|incompatible boolean values"
    r"|min/maxProperties only supported when all keys listed in \"properties\" are required"
    r")",
    re.DOTALL,
)
_OWN_WORDS = MappingProxyType(
    {
        "anyOf is empty": "no value is allowed: anyOf, enum or not leaves none",
        "All options in anyOf": "no alternative of anyOf can be satisfied",
        "No options in anyOf": "no value is allowed",
        "schema is false": "no value is allowed",
        "Regex is empty": "pattern, format, minLength and maxLength contradict each other",
        "can't determine if patternProperty": "patternProperties are too complex to be compared",
        "Unable to determine if regex is empty": "pattern and minLength or maxLength together are too complex",
        "NoExtensionBias": "the schema requires itself without end",
        "Schema intersection stack level": "the schema requires itself without end",
        "Pointer '": "$ref points to nothing",
        "Anchor '": "$ref points to nothing",
    }
)


def cause_of(error: str) -> str:
    """Returns the cause that an error of the library states, without the rest of its message."""
    text = _QUOTED_GRAMMAR.split(_HEAD.sub("", error, count=1), maxsplit=1)[0].strip().removeprefix(_UNSATISFIABLE)
    _, is_regex, cause = text.rpartition("\nerror: ")
    if is_regex and "regex parse error" in text:
        return f"the expression is refused: {cause.splitlines()[0]}"
    for beginning, words in _OWN_WORDS.items():
        if text.startswith(beginning):
            return words
    return text if _KNOWN.fullmatch(text) else _TOO_COMPLEX


def located(schema: dict[str, Any], error: str, error_of: Callable[[dict[str, Any]], str]) -> str:
    """Returns the JSON pointer of the innermost part of a refused schema that is refused by itself, and the cause.

    `error_of` compiles a schema and returns its error, or "".
    """
    whole = {_ROOT: _moved(schema)}
    end = time.monotonic() + _MAX_S

    def error_in(places: list[tuple[str, ...]]) -> str:
        refs = [{"$ref": _ref_of((_ROOT, *place))} for place in places]
        return (
            ""
            if time.monotonic() > end
            else error_of({**(refs[0] if len(refs) == 1 else {"anyOf": refs}), **whole})
        )

    steps: tuple[str, ...] = ()
    part: Any = schema
    while isinstance(part, dict):
        is_unsatisfiable = _UNSATISFIABLE in error
        places = list(_parts(cast("dict[str, Any]", part), steps, is_unsatisfiable=is_unsatisfiable))
        if not is_unsatisfiable:  # alternatives together are refused where one of them is
            groups = [places[start : start + _GROUP] for start in range(0, len(places), _GROUP)]
            places = next((group for group in groups if error_in(group)), [])
        found = next(((place, text) for place in places[:_MAX_TRIALS] if (text := error_in([place]))), None)
        if found is None:
            break
        (steps, error), part = found, pointed_at(schema, _ref_of(found[0]))
    if "regex parse error" in error and isinstance(part, dict) and "pattern" in part:
        steps = (*steps, "pattern")
    return f"{''.join(f'/{pointer_step(step)}' for step in steps)} cannot be used: {cause_of(error)}".lstrip()


def _ref_of(steps: tuple[str, ...]) -> str:
    return "#" + "".join("/" + quote(step.replace("~", "~0").replace("/", "~1"), safe="~") for step in steps)


def _moved(schema: Any) -> Any:
    """Returns a schema whose references are valid in its new place, below `_ROOT`."""
    if not isinstance(schema, dict):
        return schema
    own = dict(cast("dict[str, Any]", schema))
    for name, value in own.items():
        if name in NAMED and isinstance(value, dict):
            own[name] = {key: _moved(part) for key, part in cast("dict[str, Any]", value).items()}
        elif name in LISTS and isinstance(value, list):
            own[name] = list(map(_moved, cast("list[Any]", value)))
        elif name in SUBSCHEMAS:
            own[name] = _moved(value)
        elif name == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/"):
            own[name] = f"#/{_ROOT}{value[1:]}"
    return own


def _parts(schema: dict[str, Any], steps: tuple[str, ...], *, is_unsatisfiable: bool) -> Iterator[tuple[str, ...]]:
    """Yields the steps from the root to each schema within one that may be the reason for its refusal.

    A part that nothing satisfies is no reason if the part may be absent.
    """
    ref = schema.get("$ref")
    if is_unsatisfiable and isinstance(ref, str) and ref.startswith("#/"):
        yield tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(ref).split("/")[1:])
    required = schema.get("required")
    for name in NAMED:
        for key in cast("dict[str, Any]", schema.get(name) or {}):
            if not is_unsatisfiable or (name == "properties" and isinstance(required, list) and key in required):
                yield (*steps, name, key)
    least = schema.get("minItems", 0)
    for name in LISTS:
        if isinstance(schema.get(name), list):
            for index in range(len(cast("list[Any]", schema[name]))):
                if not is_unsatisfiable or name.endswith("Of") or (isinstance(least, int) and index < least):
                    yield (*steps, name, str(index))
    for name in SUBSCHEMAS:
        if isinstance(schema.get(name), dict) and (not is_unsatisfiable or (name == "items" and least)):
            yield (*steps, name)
