"""The documentation: links lead somewhere, and generated tables are those of the code."""

import re
from pathlib import Path

import pytest
import yaml

from tests.reference_fixtures import CHECKOUT
from tools import api_page
from tools.error_table import markdown_table

PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CHANGELOG.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "clients" / "python" / "README.md",
    *sorted((CHECKOUT / "docs").rglob("*.md")),
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


def test_every_page_is_in_the_navigation_of_the_site():
    entries = re.findall(
        r"'([\w/]+\.md)'", str(yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text("utf-8"))["nav"])
    )
    made = {"docs/rest_api.md", "docs/python_api.md"}  # tools/site/hooks.py makes them
    assert len(set(entries)) == len(entries)
    assert {page.relative_to(CHECKOUT).as_posix() for page in PAGES} <= set(entries)
    assert [name for name in entries if name not in made and not (CHECKOUT / name).exists()] == []


def test_the_reasons_of_errors_are_those_of_the_table():
    page = (CHECKOUT / "docs" / "errors.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- errors -->\n(.*?)\n<!-- /errors -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == markdown_table(), "write what `python -m tools.error_table` prints there"


def test_the_page_of_the_api_is_that_of_the_contract():
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(), "run: python -m tools.api_page"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md" and page.read_text(encoding="utf-8").count("\n") > LONG],
    ids=lambda page: page.relative_to(CHECKOUT).as_posix(),
)
def test_every_long_page_begins_with_a_table_of_contents(page: Path):
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    # A table of contents does not name itself.
    wanted = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} - {"contents"}
    parts = re.split(r"^## (?!Contents)", text, maxsplit=1, flags=re.MULTILINE)
    assert wanted <= set(re.findall(r"\]\(#([^)]+)\)", parts[0]))


def test_every_row_of_the_table_of_faults_names_a_test_that_exists():
    table = (CHECKOUT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    text = ""
    for row in rows:
        match = re.search(r"`(\S+\.py|…)::(\w+)` \|$", row)
        assert match is not None, row
        if match[1] != "…":
            text = (CHECKOUT / "tests" / match[1]).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {match[2]}\(", text, re.MULTILINE), row
