"""Defines the constraint of an answer: one of several texts, a regular expression, or a JSON schema.

Bounds limit the work of a constraint before anything is compiled: the size of an expression with its repetitions
written out; the properties of a schema, its alternatives, and their combinations, which `allOf` multiplies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, cast
from urllib.parse import unquote

from kestrel_runtime.api.errors import Violation

MAX_CHOICES = 256
MAX_CHOICE_CHARS = 512
MAX_CHOICES_CHARS = 16_384
"""The most characters of all choices together."""

MAX_REGEX_CHARS = 2_048
MAX_WRITTEN_OUT = 1_000
"""The most characters and classes of an expression with its repetitions written out.

An operand of `?` or `*` counts twice.
"""
MAX_GROUP_DEPTH = 16
_CLASS_SIZES = {"p": 8, "P": 8, "w": 4, "W": 4}

MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_NODES = 4_096
"""The most objects, lists, names and values in the text of a schema."""
MAX_ENUM_VALUES = 1_024
MAX_LITERAL_CHARS = 2_048
"""The most characters of a text in `const` or `enum`."""
MAX_NAME_CHARS = 256
"""The most characters in the name of a property."""
MAX_PROPERTIES = 512
"""The most properties of all objects of a schema together."""
MAX_ALTERNATIVES = 256
"""The most alternatives in all lists of `anyOf` and `oneOf` together."""
MAX_ALL_OF = 8
"""The most schemas in one list of `allOf`."""
MAX_COMBINATIONS = 64
"""The most combinations of alternatives that must hold together, or that contain each other."""
MAX_MULTIPLE = 1_000
"""The largest `multipleOf`, without its trailing zeros and its decimal point."""
_MAX_REFS = 64
"""The longest chain of references that lead to each other."""
_SHOWN_CHARS = 32
_MOST_PROBLEMS = 20
_BRACKETS = re.compile(r"[\[{\]}]")
_TOO_MANY_COMBINATIONS = f"must combine at most {MAX_COMBINATIONS} alternatives, by allOf or within each other"
_TOO_MANY_REFS = f"must have at most {_MAX_REFS} references that lead to each other"

_PATTERNS = "patternProperties"
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SUBSCHEMAS = ("additionalItems", "additionalProperties", "items")
"""Keywords that may hold a schema; `items` may hold a list of them as well."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords that hold a list of schemas."""
NAMED = ("properties", _PATTERNS, "$defs", "definitions")
"""Keywords that hold schemas by name."""
_KEYWORDS = frozenset(
    (
        *("$anchor", "$id", "$ref", "const", "enum", "format", "nullable", "pattern", "propertyNames", "required"),
        *("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties", "type"),
        *(*NUMBER_BOUNDS, *SUBSCHEMAS, *LISTS, *NAMED),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("$comment", "$schema", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema", "default"),
        *("deprecated", "description", "discriminator", "errorMessage", "example", "examples", "externalDocs"),
        *("id", "markdownDescription", "readOnly", "title", "writeOnly", "xml"),
    )
)
_EXPONENTS = range(-324, 309)
"""Exponents of numbers that a schema may contain: those of doubles."""
_BEYOND_DOUBLES = 10**9


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have. Exactly one of the three fields is set.

    `choices`: the answer is one of these texts. `regex`: the whole answer matches, in the syntax of Rust's `regex`,
    which has neither look-around nor back references. `json_schema`: the answer is JSON, with one space after each
    comma and colon, that is valid under this schema (given as text).
    """

    choices: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: str | None = None

    def violations(self) -> Iterator[Violation]:
        """Yields every violation of the contract, with paths that begin with `constraint`."""
        if bool(self.choices) + (self.regex is not None) + (self.json_schema is not None) != 1:
            yield Violation("constraint", "must be exactly one of choices, regex and json_schema")
        yield from self._choice_violations()
        if self.regex is not None:
            problem = "must not be empty" if not self.regex else regex_violation(self.regex)
            if problem is not None:
                yield Violation("constraint.regex", problem)
        if self.json_schema is not None:
            for problem in schema_problems(self.json_schema):
                yield Violation("constraint.json_schema", problem)

    def _choice_violations(self) -> Iterator[Violation]:
        if len(self.choices) > MAX_CHOICES:
            yield Violation("constraint.choices", f"must be at most {MAX_CHOICES} texts")
            return
        if sum(map(len, self.choices)) > MAX_CHOICES_CHARS:
            yield Violation("constraint.choices", f"must be at most {MAX_CHOICES_CHARS} characters long together")
        for index, choice in enumerate(self.choices):
            if not 1 <= len(choice) <= MAX_CHOICE_CHARS:
                yield Violation(f"constraint.choices[{index}]", f"must be 1 to {MAX_CHOICE_CHARS} characters long")


# Regular expressions


def regex_violation(pattern: str) -> str | None:
    """Returns the violation of the size limit by an expression, or None. The syntax is not checked here."""
    if len(pattern) > MAX_REGEX_CHARS:
        return f"must be at most {MAX_REGEX_CHARS} characters long"
    try:
        size = _written_out(pattern)
    except _TooDeepError:
        return f"must have groups at most {MAX_GROUP_DEPTH} levels deep"
    if size > MAX_WRITTEN_OUT:
        return f"must be at most {MAX_WRITTEN_OUT} characters and classes long with its repetitions written out"
    return None


class _TooDeepError(Exception):
    pass


def _written_out(pattern: str) -> int:
    """Returns the size of an expression with its repetitions written out.

    A stack holds the sizes of open groups; `last` is the size of the operand of a repetition that follows.
    """
    totals, last, place = [0], 0, 0
    while place < len(pattern):
        character = pattern[place]
        place += 1
        if character == "{":
            most, after = _repetition(pattern, place)
            if most is not None:
                totals[-1] += last * max(most - 1, 0)
                last, place = last * max(most, 1), after
                continue
        if character == "(":
            if len(totals) > MAX_GROUP_DEPTH:
                raise _TooDeepError
            totals.append(0)
            last = 0
        elif character == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif character in "*?":
            totals[-1] += last
        elif character not in "+|":
            last = 1
            if character == "\\":
                last = _CLASS_SIZES.get(pattern[place : place + 1], 1)
                place = _after_escape(pattern, place)
            elif character == "[":
                place = _after_class(pattern, place)
            totals[-1] += last
    return sum(totals)


def _repetition(pattern: str, start: int) -> tuple[int | None, int]:
    """Returns the maximum of the repetition `{m}`, `{m,}` or `{m,n}` whose inside begins at `start`, and its
    end."""
    end = pattern.find("}", start)
    least, comma, most = pattern[start:end].replace(" ", "").partition(",") if end > 0 else ("", "", "")
    if not least.isdecimal() or (most and not most.isdecimal()):
        return None, start
    # A number with more digits is too large in any case, and `int` takes its time for very long ones.
    return int((most if comma and most else least)[:9]), end + 1


def _after_escape(pattern: str, start: int) -> int:
    """Returns the end of the escape whose letter is at `start`; a property or a code point may have braces."""
    if pattern[start : start + 1] in ("p", "P", "x", "u", "U") and pattern[start + 1 : start + 2] == "{":
        return pattern.find("}", start) + 1 or len(pattern)
    return start + 1


def _after_class(pattern: str, start: int) -> int:
    """Returns the end of the class whose inside begins at `start`. Classes may be nested."""
    depth, place = 1, start
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    while place < len(pattern) and depth:
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
        place += 1
    return place


# JSON schemas


def schema_problems(text: str) -> list[str]:
    """Returns the first twenty problems of a schema, each with its JSON pointer."""
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        return [f"must be at most {MAX_SCHEMA_BYTES} bytes long"]
    if _nesting(text) > MAX_SCHEMA_DEPTH:
        return [f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep"]
    try:
        schema = parse_schema(text)
    except ValueError:
        return ["must be JSON"]
    if not isinstance(schema, dict):
        return ["must be an object"]
    if _num_nodes(schema) > MAX_SCHEMA_NODES:
        return [f"must have at most {MAX_SCHEMA_NODES} names and values"]
    may_have_halves = not text.isascii() or "\\u" in text
    if may_have_halves and (halves := list(_halves(schema, ""))):
        return halves[:_MOST_PROBLEMS]
    walk = _Walk()
    walk.schema(schema, "")
    if walk.num_properties > MAX_PROPERTIES:
        walk.add("", f"must have at most {MAX_PROPERTIES} properties")
    if walk.num_alternatives > MAX_ALTERNATIVES:
        walk.add("", f"must have at most {MAX_ALTERNATIVES} alternatives in anyOf and oneOf")
    if not walk.problems:
        problem = _Combinations(cast("dict[str, Any]", schema)).problem()
        return [] if problem is None else [problem]
    return walk.problems[:_MOST_PROBLEMS]


def parse_schema(text: str) -> Any:
    """Returns the value of a JSON text, with integers as they are and decimals instead of floats.

    Raises ValueError if it is no JSON.
    """
    return json.loads(text, parse_float=decimal_of, parse_constant=_refuse_constant)


def decimal_of(text: str) -> Decimal:
    """Returns the value of a number in a JSON text. A number whose exponent no decimal can have becomes one that is
    as far beyond every double."""
    try:
        return Decimal(text)
    except InvalidOperation:
        digits, _, exponent = text.lower().partition("e")
        return (
            Decimal(f"{digits}e{'-' * exponent.startswith('-')}{_BEYOND_DOUBLES}")
            if Decimal(digits)
            else Decimal(0)
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def is_annotation(keyword: str) -> bool:
    """Returns True if a keyword has no effect on which values are valid."""
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


def pointed_at(root: Any, ref: str) -> Any:
    """Returns the schema that a `$ref` within `root` points to; True where there is none or it names an anchor."""
    target = root
    if ref.startswith("#/") or ref == "#":
        for step in unquote(ref).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict):
                target = cast("dict[str, Any]", target).get(name, True)
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(cast("list[Any]", target)):
                target = cast("list[Any]", target)[int(name)]
            else:
                return True
        return target
    return True


def pointer_step(name: str) -> str:
    """Returns the step of a JSON pointer that leads to this name; a long one is cut short."""
    step = name.replace("~", "~0").replace("/", "~1")
    return step if len(step) <= _SHOWN_CHARS else f"{step[:_SHOWN_CHARS]}…"


def _nesting(text: str) -> int:
    """Returns the depth of nested brackets, those inside of texts included.

    Recursive functions read only texts that have passed this bound.
    """
    depth = most = 0
    for bracket in _BRACKETS.findall(text):
        if bracket in "[{":
            depth += 1
            most = max(most, depth)
        else:
            depth -= 1
    return most


def _num_nodes(value: Any) -> int:
    count, left = 0, [value]
    while left:
        item = left.pop()
        count += 1
        if isinstance(item, dict):
            members = cast("dict[str, Any]", item)
            count += len(members)
            left += members.values()
        elif isinstance(item, list):
            left += cast("list[Any]", item)
    return count


def _halves(value: Any, path: str) -> Iterator[str]:
    """Yields a problem for each name and text with half of a surrogate pair, which is not valid Unicode."""
    if isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            written = escaped_halves(name)
            place = f"{path}/{pointer_step(written)}"
            if written != name:
                yield f"{place} holds half of a surrogate pair"
            yield from _halves(item, place)
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _halves(item, f"{path}/{index}")
    elif isinstance(value, str) and escaped_halves(value) != value:
        yield f"{path} holds half of a surrogate pair"


def escaped_halves(text: str) -> str:
    """Returns the text with an escape such as `\\ud800` for each half of a surrogate pair, which is not valid
    Unicode."""
    return text.encode(errors="backslashreplace").decode()


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the schemas within a schema, definitions included: keyword, path below the schema, value."""
    for name in NAMED:
        named = schema.get(name)
        if isinstance(named, dict):
            for key, part in cast("dict[str, Any]", named).items():
                yield name, f"/{name}/{pointer_step(key)}", part
    for name in LISTS:
        listed = schema.get(name)
        if isinstance(listed, list):
            for index, part in enumerate(cast("list[Any]", listed)):
                yield name, f"/{name}/{index}", part
    for name in (*SUBSCHEMAS, "propertyNames"):
        part = schema.get(name)
        if part is not None and not isinstance(part, list):
            yield name, f"/{name}", part


class _Walk:
    """Visits each schema within a schema once and collects the problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.num_properties = 0
        self.num_alternatives = 0

    def schema(self, schema: Any, path: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self.add(path, "must be an object or a boolean")
            return
        own = cast("dict[str, Any]", schema)
        for name, value in own.items():
            problem = _keyword_problem(name, value)
            if problem is not None:
                self.add(f"{path}/{pointer_step(name)}", problem)
        for pattern in own.get(_PATTERNS) or {} if isinstance(own.get(_PATTERNS), dict) else ():
            problem = regex_violation(pattern)
            if problem is not None:
                self.add(f"{path}/{_PATTERNS}/{pointer_step(pattern)}", problem)
        for keyword, below, part in _parts(own):
            self.num_properties += keyword in ("properties", _PATTERNS)
            self.num_alternatives += keyword in ("anyOf", "oneOf")
            self.schema(part, path + below)

    def add(self, path: str, problem: str) -> None:
        self.problems.append(f"{path} {problem}".lstrip())


def _keyword_problem(name: str, value: Any) -> str | None:
    """Returns the problem of a keyword and its value, without the schemas in it."""
    if is_annotation(name):
        return None
    if name == "not":
        return None if isinstance(value, bool) or value == {} else "is not supported, but for {} and booleans"
    if name == "uniqueItems":
        return None if value is False else "is not supported, unless it is false"
    if name not in _KEYWORDS:
        return "is not supported"
    if name in (*NUMBER_BOUNDS, "const", "enum") and not all(map(_is_double, _numbers_in(value))):
        return "must have numbers within the range of a double"
    if name == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        return "must begin with #: other documents are not read"
    if name == "enum" and isinstance(value, list) and len(cast("list[Any]", value)) > MAX_ENUM_VALUES:
        return f"must be at most {MAX_ENUM_VALUES} values"
    if name in ("const", "enum") and _longest_text(value) > MAX_LITERAL_CHARS:
        return f"must have texts of at most {MAX_LITERAL_CHARS} characters"
    if name in ("properties", "required") and _longest_name(value) > MAX_NAME_CHARS:
        return f"must have names of at most {MAX_NAME_CHARS} characters"
    if name == "allOf" and isinstance(value, list) and len(cast("list[Any]", value)) > MAX_ALL_OF:
        return f"must be at most {MAX_ALL_OF} schemas"
    if name in NAMED and not isinstance(value, dict):
        return "must be an object"
    if name == "multipleOf" and not _is_simple(value):
        return f"must be a number of at most {MAX_MULTIPLE}, without its zeros and its decimal point"
    return regex_violation(value) if name == "pattern" and isinstance(value, str) else None


def _longest_text(value: Any) -> int:
    """Returns the number of characters of the longest text within a value, names included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [part for member in cast("dict[str, Any]", value).items() for part in member]
    return max(map(_longest_text, cast("list[Any]", value)), default=0) if isinstance(value, list) else 0


def _longest_name(names: Any) -> int:
    listed = list(cast("Iterable[Any]", names)) if isinstance(names, dict | list) else []
    return max((len(name) for name in listed if isinstance(name, str)), default=0)


def _numbers_in(value: Any) -> Iterator[int | Decimal]:
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _numbers_in(item)
    elif isinstance(value, int | Decimal):
        yield value


def _is_double(number: int | Decimal) -> bool:
    return not number or Decimal(number).adjusted() in _EXPONENTS


def _is_simple(multiple: Any) -> bool:
    if isinstance(multiple, bool) or not isinstance(multiple, int | Decimal):
        return False
    digits = "".join(map(str, Decimal(multiple).as_tuple().digits)).strip("0")
    return len(digits) <= len(str(MAX_MULTIPLE)) and int(digits or "0") <= MAX_MULTIPLE


class _TooManyError(Exception):
    pass


class _Combinations:
    """Counts the ways to combine alternatives, since the parts of `allOf` are merged."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # by the identity of a schema within the root
        self._open_refs: list[str] = []

    def problem(self) -> str | None:
        """Returns the reason why the schema has too many combinations, or None if it has not."""
        try:
            self._count(self._root)
        except _TooManyError as error:
            return str(error)
        except RecursionError:
            return _TOO_MANY_REFS
        return None

    def _count(self, schema: Any) -> int:
        """Returns the number of combinations of a schema itself, or of the part of it that has the most."""
        if not isinstance(schema, dict):
            return 1
        known = self._known.get(id(cast(Any, schema)))
        if known is not None:
            return known
        parts: dict[str, list[int]] = {}
        own = cast("dict[str, Any]", schema)
        for keyword, _, part in _parts(own):
            parts.setdefault(keyword, []).append(self._count(part))
        merged = sum(parts.pop("anyOf", [1])) * sum(parts.pop("oneOf", [1])) * self._referenced(own.get("$ref"))
        for count in parts.pop("allOf", ()):
            merged *= count
            if merged > MAX_COMBINATIONS:
                break
        # Alternatives of one list alone are cheap, whatever their number.
        if merged > MAX_COMBINATIONS and (len(own.keys() & {"anyOf", "oneOf", "$ref"}) > 1 or "allOf" in own):
            raise _TooManyError(_TOO_MANY_COMBINATIONS)
        most = max((merged, *(count for counts in parts.values() for count in counts)))
        self._known[id(own)] = most
        return most

    def _referenced(self, ref: Any) -> int:
        if not isinstance(ref, str) or ref in self._open_refs:
            return 1
        if len(self._open_refs) == _MAX_REFS:
            raise _TooManyError(_TOO_MANY_REFS)
        self._open_refs.append(ref)
        count = self._count(pointed_at(self._root, ref))
        self._open_refs.pop()
        return count
