"""The comparison of requests with and without adapters, in one short run with the built-in model."""

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.small import write_endless_nano
from tests.reference_fixtures import CHECKOUT


def test_requests_with_and_without_adapters_are_compared(tmp_path: Path):
    model = write_endless_nano(tmp_path / "endless")
    command = (sys.executable, "-m", "bench.adapters", "--model", str(model), "--adapters", "3", "--rank", "4")
    short = ("--rows", "direct:3", "--rounds", "1", "--seconds", "0.2", "--warm-up", "0.1", "--most-slower", "100")
    answer = subprocess.run(
        (*command, *short, "--pictures", "1", "--processes", "1", "--json", str(tmp_path / "result.json")),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]["mixed over none"]
    assert min(*row["first"], *row["second"]) > 0
    assert "| direct, 3 at once | requests/s |" in answer.stdout
