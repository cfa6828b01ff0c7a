"""Forces calls of functions by constraints, and finds the call in the text of an answer.

No Moondream was trained to call tools. Where a call is optional the answer is a text, and the tools have no effect.
Where a call is forced, the answer is constrained to the arguments of the one function that may be called, or, of
several, to `{"name": NAME, "arguments": ARGUMENTS}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, PlainValidator, WithJsonSchema

from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, Unusable
from kestrel_grpc.frontends.http.fields import new_constraint, schema_text
from kestrel_runtime.api.constraints import LISTS, MAX_SCHEMA_BYTES, NAMED, SUBSCHEMAS, Constraint
from kestrel_runtime.api.errors import did_you_mean

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NAME_RULE = "must be 1 to 128 letters, digits and characters of _ . : -"
_MODES = ("none", "auto", "required")
_CHOICE_RULE = f"must be one of {', '.join(_MODES)}, or an object that names a function"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


# The fields


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise Unusable("must be a text")
    if not _NAME.fullmatch(value):
        raise Unusable(_NAME_RULE)
    return value


FunctionName = Annotated[str, PlainValidator(_name), WithJsonSchema({"type": "string"})]


class FunctionFields(Body):
    """Describes a function that may be called."""

    name: FunctionName = Field(description=f"The name of the function; it {_NAME_RULE}.", examples=["find"])
    description: Text | None = Field(None, description="Without effect: the models were not trained to use tools.")
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of an object; the arguments of a forced call are valid under it."
    )
    strict: bool | None = Field(None, description="Without effect: arguments are valid in any case.")


class ToolChoice(NamedTuple):
    """Says whether a function is to be called, and which ones may be; no names mean all."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()
    path: str = ""
    """The path of the names below the field."""


def _choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(cast(Any, value))
    if not isinstance(value, dict):
        raise Unusable(_CHOICE_RULE)
    if value.get("type") == "allowed_tools":
        # Chat has the choice in an object of that name, Responses has not.
        is_nested = isinstance(value.get("allowed_tools"), dict)
        given = value["allowed_tools"] if is_nested else value
        path = ".allowed_tools.tools" if is_nested else ".tools"
        tools = given.get("tools")
        mode = given.get("mode")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
            raise Unusable("must have a mode, auto or required, and a list of tools")
        return ToolChoice(mode, tuple(_named_function(tool) for tool in tools), path)
    path = ".function.name" if isinstance(value.get("function"), dict) else ".name"
    return ToolChoice("required", (_named_function(value),), path)


def _named_function(value: Any) -> str:
    """Returns the name of the function in `{"type": "function", "function": {"name": …}}`, or in the same without
    the inner object."""
    is_function = isinstance(value, dict) and value.get("type") == "function"
    holder = value.get("function", value) if is_function else None
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str):
        raise Unusable(_CHOICE_RULE)
    return name


ToolChoiceField = Annotated[
    ToolChoice, PlainValidator(_choice), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
]
CHOICE_DESCRIPTION = (
    "`none` or `auto` (the default): the answer is a text. `required`, or an object that names a function: the "
    "answer is a call. An object of the type `allowed_tools` says which functions may be called."
)


# The constraint of a forced call

_LISTED = frozenset({"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"})
"""The keywords of a schema that says about the members of an object no more than `properties` does."""


class Function(NamedTuple):
    """A function as the request has it; `path` is that of its parameters."""

    name: str
    parameters: Mapping[str, Any] | None
    path: str


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """Says that the answer is a call of one of these functions."""

    names: tuple[str, ...]
    constraint: Constraint
    path: str
    """The path of the field that defines the constraint."""


