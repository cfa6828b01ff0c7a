"""Describes the REST routes for the OpenAPI document, from the fields that their parsers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel_grpc.frontends.http.openapi import described, with_fields
from kestrel_grpc.frontends.rest.fields import STREAM
from kestrel_grpc.frontends.rest.images import PARAMETERS
from kestrel_grpc.frontends.rest.routes import ROUTES, Route

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
    return with_fields(operation, route.fields, streams=STREAM in route.fields)


def _described(name: str, summary: str, answer: str) -> dict[str, Any]:
    return described(name, summary, answer, _FAILURE)
