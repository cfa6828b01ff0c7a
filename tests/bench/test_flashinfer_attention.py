"""The comparison with FlashInfer, by a double of it: both are held to the definitions, for both types of pages."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import flashinfer_attention
from tests.kernels.test_flashinfer import library

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

__all__ = ["library"]


@needs_triton
def test_both_are_timed_and_compared_with_the_definitions(library, tmp_path, monkeypatch):
    again = SimpleNamespace(stdout=b'noise\n{"import": 1.0, "bfloat16": 2.0, "float8": 3.0}\n')
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: again)
    monkeypatch.setattr(flashinfer_attention, "_REPEATS", 1)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")
    monkeypatch.setattr(sys, "argv", ["flashinfer_attention", "--device", "cpu", "--tiny", "--batches", "2"])
    assert flashinfer_attention.main() == 0
    found = json.loads((tmp_path / "flashinfer.json").read_text())
    assert found["kept_s"] == {"import": 1.0, "bfloat16": 2.0, "float8": 3.0}
    assert set(found["first_s"]) == set(found["kept_s"])
    rows = {(row["what"], row["pages"]): row for row in found["rows"]}
    kinds = ("2 prompts", "2 behind the picture", "2 tokens")
    assert set(rows) == {(kind, pages) for kind in kinds for pages in ("bfloat16", "float8")}
    for (kind, pages), row in rows.items():
        assert row["flashinfer_error"] < (5e-2 if pages == "float8" else 2e-2), (kind, pages)
        # Our kernel reads the keys of the step before they are rounded to the type of the pages.
        assert row["ours_error"] < (0.2 if pages == "float8" else 2e-2), (kind, pages)
