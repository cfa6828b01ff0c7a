"""The comparison of prompts with one picture: each tree is measured in its turn, and other bits fail."""

import json
import sys

import pytest
import torch

import kestrel_ops
from bench import one_picture

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_other", [False, True])
def test_trees_are_measured_in_turns_and_other_bits_are_said(is_other, tmp_path, monkeypatch, capsys):
    trees = []

    def run_in(tree, arguments):
        assert arguments == ["--device", "cpu", "--prompts", "2", "--tiny"]
        trees.append(tree)
        found = one_picture.measured([2], CPU, kestrel_ops.__path__[0], is_tiny=True)
        if is_other and tree == tmp_path:
            found["2 prompts, float8 pages"]["digest"] = "0"
        return found

    monkeypatch.setattr(one_picture, "run_in", run_in)
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--before", str(tmp_path), "--device", "cpu", "--prompts", "2", "--tiny", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["one_picture", *options])
    assert one_picture.main() == is_other
    own = one_picture.HERE.parents[1]
    assert trees == [tmp_path, own, tmp_path, own]
    rows = json.loads((tmp_path / "one-picture.json").read_text())["rows"]
    assert [row["case"] for row in rows if not row["has_same_bits"]] == ["2 prompts, float8 pages"] * is_other
    assert len(rows) == 4
    assert capsys.readouterr().out.count("OTHERS") == is_other


def test_a_process_has_the_modules_of_its_tree(monkeypatch):
    with pytest.raises(AssertionError, match="the modules of another tree"):
        one_picture.measured([1], CPU, "/elsewhere", is_tiny=True)
