"""docs/http.md says what is so: its tables are those of the code, and its examples run as written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kestrel_grpc.frontends.http.bodies import Body
from kestrel_grpc.frontends.openai.requests import ChatBody, CompletionBody
from kestrel_grpc.frontends.rest.requests import ROUTES
from tests.reference_fixtures import CHECKOUT

pytestmark = pytest.mark.usefixtures("warm_starts")

DOCUMENT = (CHECKOUT / "docs" / "http.md").read_text(encoding="utf-8")
TYPES = {"string": "text", "array": "list"}
REST: dict[str, type[Body]] = {f"/v1/{skill}": body for skill, body in ROUTES.items()}
OPENAI: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}


def flat(
    schema: dict[str, Any], known: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """The fields with their paths, and whether they are required; those that must ask for nothing are left out."""
    for name, field in schema["properties"].items():
        kind = next((item for item in field.get("anyOf", ()) if item != {"type": "null"}), field)
        nested = known.get(kind.get("$ref", "").rpartition("/")[2])
        if nested is not None:
            yield from flat(nested, known, f"{path}{name}.")
        elif None not in field.get("enum", ()):
            yield f"{path}{name}", name in schema.get("required", ()), {**kind, **field}
            if (item := known.get(reference_of_items(field))) is not None:
                yield from flat(item, known, f"{path}{name}[].")


def reference_of_items(field: dict[str, Any]) -> str:
    """The name of the objects that a field is a list of, or may be; empty where there is none."""
    kinds = (field, *field.get("oneOf", ()))
    return next((kind["items"]["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind.get("items", ())), "")


def facts(field: dict[str, Any]) -> tuple[str, str]:
    """The type of a field, and what it is."""
    kind: str = "text or list" if "oneOf" in field else field.get("type", "any")
    choices = f" One of {', '.join(f'`{choice}`' for choice in field['enum'])}." if "enum" in field else ""
    return TYPES.get(kind, kind), field["description"] + choices


def table_of_fields(routes: dict[str, type[Body]]) -> str:
    """Each field once, with the routes that take it; those that all take come last."""
    taken: dict[tuple[Any, ...], list[str]] = {}
    for route, body in routes.items():
        schema = body.model_json_schema()
        for name, is_required, field in flat(schema, schema["$defs"]):
            taken.setdefault((name, is_required, *facts(field)), []).append(route.removeprefix("/v1/"))
    rows = ["| Field | Type | Routes | Required | What it is |", "|---|---|---|---|---|"]
    for key, names in sorted(taken.items(), key=lambda item: len(item[1]) == len(routes)):
        name, is_required, kind, description = key
        among = "all" if len(names) == len(routes) else ", ".join(names)
        rows.append(f"| `{name}` | {kind} | {among} | {'yes' if is_required else ''} | {description} |")
    return "\n".join(rows)


TABLES = {
    "rest fields": lambda: table_of_fields(REST),
    "openai fields": lambda: table_of_fields(OPENAI),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", DOCUMENT, re.DOTALL)
    assert found is not None
    assert found[1] == TABLES[name](), "write what `python -m tests.test_http_docs` prints there"


def test_everything_that_is_refused_by_name_is_listed():
    listed = re.search(r"<!-- refused -->\n(.*?)\n<!-- /refused -->", DOCUMENT, re.DOTALL)
    assert listed is not None
    schemas = [body.model_json_schema()["properties"] for body in OPENAI.values()]
    refused = {name for fields in schemas for name, field in fields.items() if None in field.get("enum", ())}
    assert set(re.findall(r"`(\w+)`", listed[1])) == refused


@pytest.fixture(scope="module")
def http_address() -> Iterator[str]:
    """A server started as a reader would start it, but for its ports."""
    command = [sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            yield lines[1].split(" on ")[1].split()[0]
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("document", "printed"),
    [("docs/http.md", "star"), ("README.md", "star"), ("docs/constraints.md", '"answer":"')],
)
def test_examples_run_as_written(document, printed, http_address):
    text = (CHECKOUT / document).read_text(encoding="utf-8")
    blocks = [
        block
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "localhost:8000" in block
    ]
    assert blocks
    for block in blocks:
        script = block.replace("localhost:8000", http_address)
        done = subprocess.run(["bash", "-euc", script], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (script, done.stderr)
        assert printed in done.stdout.replace(": ", ":"), (script, done.stdout)


if __name__ == "__main__":
    for name, table in TABLES.items():
        print(f"<!-- {name} -->\n{table()}\n<!-- /{name} -->\n")
