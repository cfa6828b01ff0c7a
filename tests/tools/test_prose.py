"""The prose of modules: fragments and words that have no place there."""

from pathlib import Path

import pytest

from tools import prose
from tools.source import Module

SOURCE = '''"""Judges what is wide."""
import os as told  # a name that others chose
class Acquittal:
    """Returns nothing:
    nobody asks."""
    size_m = 1
    """Of the class: comes to
    something."""
def widened(lane):  # beside it
    # A block of comments that comes
    # to its end.
    text = "told"; _tell_it = text.mend()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(prose, "CHECKOUT", tmp_path)
    return Module("kestrel_grpc.some", path)


def test_refused_words_are_found_in_docstrings_comments_and_names(module: Module):
    found = {(place.split(":")[1], place.split(": ")[1]) for place in prose.refused_words(module)}
    own = {("1", "Judges"), ("3", "Acquittal"), ("4", "nobody"), ("7", "comes to"), ("9", "lane"), ("9", "widened")}
    assert found == own | {("11", "beside"), ("11", "comes to"), ("12", "tell")}


def test_a_lane_of_a_warp_is_a_term_of_kernels(module: Module):
    kernel = Module("kestrel_ops.some", module.path)
    assert not any(place.endswith(": lane") for place in prose.refused_words(kernel))


def test_a_docstring_that_begins_with_a_fragment_is_found(module: Module):
    assert list(prose.fragments(module)) == ["some.py:7: Of the class: comes to"]