def forced_call(functions: Sequence[Function], choice: ToolChoice | None, problems: Problems) -> ForcedCall | None:
    """Returns the call that the answer must be; None if a text will do."""
    _check(functions, problems)
    if choice is None:
        return None
    by_name = {function.name: function for function in functions}
    for name in choice.names:
        if name not in by_name:
            problems.add(f"tool_choice{choice.path}", f"is not the name of a tool{did_you_mean(name, by_name)}")
    if choice.mode != "required":
        return None
    if not functions:
        problems.add("tool_choice", "needs tools")
    allowed = [function for function in functions if function.name in choice.names or not choice.names]
    if not allowed:
        return None
    if len(allowed) == 1:
        function = allowed[0]
        return ForcedCall((function.name,), new_constraint(json_schema=_schema(function, problems)), function.path)
    schema = _schema_of_several(allowed, problems)
    return ForcedCall(tuple(function.name for function in allowed), new_constraint(json_schema=schema), "tools")


def _check(functions: Sequence[Function], problems: Problems) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            problems.add(f"tools[{index}]", f"has the name of an earlier tool, {function.name}")
        seen.add(function.name)
    given = (function.parameters for function in functions if function.parameters is not None)
    if sum(len(schema_text(parameters).encode()) for parameters in given) > MAX_SCHEMA_BYTES:
        problems.add("tools", f"must have parameters of at most {MAX_SCHEMA_BYTES} bytes together")


def _schema(function: Function, problems: Problems) -> Mapping[str, Any]:
    """Returns the schema of the arguments of a call."""
    given = function.parameters
    if given is None:
        return _NO_PARAMETERS
    if given.get("type", "object") != "object":
        problems.add(function.path, "must be the schema of an object")
    elif "type" not in given and not given.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
        given = {**given, "type": "object"}
    # A function takes no arguments but its own, and clients refuse a call with others.
    if given.keys() <= _LISTED and "properties" in given:
        return {**given, "additionalProperties": False}
    return given


def _schema_of_several(functions: Sequence[Function], problems: Problems) -> Mapping[str, Any]:
    """Returns the schema of a call of one of these functions."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for index, function in enumerate(functions):
        place = f"#/$defs/{index}"
        definitions[str(index)] = _moved(_schema(function, problems), place)
        parts = {"name": {"const": function.name}, "arguments": {"$ref": place}}
        calls.append({"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema whose references within itself still hold when it is at `place` of another one."""
    try:
        return _with_references(schema, place)
    except RecursionError:
        return schema  # it is refused for its depth


def _with_references(schema: Any, place: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    moved = dict(cast("Mapping[str, Any]", schema))
    for keyword, value in moved.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[keyword] = place + value[1:]
        elif keyword in NAMED and isinstance(value, Mapping):
            moved[keyword] = {name: _with_references(part, place) for name, part in value.items()}
        elif keyword in LISTS and isinstance(value, list):
            moved[keyword] = [_with_references(part, place) for part in value]
        elif keyword in SUBSCHEMAS:
            moved[keyword] = _with_references(value, place)
    return moved


# The call in the text of an answer


class CallReader:
    """Finds the name and the arguments of a forced call in the text of an answer, piece by piece."""

    def __init__(self, names: Sequence[str]) -> None:
        self.name = names[0] if len(names) == 1 else None
        """The name of the function; None until the text has it."""
        self._is_wrapped = len(names) > 1
        self._names = names
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the further text of the arguments."""
        if not self._is_wrapped:
            return text
        self._held += text
        if self.name is None:
            self._find_name()
        if self.name is None:
            return ""
        # The last character may be the end of the object around the arguments.
        found, self._held = self._held[:-1], self._held[-1:]
        return found

    def end(self, *, is_complete: bool) -> str:
        """Returns the rest of the arguments. An answer that is not complete ends anywhere."""
        return "" if is_complete or self.name is None else self._held

    def _find_name(self) -> None:
        # The engine writes JSON in one way.
        for name in self._names:
            start = f'{{"name": "{name}", "arguments": '
            if self._held.startswith(start):
                self.name, self._held = name, self._held[len(start) :]
