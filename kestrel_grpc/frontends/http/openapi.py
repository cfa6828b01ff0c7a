"""Describes operations over HTTP for the OpenAPI document, from the fields that their parsers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind

_TYPES: Mapping[Kind, Mapping[str, Any]] = MappingProxyType(
    {
        Kind.TEXT: {"type": "string"},
        Kind.BOOLEAN: {"type": "boolean"},
        Kind.INTEGER: {"type": "integer"},
        Kind.NUMBER: {"type": "number"},
        Kind.IMAGE: {"type": "string"},
        Kind.LIST: {"type": "array"},
        Kind.OBJECT: {"type": "object"},
        Kind.TEXT_OR_LIST: {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    }
)
_ANY: Mapping[str, Any] = {"type": "object"}


def described(name: str, summary: str, answer: str, failure: str) -> dict[str, Any]:
    """The description of an operation without a body, from sentences. `name` is its `operationId`."""
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": answer, "content": {"application/json": {"schema": _ANY}}},
            "default": {"description": failure, "content": {"application/json": {"schema": _ANY}}},
        },
    }


def with_fields(operation: dict[str, Any], fields: Iterable[Field], *, streams: bool) -> dict[str, Any]:
    """The description of an operation whose body has these fields, and that `streams` its answer on demand."""
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _object(fields)}}}
    return {**operation, "requestBody": body}


def _object(known: Iterable[Field]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _schema(field) for field in known},
        "additionalProperties": False,
    }
    required = [field.name for field in known if field.is_required]
    if required:
        schema["required"] = required
    return schema


def _schema(field: Field) -> dict[str, Any]:
    schema = _object(field.fields) if field.fields else dict(_TYPES[field.kind])
    if field.choices:
        schema["enum"] = list(field.choices)
    if field.item is not None:
        schema["items"] = field.item
    return {**schema, "description": field.description}
