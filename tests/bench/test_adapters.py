"""The comparison of requests with and without adapters, in one short run with the built-in model."""

import json
import subprocess
import sys
from pathlib import Path

from bench.harness.checkpoints import write_endless
from tests.reference_fixtures import CHECKOUT


def test_requests_with_and_without_adapters_are_compared(tmp_path: Path):
    import kestrel_runtime

    model = tmp_path / "endless"
    write_endless(Path(kestrel_runtime.__path__[0]) / "nano", model)
    command = (sys.executable, "-m", "bench.adapters", "--model", str(model), "--adapters", "3", "--rank", "4")
    short = ("--rows", "direct:3", "--rounds", "1", "--seconds", "0.2", "--most-slower", "100")
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
