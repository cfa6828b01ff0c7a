"""Describes the REST routes for the OpenAPI document, from the fields that their parsers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_grpc.frontends.rest.fields import STREAM
from kestrel_grpc.frontends.rest.images import PARAMETERS
from kestrel_grpc.frontends.rest.routes import ROUTES, Route

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
_FAILURE = "A failure, in `error`: `code`, `message`, `status`, `request_id` and `violations`."


def descriptions(*, has_images: bool) -> Mapping[str, Any]:
    """The value of `paths`."""
    skills = {f"/v1/{route.skill}": {"post": _operation(route)} for route in ROUTES}
    if not has_images:
        return skills
    one = {
        "parameters": [{"name": "image_id", "in": "path", "required": True, "schema": {"type": "string"}}],
        "get": _described("getImage", "Describes a stored image.", "The stored image."),
        "delete": _described(
            "deleteImage",
            "Deletes a stored image and what is cached of it.",
            "The image is deleted.",
        ),
    }
    return {**skills, "/v1/images": {"put": _upload()}, "/v1/images/{image_id}": one}


def _upload() -> dict[str, Any]:
    summary = "Stores an image file, whose `image_id` other requests name in place of the image."
    return {
        **_described("putImage", summary, "The stored image."),
        "parameters": [
            {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}
            for name, description in PARAMETERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation = _described(route.skill, route.summary, "The answer.")
    if STREAM in route.fields:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _object(route.fields)}}}
    return {**operation, "requestBody": body}


def _described(name: str, summary: str, answer: str) -> dict[str, Any]:
    """The description that all operations share."""
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": answer, "content": {"application/json": {"schema": _ANY}}},
            "default": {"description": _FAILURE, "content": {"application/json": {"schema": _ANY}}},
        },
    }


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
