"""docs/http.md says what is so: its tables are those of the code, and its examples run as written."""

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


def test_the_table_says_of_each_field_of_openai_whether_it_is_used():
    rows = [line.split(" | ") for line in tables()["openai fields"].splitlines()[2:]]
    effects = {(row[0].strip("| `"), row[2]): row[4].strip() for row in rows}
    assert set(effects.values()) == {"used", "none", "refused"}
    assert effects["tools", "chat/completions, responses"] == "used"
    assert effects["store", "chat/completions, completions"] == "none"
    assert effects["background", "responses"] == "refused"
    for route, body in OPENAI.items():
        schema = body.model_json_schema()["properties"]
        for name, field in schema.items():
            is_refused = None in field.get("enum", ())
            found = {
                effect
                for (path, routes), effect in effects.items()
                if path == name and (routes == "all" or route.removeprefix("/v1/") in routes.split(", "))
            }
            assert found <= ({"refused"} if is_refused else {"used", "none"}), name


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
    [
        ("docs/http.md", "star"),
        ("README.md", "star"),
        ("docs/constraints.md", '"answer":"'),
        ("docs/embeddings.md", '"mean":['),
    ],
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
        wanted = '"embedding":[' if "/v1/embeddings" in block else printed
        assert wanted in done.stdout.replace(": ", ":"), (script, done.stdout)
