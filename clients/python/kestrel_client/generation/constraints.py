"""Converts the constraint arguments of a query to a message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrel_client.errors import invalid_argument
from kestrel_client.v1 import generation_pb2


def constraint(
    choices: Sequence[str] | None, regex: str | None, json_schema: Mapping[str, Any] | str | None
) -> generation_pb2.Constraint | None:
    """The message; None where the answer may be any text. Raises `InvalidRequest`."""
    given = {"choices": choices, "regex": regex, "json_schema": json_schema}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if len(names) > 1:
        raise invalid_argument(names[1], f"cannot be combined with {names[0]}")
    if choices is not None:
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise invalid_argument("choices", "are texts in a list")
        return generation_pb2.Constraint(choices=generation_pb2.Choices(values=choices))
    if regex is not None:
        return generation_pb2.Constraint(regex=regex)
    return generation_pb2.Constraint(json_schema=_schema_text(json_schema))


def _schema_text(schema: Mapping[str, Any] | str | None) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise invalid_argument("json_schema", "is a JSON schema, a text or a dictionary") from None
