"""A start leaves what it has found to later ones."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs

import kestrel_runtime
from kestrel_ops import kept_facts


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return tmp_path


def test_facts_are_there_for_the_same_configuration_alone():
    first = kept_facts(("md2", 64), (kestrel_runtime,))
    assert first.get("bytes") is None
    first.put("bytes", 17)
    first.put("kernels", [["module", "name", "{}"]])
    again = kept_facts(("md2", 64), (kestrel_runtime,))
    assert (again.get("bytes"), again.get("kernels")) == (17, [["module", "name", "{}"]])
    assert kept_facts(("md2", 65), (kestrel_runtime,)).get("bytes") is None
    assert kept_facts(("md2", 64), ()).get("bytes") is None


@pytest.mark.parametrize("content", ["", "[1]", '{"bytes": 1'])
def test_a_file_that_was_not_written_whole_counts_as_none(folder: Path, content: str):
    kept_facts(("md2",), ()).put("bytes", 17)
    (file,) = folder.rglob("start.json")
    file.write_text(content)
    assert kept_facts(("md2",), ()).get("bytes") is None


def test_a_folder_that_cannot_be_written_costs_the_facts_alone(folder: Path):
    knobs.cache.dir = str(folder / "file" / "below")
    (folder / "file").write_text("")
    facts = kept_facts(("md2",), ())
    facts.put("bytes", 17)
    assert facts.get("bytes") == 17
