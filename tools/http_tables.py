"""Prints the tables of docs/http.md, generated from the models of the bodies: `python -m tools.http_tables`."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.bodies import Body
from kestrel_grpc.frontends.openai.embeddings import EmbeddingBody
from kestrel_grpc.frontends.openai.requests import ChatBody, CompletionBody
from kestrel_grpc.frontends.openai.responses import ResponseBody
from kestrel_grpc.frontends.rest.requests import ROUTES

REST: Mapping[str, type[Body]] = MappingProxyType({f"/v1/{skill}": body for skill, body in ROUTES.items()})
OPENAI: Mapping[str, type[Body]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/v1/embeddings": EmbeddingBody,
    }
)
_REFUSED = "Refused unless it is "
_TYPES = {"string": "text", "array": "list"}


def tables() -> dict[str, str]:
    """Returns the tables as Markdown, by the names of their places in the page."""
    return {"rest fields": _table_of_fields(REST), "openai fields": _table_of_fields(OPENAI, has_effects=True)}


def _table_of_fields(routes: Mapping[str, type[Body]], *, has_effects: bool = False) -> str:
    """Returns a table with each field once and the routes that have it; fields of all routes are last.

    With `has_effects` a column says which fields are used, have no effect, or are refused unless they are empty.
    """
    taken: dict[tuple[Any, ...], list[str]] = {}
    for route, body in routes.items():
        schema = body.model_json_schema()
        for name, is_required, field in _flat(schema, schema.get("$defs", {})):
            if None in field.get("enum", ()) and not has_effects:
                continue
            taken.setdefault((name, is_required, *_facts(field)), []).append(route.removeprefix("/v1/"))
    effect = " Effect |" if has_effects else ""
    rows = [
        f"| Field | Type | Routes | Required |{effect} What it is |",
        "|---|---|---|---|" + "---|" * (2 if has_effects else 1),
    ]
    for key, names in sorted(taken.items(), key=lambda item: len(item[1]) == len(routes)):
        name, is_required, kind, description = key
        among = "all" if len(names) == len(routes) else ", ".join(names)
        effect = f" {_effect(description)} |" if has_effects else ""
        rows.append(f"| `{name}` | {kind} | {among} | {'yes' if is_required else ''} |{effect} {description} |")
    return "\n".join(rows)


def _flat(
    schema: dict[str, Any], known: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yields each field with its path and True if it is required."""
    for name, field in schema["properties"].items():
        kind = next((item for item in field.get("anyOf", ()) if item != {"type": "null"}), field)
        nested = known.get(kind.get("$ref", "").rpartition("/")[2])
        if nested is not None:
            yield from _flat(nested, known, f"{path}{name}.")
        else:
            yield f"{path}{name}", name in schema.get("required", ()), {**kind, **field}
            if (item := known.get(_reference_of_items({**kind, **field}))) is not None:
                yield from _flat(item, known, f"{path}{name}[].")


def _reference_of_items(field: dict[str, Any]) -> str:
    """Returns the name of the objects in a field that is or may be a list, or "" for other fields."""
    kinds = (field, *field.get("oneOf", ()))
    return next((kind["items"]["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind.get("items", ())), "")


def _facts(field: dict[str, Any]) -> tuple[str, str]:
    """Returns the type of a field and its description."""
    if None in field.get("enum", ()):  # a field that must be empty
        allowed = [f"`{json.dumps(value)}`" for value in field["enum"] if value is not None]
        return "any", f"{_REFUSED}{' or '.join(['absent', *allowed])}."
    kind: str = "text or list" if "oneOf" in field else field.get("type", "any")
    choices = f" One of {', '.join(f'`{choice}`' for choice in field['enum'])}." if "enum" in field else ""
    return _TYPES.get(kind, kind), field["description"] + choices


def _effect(description: str) -> str:
    if description.startswith(_REFUSED):
        return "refused"
    return "none" if description.startswith("Without effect") else "used"


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"<!-- {name} -->\n{table}\n<!-- /{name} -->\n")
