"""The comparison of prompts with one picture: the kernel of another checkout runs beside this one's, and other bits
fail."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from bench import one_picture

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
HERE = Path(__file__).parents[2]


@pytest.mark.parametrize("is_other", [False, True])
def test_kernels_of_both_trees_are_compared_and_other_bits_are_said(is_other, tmp_path, monkeypatch, capsys):
    module = tmp_path / one_picture._MODULE
    module.parent.mkdir(parents=True)
    text = (HERE / one_picture._MODULE).read_text()
    assert text.count("1.4426950408889634") == 1
    module.write_text(text.replace("1.4426950408889634", "1.44") if is_other else text)
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--before", str(tmp_path), "--prompts", "1", "--turns", "1", "--tiny"]
    monkeypatch.setattr(sys, "argv", ["one_picture", *options])
    assert one_picture.main() == is_other
    rows = json.loads((tmp_path / "one-picture.json").read_text())["rows"]
    assert [row["has_same_bits"] for row in rows] == [not is_other] * 4
    assert ("OTHERS" in capsys.readouterr().out) == is_other
