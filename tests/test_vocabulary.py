"""No private vocabulary: words that mean something else to readers who know other inference servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reference_fixtures import CHECKOUT

CHECKED = ("kestrel_grpc", "clients", "deploy")
# What to write instead is in the table "Vocabulary" of the architecture.
BANNED = re.compile(
    r"\b(lanes?|nobody|farewells?|pardon(?:ed)?|culprits?|suspects?|rehears[a-z]*|uncut|flights?|newcomers?|doors?|seam"
    r"|rooms?|house|guests?|crops?|golden|patience|lateness)\b",
    re.IGNORECASE,
)
# Lines that may hold such a word, by file and the word: names that operators or the model's paper use.
EXCEPTIONS: dict[str, set[str]] = {}


def texts() -> list[Path]:
    """Every file of the checked folders that people write, but for generated lists of packages and licences."""
    kinds = {".py", ".md", ".yml", ".yaml", ".sh", ".toml", ".service", ".json", ""}
    files = [path for folder in CHECKED for path in sorted((CHECKOUT / folder).rglob("*")) if path.is_file()]
    return [
        path
        for path in files
        if path.suffix in kinds
        and path.parent.name != "v1"
        and "build" not in path.parts
        and "egg-info" not in str(path)
        if path.name not in {"licences.md"}
    ]


def banned_words(path: Path) -> list[str]:
    """`file:line: word` for each that is not excepted."""
    name = path.relative_to(CHECKOUT).as_posix()
    return [
        f"{name}:{number}: {found[0]}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for found in BANNED.finditer(line)
        if found[0].lower() not in EXCEPTIONS.get(name, set())
    ]


def test_standard_terms_are_used():
    assert [found for path in texts() for found in banned_words(path)] == []


def test_every_exception_is_needed():
    for name, words in EXCEPTIONS.items():
        text = (CHECKOUT / name).read_text(encoding="utf-8")
        assert {found[0].lower() for found in BANNED.finditer(text)} == words, name


@pytest.mark.parametrize("folder", CHECKED)
def test_every_folder_has_texts(folder):
    assert any(path.is_relative_to(CHECKOUT / folder) for path in texts())


@pytest.mark.parametrize(
    ("line", "words"),
    [("Nobody waits at the doors", ["Nobody", "doors"]), ("--max-crops", ["crops"]), ("max_crops bedroom", [])],
)
def test_whole_words_are_found_in_any_case(line, words):
    assert [found[0] for found in BANNED.finditer(line)] == words
