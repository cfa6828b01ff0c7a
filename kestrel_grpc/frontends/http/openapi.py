"""Makes the OpenAPI document from the operations and the models of their bodies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from kestrel_grpc.frontends.http.bodies import Body
from kestrel_grpc.frontends.http.endpoint import Description, Operation
from kestrel_grpc.frontends.http.forms import IMAGE, IMAGE_URL

_PLACE = "#/components/schemas/"
_ANY_OBJECT: Mapping[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_BINARY: Mapping[str, Any] = {"type": "string", "format": "binary"}
_FILE: Mapping[str, Any] = {"application/octet-stream": {"schema": _BINARY}}


class _Schemas(GenerateJsonSchema):
    """Makes schemas without titles, which only repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(operations: Iterable[tuple[Operation, str]], model: str) -> bytes:
    """Returns the document of `operations`, each with a sentence about the form of its errors."""
    described = [(item, item.description, failure) for item, failure in operations if item.description is not None]
    bodies: list[type[Body]] = [what.body for _, what, _ in described if what.body is not None]
    references, made = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=f"{_PLACE}{{model}}", schema_generator=_Schemas
    )
    schemas: dict[str, Any] = made["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for operation, what, failure in described:
        path = operation.path.replace(":path}", "}")
        content: Mapping[str, Any] | None = _FILE if operation.takes_file else None
        if what.body is not None:
            reference = references[what.body, "validation"]
            content = {"application/json": {"schema": reference}}
            if operation.takes_forms:
                content |= _forms(schemas[reference["$ref"].removeprefix(_PLACE)])
        paths.setdefault(path, {})[operation.verb.lower()] = _described(what, path, content, failure)
    # pydantic also lists the types that a validator of ours returns, which no body refers to.
    text = json.dumps([paths, schemas])
    used = {name: schema for name, schema in schemas.items() if f'"{_PLACE}{name}"' in text}
    found = {
        "openapi": "3.1.0",
        "info": {"title": "Kestrel", "version": "1", "description": f"Serves {model}."},
        "paths": paths,
        "components": {"schemas": used},
    }
    return json.dumps(found).encode()


def _forms(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the forms that are accepted in place of a JSON body with this schema."""
    properties = {**schema["properties"], IMAGE: {**_BINARY, "description": "The image file."}}
    required = [IMAGE if name == IMAGE_URL else name for name in schema.get("required", ())]
    del properties[IMAGE_URL]
    form = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    alone = {**_BINARY, "description": "The image file; the other fields are parameters of the query."}
    return {"multipart/form-data": {"schema": form}, "image/*": {"schema": alone}}


def _described(what: Description, path: str, content: Mapping[str, Any] | None, failure: str) -> dict[str, Any]:
    answer: dict[str, Any] = {**_ANY_OBJECT}
    if what.body is not None and "stream" in what.body.model_fields:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "operationId": what.id,
        "summary": what.summary,
        "responses": {
            "200": {"description": what.answer, "content": answer},
            "default": {"description": failure, "content": _ANY_OBJECT},
        },
    }
    if content is not None:
        found["requestBody"] = {"required": True, "content": content}
    text = {"schema": {"type": "string"}}
    parts = [part.removesuffix("}") for part in path.split("{")[1:]]
    parameters = [{"name": name, "in": "path", "required": True, **text} for name in parts]
    parameters += [
        {"name": name, "in": "query", "description": description, **text}
        for name, description in what.parameters.items()
    ]
    return {**found, "parameters": parameters} if parameters else found
