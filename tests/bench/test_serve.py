"""The whole harness: its ramp on a server without a model, and one run on a small one."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench import serve
from bench.harness.checkpoints import END_BIAS
from bench.harness.empty_server import empty_server
from bench.harness.load import LoadProcesses
from bench.harness.output import Progress
from bench.harness.serving import RunningServer
from bench.harness.summary import Row
from bench.harness.workload import WORKLOADS
from bench.serve import MAX_RATES, RATE_STEP, parser, plan_of, ramp
from tests.bench.small import write_endless_nano
from tests.reference_fixtures import CHECKOUT


def ramped(*options: str) -> list[Row]:
    plan = plan_of(parser().parse_args(("--seconds", "0.2", *options)))
    with empty_server() as address, LoadProcesses(address, 1, num_pictures=1) as load:
        return list(ramp(plan, WORKLOADS["direct"], load, 50.0, Progress(1, io.StringIO())))


def test_a_server_that_keeps_up_is_asked_for_more_and_more():
    rows = ramped("--first-token-objective-ms", "60000", "--per-token-objective-ms", "60000")
    assert [row.load for row in rows] == pytest.approx([50.0 * RATE_STEP**step for step in range(MAX_RATES)])


def test_a_server_that_answers_too_late_is_asked_for_no_more():
    # An event loop may wake up a millisecond before a request is due, so that its answer comes before that, too.
    (row,) = ramped("--first-token-objective-ms=-1000")
    assert row.goodput_per_s == 0
    assert row.requests_per_s > 0


def test_without_a_model_an_endless_copy_of_the_built_in_one_is_served(monkeypatch: pytest.MonkeyPatch):
    served_options: list[str] = []

    @contextlib.contextmanager
    def note(options: Sequence[str], **_: object) -> Iterator[RunningServer]:
        served_options.extend(options)
        tensors = load_file(Path(options[options.index("--model") + 1]) / "model.safetensors")
        assert tensors["model.text.lm_head.bias"][0] == END_BIAS
        yield RunningServer("127.0.0.1:1")

    monkeypatch.setattr(serve, "started_server", note)
    with serve.served(parser().parse_args(("--", "--ageing", "5")), 7):
        assert served_options[-4:] == ["--max-batch-size", "7", "--ageing", "5"]


def test_a_short_run_leaves_numbers(tmp_path: Path):
    model = write_endless_nano(tmp_path / "endless")
    command = (sys.executable, "-m", "bench.serve", "--quick", "--workloads", "direct", "--batches", "1,2")
    answer = subprocess.run(
        (
            *command,
            "--model",
            str(model),
            "--open",
            "none",
            "--seconds",
            "0.2",
            "--pictures",
            "2",
            "--json",
            str(tmp_path / "serve.json"),
            "--",
            "--ageing",
            "5",
        ),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads((tmp_path / "serve.json").read_text())
    assert [row["load"] for row in found["rows"]] == [1, 2]
    assert all(row["wrong_lengths"] == 0 and row["tokens_per_s"] > 0 for row in found["rows"])
    assert found["server"]["options"] == "--ageing 5"
    assert found["server"]["measured_with"].startswith("python -m bench.serve --quick --workloads direct")
    assert found["client"][0]["requests_per_s"] > found["rows"][0]["requests_per_s"]
    assert found["server"]["precision"].startswith("the default")
