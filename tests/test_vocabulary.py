"""Documents and code use the words of the field, which readers of other inference servers know."""

import re
from pathlib import Path

import pytest

from tests.reference_fixtures import CHECKOUT
from tools import prose
from tools.source import product_modules

PAGES = [CHECKOUT / "README.md", CHECKOUT / "clients" / "python" / "README.md", *(CHECKOUT / "docs").glob("*.md")]
INSTEAD = {
    "til(?:es?|ings?|ed)": "crops",
    "lanes?": "streams, workers",
    "flights?": "steps in flight",
    "seam": "interface",
    "rooms?|doors?|guests?|house": "places in the queue, frontends, callers",
    "patience|pardon(?:ed)?|culprits?|farewells?": "time limit, retry, poison request, last message",
}
"""What to write instead of each word, which has had a meaning of its own here."""
# Terms of TIFF and of matrix products, and a standard term that contains one of the words.
TERMS = re.compile(
    r"\bstrips or tiles\b|\b(?:in a|with a|in one) tile of\b|\(sizes, scans, tiles,|\bin[\s-]+flight\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_a_page_uses_standard_terms(page: Path):
    words = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)
    assert words.findall(TERMS.sub(" ", page.read_text(encoding="utf-8"))) == []


def test_docstrings_begin_with_a_sentence():
    assert [place for module in product_modules() for place in prose.fragments(module)] == []


def test_docstrings_comments_and_names_use_standard_terms():
    """`tools/prose.py` says what to write instead of each word."""
    assert [place for module in product_modules() for place in prose.refused_words(module)] == []
