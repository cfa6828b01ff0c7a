"""The comparison of caches, in one short run with the built-in model."""

import json
import subprocess
import sys
from pathlib import Path

from bench.harness.endless import write_endless
from tests.reference_fixtures import CHECKOUT


def test_a_picture_that_comes_again_is_a_hit_with_the_cache_alone(tmp_path: Path):
    import kestrel_runtime

    model = tmp_path / "endless"
    write_endless(Path(kestrel_runtime.__path__[0]) / "nano", model)
    command = (sys.executable, "-m", "bench.caching", "--model", str(model), "--variants", "prefixes,neither")
    short = ("--rows", "cached:1", "--rounds", "1", "--seconds", "0.2", "--warm-up", "0.1")
    answer = subprocess.run(
        (*command, *short, "--pictures", "1", "--processes", "1", "--json", str(tmp_path / "result.json")),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]["cached:1"]
    assert [row["hit_share"] for row in rows["prefixes"]] == [1.0]
    assert [row["hit_share"] for row in rows["neither"]] == [0.0]
    assert "| cached, 1 at once | prefixes |" in answer.stdout
