"""No private vocabulary: words that mean something else to readers who know other inference servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reference_fixtures import CHECKOUT

CHECKED = (
    "kestrel_grpc",
    "runtime",
    "kernels",
    "clients",
    "bench",
    "training",
    "deploy",
    "docs",
    "tests",
    "README.md",
)
# What to write instead is in the table "Vocabulary" of the architecture.
BANNED = re.compile(
    r"\b(lanes?|nobody|farewells?|pardon(?:ed)?|culprits?|rehears[a-z]*|uncut|flights?|newcomers?|doors?|seam|rooms?"
    r"|house|guests?|crops?|golden|patience(?:_s)?|lateness|recorders?|FastPaths|GoldenFolder|put_back)\b",
    re.IGNORECASE,
)
# Names that operators use, a standard term that contains a banned word, and that term continued on the next line.
NAMES = re.compile(r"--max-crops|tests/golden(?:/[\w.-]+)*|\bin[ -]flight\b|^\W*flight\b", re.IGNORECASE)
# Files that may contain a banned word, and why.
EXCEPTIONS: dict[str, set[str]] = {
    # The operation is called `crop_attention`, and in kernels a tile is a block of a matrix. A warp has lanes.
    "kernels/kestrel_ops/cuda/crop_attention.cu": {"crop", "lane", "lanes"},
    "kernels/kestrel_ops/cuda/crop_attention.py": {"crops"},
    "kernels/kestrel_ops/library/crop_attention.py": {"crops"},
    "kernels/kestrel_ops/reference/crop_attention.py": {"crop"},
    "kernels/kestrel_ops/triton/rotary_decode_attention.py": {"lane", "lanes"},
    "kernels/kestrel_ops/triton/single_token.py": {"lane", "lanes"},
    # Says what the model's paper calls tiles.
    "runtime/kestrel_runtime/models/moondream/vision/tiling.py": {"crops"},
    # A method of Pillow.
    "runtime/kestrel_runtime/imaging/decoding.py": {"crop"},
    # Keys of stored results.
    "bench/harness/page.py": {"crops"},
    "bench/images.py": {"crops"},
    "bench/scaling.py": {"crops"},
    "tests/bench/test_images.py": {"crops"},
    "tests/bench/test_report.py": {"crops"},
    # A path.
    "tests/reference_fixtures.py": {"golden"},
    # English words that the built-in model reads.
    "training/words.py": {"door", "house", "room"},
}
# Data and generated texts.
UNCHECKED = {"licences.md", "requirements.lock"}
DATA_FOLDERS = {"golden", "results", "nano", "v1", "build", "__pycache__"}


def texts() -> list[Path]:
    """Every file of the checked folders that people write."""
    kinds = {".py", ".cu", ".c", ".md", ".yml", ".yaml", ".sh", ".toml", ".service", ".json", ""}
    found = [path for name in CHECKED for path in ((CHECKOUT / name), *sorted((CHECKOUT / name).rglob("*")))]
    return [
        path
        for path in found
        if path.is_file()
        and path.suffix in kinds
        and path.name not in UNCHECKED
        and path != Path(__file__)
        and (path.suffix == ".md" or not DATA_FOLDERS & set(path.relative_to(CHECKOUT).parts))
        and "egg-info" not in str(path)
    ]


def banned_words(path: Path) -> list[str]:
    """`file:line: word` for each that is not excepted."""
    name = path.relative_to(CHECKOUT).as_posix()
    return [
        f"{name}:{number}: {word}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in words_of(line)
        if word.lower() not in EXCEPTIONS.get(name, set())
    ]


def words_of(line: str) -> list[str]:
    """The banned words of a line."""
    return [found[0] for found in BANNED.finditer(NAMES.sub(" ", line))]


def test_standard_terms_are_used():
    assert [found for path in texts() for found in banned_words(path)] == []


def test_every_exception_is_needed():
    for name, words in EXCEPTIONS.items():
        lines = (CHECKOUT / name).read_text(encoding="utf-8").splitlines()
        assert {word.lower() for line in lines for word in words_of(line)} == words, name


@pytest.mark.parametrize("folder", CHECKED)
def test_every_folder_has_texts(folder):
    assert any(path.is_relative_to(CHECKOUT / folder) for path in texts())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Nobody waits at the doors", ["Nobody", "doors"]),
        ("lower --max-crops, or crops", ["crops"]),
        ("max_crops bedroom", []),
        ("steps in flight, a flight", ["flight"]),
        ("# flight at the start of a line", []),
        ("verify tests/golden/md3-small, a golden folder", ["golden"]),
    ],
)
def test_whole_words_are_found_in_any_case(line, words):
    assert words_of(line) == words
