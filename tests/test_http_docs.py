"""docs/http.md says what is so: its tables are those of the code, and its examples run as written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.reference_fixtures import CHECKOUT
from tools.http_tables import OPENAI, tables

pytestmark = pytest.mark.usefixtures("warm_starts")

DOCUMENT = (CHECKOUT / "docs" / "http.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tables())
def test_tables_are_those_of_the_code(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", DOCUMENT, re.DOTALL)
    assert found is not None
    assert found[1] == tables()[name], "write what `python -m tools.http_tables` prints there"


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
