"""The bench of batches: its memory table over a small input."""

import asyncio
from pathlib import Path

from bench.batch import _memory


def test_memory_is_read_as_often_as_promised(tmp_path: Path):
    found = asyncio.run(_memory(tmp_path, 200))
    assert [reading["lines"] for reading in found["readings"]] == list(range(20, 201, 20))
    assert all(reading["mib"] > 0.0 for reading in found["readings"])
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 200
