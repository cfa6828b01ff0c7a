"""Renders the page of the HTTP routes from the OpenAPI document that a server sends."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_TYPES = {"string": "text", "boolean": "true or false", "array": "list", "null": "null"}
_STREAM = "text/event-stream"


def rest_page(document: Mapping[str, Any]) -> str:
    """Returns the page as Markdown: each route with its fields, then the objects that fields refer to."""
    lines = [
        "# The REST API",
        "",
        "The routes of the HTTP port, from the [OpenAPI document](openapi.json) that a server sends at",
        "`/openapi.json`. [REST and OpenAI over HTTP](http.md) has examples and the fields of answers,",
        "[Errors](errors.md) has the reasons of failures.",
        "",
    ]
    schemas: Mapping[str, Schema] = document["components"]["schemas"]
    bodies: set[str] = set()
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            lines += [f"## `{verb.upper()} {path}`", "", operation["summary"], ""]
            lines += _parameters(operation.get("parameters", ()))
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                name = _referred(content["schema"])
                if name is None:
                    lines += [f"The body is a file, as `{kind}`.", ""]
                    continue
                bodies.add(name)
                lines += _fields(schemas[name])
            lines += _answers(operation["responses"])
    lines += ["## Objects", ""]
    for name, schema in schemas.items():
        if name not in bodies:
            lines += [f"### {name}", "", schema.get("description", "").partition("\n")[0], "", *_fields(schema)]
    return "\n".join(lines)


def _parameters(parameters: Any) -> Iterator[str]:
    if parameters:
        yield from ("| Parameter | In | What it is |", "|---|---|---|")
        for item in parameters:
            yield f"| `{item['name']}` | {item['in']} | {item.get('description', '')} |"
        yield ""


def _fields(schema: Schema) -> Iterator[str]:
    yield from ("| Field | Type | Required | Default | What it is |", "|---|---|---|---|---|")
    for name, field in schema["properties"].items():
        is_required = "yes" if name in schema.get("required", ()) else ""
        description = "Must ask for nothing." if None in field.get("enum", ()) else field.get("description", "")
        yield f"| `{name}` | {_type(field)} | {is_required} | {_default(field)} | {_cell(description)} |"
    yield ""


def _answers(responses: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| Status | Answer |", "|---|---|")
    for status, response in responses.items():
        is_stream = ", or server-sent events with `stream`" if _STREAM in response["content"] else ""
        code = "others" if status == "default" else status
        yield f"| {code} | {response['description'].rstrip('.')}{is_stream}. |"
    yield ""


def _type(schema: Schema) -> str:
    """Returns the type of a field, with links to objects."""
    name = _referred(schema)
    if name is not None:
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_type(item) for item in schema[key] if item.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    return _TYPES.get(kind, kind)


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value in (None, "", []) or isinstance(value, dict) else f"`{str(value).lower()}`"


def _referred(schema: Schema) -> str | None:
    return schema["$ref"].rpartition("/")[2] if "$ref" in schema else None


def _cell(text: str) -> str:
    """Returns a text in the form of a table cell."""
    return " ".join(text.split()).replace("|", "\\|")
