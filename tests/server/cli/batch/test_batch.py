"""The command `kestrel-grpc batch` as a process: both forms, kills and signals, exit statuses."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.reference_fixtures import CHECKOUT

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KESTREL")}
WITH_FAKE_ENGINE = (sys.executable, "-m", "tests.server.cli.batch.batch_program")


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(count: int, **others: str) -> list[dict[str, Any]]:
    """Lines, some of which have another question by their number: `at_3="…"`."""
    return [
        {"id": f"line {number}", "question": others.get(f"at_{number}", f"question {number}")}
        for number in range(1, count + 1)
    ]


def run(command: Sequence[str], *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, words)],
        cwd=CHECKOUT,
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def ask(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run with the fake engine."""
    return run(WITH_FAKE_ENGINE, *words, "--skill", "query", **variables)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, as the examples do")
def test_the_examples_of_the_page_run_as_written(tmp_path: Path):
    """An engine of its own and a server write the same bytes, of REST and of OpenAI's API."""
    page = (CHECKOUT / "docs" / "batch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```sh")
    (tmp_path / "kestrel_grpc").symlink_to(CHECKOUT / "kestrel_grpc")
    script = "".join(blocks).replace("kill %1", "kill -INT %1; wait").replace("8000", str(free_port()))
    done = subprocess.run(
        ["bash", "-euc", f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"],
        cwd=tmp_path,
        env={
            **ENVIRONMENT,
            "KESTREL_GRPC_PORT": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    color, shapes, kite = read_lines(tmp_path / "answers.jsonl")
    assert color.keys() == {"id", "model", "answer", "finish_reason", "metrics"}
    assert (color["id"], color["answer"]) == ("color", "yellow")
    assert color["metrics"].keys() == {"input_tokens", "output_tokens"}
    assert len(shapes["objects"]) == 5
    assert (kite["custom_id"], kite["response"]["status_code"], kite["error"]) == ("kite", 200, None)
    assert kite["response"]["body"]["choices"][0]["message"]["content"]
    (caption,) = read_lines(tmp_path / "captions.jsonl")
    assert caption["id"] == "demo_picture.png"
    assert "yellow star" in caption["caption"]
    assert list(tmp_path.glob("*.resume")) == []
    coco = json.loads((tmp_path / "coco.json").read_text())
    assert [image["file_name"] for image in coco["images"]] == ["demo_picture.png"]
    assert [category["name"] for category in coco["categories"]] == ["star", "heart"]
    assert {item["category_id"] for item in coco["annotations"]} >= {1}
    labels = (tmp_path / "yolo" / "labels" / "demo_picture.txt").read_text().splitlines()
    assert len(labels) == len(coco["annotations"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path):
    lines = write_lines(tmp_path / "in.jsonl", questions(60, at_35="kill me"))
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert ask(lines, whole).returncode == 0
    command = [*WITH_FAKE_ENGINE, str(lines), str(parts), "--skill", "query", "--in-flight", "8"]
    with subprocess.Popen(
        command, cwd=CHECKOUT, env={**ENVIRONMENT, "HOLDS": "1"}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.kill()
    written = parts.read_bytes()
    assert whole.read_bytes().startswith(written)
    assert 0 < written.count(b"\n") < 35
    with parts.open("ab") as file:
        file.write(b'{"id":"line')  # as a kill in the middle of a write leaves it
    refused = ask(lines, parts)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    resumed = ask(lines, parts, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "60 lines" in resumed.stderr
    assert parts.read_bytes() == whole.read_bytes()


def test_a_signal_has_what_is_in_flight_written_and_says_how_to_go_on(tmp_path: Path):
    lines = write_lines(tmp_path / "in.jsonl", questions(60, at_35="stop me"))
    out = tmp_path / "out.jsonl"
    stopped = ask(lines, out, "--in-flight", "4", SIGNALS="1")
    assert stopped.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; the same command with --resume goes on" in stopped.stderr
    written = [line["id"] for line in read_lines(out)]
    assert written == [f"line {number}" for number in range(1, len(written) + 1)]
    assert 35 <= len(written) < 60
    assert ask(lines, out, "--resume").returncode == 0
    assert len(out.read_text().splitlines()) == 60


def test_progress_and_failures_are_told(tmp_path: Path):
    lines = write_lines(tmp_path / "in.jsonl", [*questions(3), "{", {"id": "x", "question": "?", "hue": 1}])
    done = ask(lines, tmp_path / "out.jsonl", "--progress")
    assert done.returncode == 1
    assert "kestrel-grpc: 5 lines, 2 failed, " in done.stderr
    assert "kestrel-grpc: record 4 failed: INVALID_REQUEST: the line is not a JSON object" in done.stderr
    *answered, torn, unknown = read_lines(tmp_path / "out.jsonl")
    assert [line["answer"] for line in answered] == [f"question {number} with {number}" for number in (1, 2, 3)]
    assert torn["error"]["violations"][0]["description"] == "the line is not a JSON object in UTF-8"
    assert unknown["error"]["violations"] == [{"field": "hue", "description": "is not a field of this request"}]


def test_failed_lines_are_tried_again_and_the_others_stay(tmp_path: Path):
    lines = write_lines(
        tmp_path / "in.jsonl", [*questions(3), {"id": "later", "image": "later.png", "question": "?"}]
    )
    out = tmp_path / "out.jsonl"
    assert ask(lines, out).returncode == 1
    first = out.read_text().splitlines()
    (tmp_path / "later.png").write_bytes((CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes())
    done = ask(lines, out, "--retry-failed")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert out.read_text().splitlines()[:3] == first[:3]
    assert read_lines(out)[3]["answer"] == "? with 4"


def test_standard_output_gets_the_lines_and_its_reader_may_leave(tmp_path: Path):
    lines = write_lines(tmp_path / "in.jsonl", questions(200))
    done = ask(lines, "-")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [f"line {n}" for n in range(1, 201)]
    command = [*WITH_FAKE_ENGINE, str(lines), "-", "--skill", "query"]
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaints = process.stderr.read()
    assert process.returncode == 1
    assert b"Traceback" not in complaints
    assert list(tmp_path.iterdir()) == [lines]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["in.jsonl", "-", "--resume"], "--resume: OUT is no file that a run can go on with"),
        (["in.jsonl", "out.jsonl", "--retry-failed", "--force"], "--force and --retry-failed: give one of them"),
        (["in.jsonl", "out.jsonl", "--retry-failed"], "out.jsonl: No such file"),
        (["bare.jsonl", "out.jsonl"], "bare.jsonl: every line lacks skill; give --skill"),
        (["bare.jsonl", "out.jsonl", "--skill", "gaze"], "bare.jsonl: every line lacks eye; give --field eye=…"),
        (["none.jsonl", "out.jsonl"], "none.jsonl: No such file or directory"),
        (["in.jsonl", "in.jsonl"], "OUT must not be IN"),
        (["in.jsonl", "out.jsonl", "--field", "question"], "must be NAME=VALUE"),
        (["in.jsonl", "out.jsonl", "--in-flight", "0"], "must be a whole number from 1 to 1024"),
        (["in.jsonl", "out.jsonl", "--resume", "--force"], "--resume and --force: give one of them"),
        (["in.jsonl", "out.jsonl", "--max-batch-size", "none"], "--max-batch-size: 'none' must be"),
        (["in.jsonl", "out.jsonl", "--devices", "0,1"], "--devices: is no option of batch"),
        (
            ["in.jsonl", "out.jsonl", "--address", "localhost:1", "--dtype", "float32"],
            "--dtype: is set by the server",
        ),
        (["in.jsonl", "out.jsonl", "--address", "ftp://localhost"], "must be the address of the HTTP port"),
        (["in.jsonl", "nowhere/out.jsonl"], "nowhere/out.jsonl: No such file or directory"),
    ],
)
def test_a_mistake_in_the_call_is_told_before_anything_is_loaded(
    tmp_path: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
):
    from kestrel_grpc.cli.commands import run as run_command

    write_lines(tmp_path / "bare.jsonl", questions(1))
    write_lines(tmp_path / "in.jsonl", [{"skill": "query", **line} for line in questions(1)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "kestrel_runtime.engine.engine", None)  # importing it fails
    try:
        status = run_command(["batch", *words])
    except SystemExit as error:  # argparse
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_data_set_that_could_not_be_written_is_written_from_the_complete_lines(tmp_path: Path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    shutil.copy(CHECKOUT / "kestrel_grpc" / "demo_picture.png", pictures)
    words = (pictures, tmp_path / "out.jsonl", "--skill", "detect", "--field", "object=car", "--coco")
    command = (sys.executable, "-m", "kestrel_grpc", "batch")
    full = run(command, *words, "/dev/full")
    assert full.returncode == 1
    assert "No space left on device; all lines are written; the same command with --retry-failed" in full.stderr
    lines = (tmp_path / "out.jsonl").read_bytes()
    again = run(command, *words, tmp_path / "coco.json", "--retry-failed")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == lines
    assert len(json.loads((tmp_path / "coco.json").read_text())["images"]) == 1
