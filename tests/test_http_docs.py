"""docs/http.md says what is so: its tables are those of the code, and its examples run as written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_grpc.frontends.openai import fields as openai
from kestrel_grpc.frontends.rest.routes import ROUTES
from tests.reference_fixtures import CHECKOUT

DOCUMENT = (CHECKOUT / "docs" / "http.md").read_text(encoding="utf-8")
TYPES = {
    Kind.TEXT: "text",
    Kind.BOOLEAN: "boolean",
    Kind.INTEGER: "integer",
    Kind.NUMBER: "number",
    Kind.IMAGE: "text",
    Kind.OBJECT: "object",
    Kind.LIST: "list",
    Kind.TEXT_OR_LIST: "text or list",
}
REST = {f"/v1/{route.skill}": route.fields for route in ROUTES}


def flat(fields: tuple[Field, ...], path: str = "") -> Iterator[tuple[str, Field]]:
    for field in fields:
        if field.fields:
            yield from flat(field.fields, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", field


def table_of_fields(routes: dict[str, tuple[Field, ...]]) -> str:
    """Each field once, with the routes that take it."""
    taken: dict[str, tuple[Field, list[str]]] = {}
    for route, fields in routes.items():
        for name, field in flat(fields):
            taken.setdefault(f"{name}|{field.is_required}", (field, []))[1].append(route.rpartition("/v1/")[2])
    rows = ["| Field | Type | Routes | Required | What it is |", "|---|---|---|---|---|"]
    for key, (field, names) in taken.items():
        among = "all" if len(names) == len(routes) else ", ".join(names)
        required = "yes" if field.is_required else ""
        choices = f" One of {', '.join(f'`{choice}`' for choice in field.choices)}." if field.choices else ""
        name, kind = key.partition("|")[0], TYPES[field.kind]
        rows.append(f"| `{name}` | {kind} | {among} | {required} | {field.description}{choices} |")
    return "\n".join(rows)


TABLES = {
    "rest fields": lambda: table_of_fields(REST),
    "openai fields": lambda: table_of_fields(
        {"/v1/chat/completions": openai.CHAT, "/v1/completions": openai.COMPLETIONS}
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", DOCUMENT, re.DOTALL)
    assert found is not None
    assert found[1] == TABLES[name](), "write what `python -m tests.test_http_docs` prints there"


def test_everything_that_is_refused_by_name_is_listed():
    listed = re.search(r"<!-- refused -->\n(.*?)\n<!-- /refused -->", DOCUMENT, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == {*openai.CHAT_DEFAULTS, *openai.COMPLETIONS_DEFAULTS}


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
