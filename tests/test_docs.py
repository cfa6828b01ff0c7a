"""The documentation: links lead somewhere, and generated tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import api_page
from tests.reference_fixtures import CHECKOUT
from tests.table_of_errors import markdown_table

PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CHANGELOG.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "clients" / "python" / "README.md",
    *sorted((CHECKOUT / "docs").glob("*.md")),
]

LONG = 100
"""Lines of a page above which a reader looks for a table of contents."""


def anchors(page: Path) -> set[str]:
    """What links to headings are made of: words in lower case, joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_every_link_leads_somewhere(page: Path):
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_reasons_of_errors_are_those_of_the_table():
    page = (CHECKOUT / "docs" / "errors.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- errors -->\n(.*?)\n<!-- /errors -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == markdown_table(), "write what `python -m tests.table_of_errors` prints there"


def test_the_page_of_the_api_is_that_of_the_contract():
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(), "run: python -m tests.api_page"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.read_text(encoding="utf-8").count("\n") > LONG],
    ids=lambda page: page.relative_to(CHECKOUT).as_posix(),
)
def test_every_long_page_begins_with_a_table_of_contents(page: Path):
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    # A table of contents does not name itself.
    wanted = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} - {"contents"}
    parts = re.split(r"^## (?!Contents)", text, maxsplit=1, flags=re.MULTILINE)
    assert wanted <= set(re.findall(r"\]\(#([^)]+)\)", parts[0]))


RUN_BY = {
    "curl -s localhost:8000/": "tests/test_http_docs.py",
    "curl -s -T ": "tests/test_http_docs.py",
    "from kestrel_client import": "tests/test_readme.py",
    "kestrel-grpc image upload": "tests/test_readme.py",
    "--adapters runtime/kestrel_runtime/nano/adapters": "tests/test_readme.py",
    "from openai import": "tests/clients/programs/openai_python.py",
    "import moondream": "tests/clients/programs/moondream_python.py",
    "import tritonclient": "tests/clients/programs/triton_python.py",
    "grpcio-tools": "tests/proto/test_stubs_page.py",
    "engine_service_pb2_grpc": "tests/proto/test_stubs_page.py",
    "stubs/my_stubs": "tests/proto/test_stubs_page.py",
}
"""The commands and programs of docs/, by a text in them, and what runs them as they are written."""
NOT_RUN = {
    "--adapters /srv/adapters": "the folder is the reader's",
    "pip install peft": "PEFT is not installed for tests; those of tests/training/test_with_peft.py do without it",
    "with_peft.py examples.jsonl": "needs PEFT",
    "--adapters adapters &": "serves what the commands before it train",
    "python -m training adapter": "trains for minutes; its parts have tests",
    "python -m pytest -p tests.runtime.without_moondream": "CI runs it",
    "grpcurl -plaintext": "grpcurl is not installed with this package; the README's run where it is",
    "--model moondream2": "downloads weights",
    "docker compose": "needs a container runtime",
    "hf download": "downloads weights",
    "podman build": "needs a container runtime",
    "kubectl ": "needs a cluster",
    "systemctl ": "needs systemd, and installs into the system",
    "kestrel-grpc serve --tokens tokens.toml": "bird.jpg is the reader's; the README has a token that is run",
    "kestrel-grpc serve --triton-port 8001": "what starts the server of the programs of tests/clients",
    "--triton-shared-memory": "an option by itself; tests of the service set it",
}
"""The others, by a text in them, and why they are not run."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(\$ |cd |curl |grpcurl |kestrel-grpc |make |pip |python |podman |kubectl |systemctl )")


def test_every_command_is_run_or_has_a_reason():
    unknown: list[str] = []
    used: set[str] = set()
    for page in sorted((CHECKOUT / "docs").glob("*.md")):
        for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            assert kind or not _COMMAND.match(text), f"{page.name}: a block of commands is marked `sh`: {text}"
            if kind not in ("sh", "python"):
                continue
            known = [part for part in (*RUN_BY, *NOT_RUN) if part in text]
            used.update(known)
            if not known:
                unknown.append(f"{page.name}: {text}")
            for runner in {RUN_BY[part] for part in known if part in RUN_BY}:
                assert page.name in (CHECKOUT / runner).read_text(encoding="utf-8"), (runner, page.name)
    assert unknown == [], "name what runs these in RUN_BY, or why nothing does in NOT_RUN"
    assert used == {*RUN_BY, *NOT_RUN}
