"""What an answer must look like, as REST and OpenAI's API say it: their fields, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_runtime.api.constraints import MAX_CHOICES, Constraint
from kestrel_runtime.api.errors import Violation

CONSTRAINT = Field(
    "constraint",
    Kind.OBJECT,
    "What the answer must look like; one of its fields.",
    fields=(
        Field(
            "choices",
            Kind.LIST,
            f"At most {MAX_CHOICES} texts, one of which is it.",
            item={"type": "string"},
        ),
        Field("regex", Kind.TEXT, "A regular expression that the whole answer matches."),
        Field("json_schema", Kind.OBJECT, "A JSON schema; the answer is JSON that is valid under it."),
    ),
)
RESPONSE_FORMAT = Field(
    "response_format",
    Kind.OBJECT,
    "What the answer must look like.",
    fields=(
        Field(
            "type",
            Kind.TEXT,
            "The kind of answer.",
            is_required=True,
            choices=("text", "json_object", "json_schema"),
        ),
        Field(
            "json_schema",
            Kind.OBJECT,
            "For the type of this name.",
            fields=(
                Field("name", Kind.TEXT, "Without effect.", is_required=True),
                Field("description", Kind.TEXT, "Without effect."),
                Field("schema", Kind.OBJECT, "The answer is JSON that is valid under it."),
                Field("strict", Kind.BOOLEAN, "Without effect: answers are valid in any case."),
            ),
        ),
    ),
)
STRUCTURED_OUTPUTS = Field(
    "structured_outputs",
    Kind.OBJECT,
    "What the answer must look like, in the words of vLLM; one of its fields.",
    fields=(
        Field("choice", Kind.LIST, f"At most {MAX_CHOICES} texts, one of which is it.", item={"type": "string"}),
        Field("regex", Kind.TEXT, "A regular expression that the whole answer matches."),
        Field("json", Kind.OBJECT, "A JSON schema; the answer is JSON that is valid under it."),
        Field("json_object", Kind.BOOLEAN, "Whether the answer is any JSON object."),
    ),
)
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_OURS: Mapping[str, str] = MappingProxyType({"choice": "choices", "regex": "regex", "json": "json_schema"})
# In place of what is wrong, which is a violation already.
_PLACEHOLDER = Constraint(regex="x")


def read_openai_constraint(values: Mapping[str, Any], violations: list[Violation]) -> Constraint | None:
    """The value of the one of `RESPONSE_FORMAT`, `CONSTRAINT` and `STRUCTURED_OUTPUTS` that asks for something.

    None where any text will do.
    """
    read = {
        RESPONSE_FORMAT.name: read_response_format(values.get(RESPONSE_FORMAT.name), violations),
        CONSTRAINT.name: read_constraint(values.get(CONSTRAINT.name), violations),
        STRUCTURED_OUTPUTS.name: _structured_outputs(values.get(STRUCTURED_OUTPUTS.name), violations),
    }
    given = [name for name, constraint in read.items() if constraint is not None]
    violations.extend(Violation(name, f"cannot be combined with {given[0]}") for name in given[1:])
    return read[given[0]] if given else None


def _structured_outputs(given: Mapping[str, Any] | None, violations: list[Violation]) -> Constraint | None:
    if not given or given == {"json_object": False}:
        return None
    if given.get("json_object") and "json" not in given:
        given = {**given, "json": _ANY_OBJECT}
    ours = {_OURS[name]: value for name, value in given.items() if name in _OURS}
    return read_constraint(ours, violations, f"{STRUCTURED_OUTPUTS.name}.choice")


def read_constraint(
    given: Mapping[str, Any] | None, violations: list[Violation], choices_path: str = "constraint.choices"
) -> Constraint | None:
    """The value of `CONSTRAINT`; None where there is none."""
    if given is None:
        return None
    choices = given.get("choices", ())[: MAX_CHOICES + 1]
    problems = [
        Violation(f"{choices_path}[{index}]", "must be a text")
        for index, choice in enumerate(choices)
        if not isinstance(choice, str)
    ]
    if problems:
        violations += problems
        return _PLACEHOLDER
    schema = given.get("json_schema")
    return Constraint(tuple(choices), given.get("regex"), None if schema is None else _text_of(schema))


def read_response_format(given: Mapping[str, Any] | None, violations: list[Violation]) -> Constraint | None:
    """The value of `RESPONSE_FORMAT`; None where any text will do."""
    kind = None if given is None else given.get("type")
    if given is None or kind in (None, "text"):
        return None
    if kind == "json_object":
        return Constraint(json_schema=_text_of(_ANY_OBJECT))
    if "json_schema" not in given:
        violations.append(Violation("response_format.json_schema", "is required"))
        return _PLACEHOLDER
    return Constraint(json_schema=_text_of(given["json_schema"].get("schema", _ANY_OBJECT)))


def _text_of(schema: Mapping[str, Any]) -> str:
    try:
        # A text that is too long for a field stands here as an object of its own; the schema is too long as well.
        return json.dumps(schema, ensure_ascii=False, default=str)
    except RecursionError:
        return "[" * 999  # it is refused for its depth
