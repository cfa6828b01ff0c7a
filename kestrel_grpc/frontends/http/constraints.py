"""What an answer must look like, as REST and OpenAI's API say it: their fields, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_runtime.api.constraints.constraint import MAX_CHOICES, Constraint
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
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# In place of what is wrong, which is a violation already.
_PLACEHOLDER = Constraint(regex="x")


def read_constraint(given: Mapping[str, Any] | None, violations: list[Violation]) -> Constraint | None:
    """The value of `CONSTRAINT`; None where there is none."""
    if given is None:
        return None
    choices = given.get("choices", ())[: MAX_CHOICES + 1]
    problems = [
        Violation(f"constraint.choices[{index}]", "must be a text")
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
