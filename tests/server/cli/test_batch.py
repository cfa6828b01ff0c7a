"""The command `kestrel-grpc batch` as a process: both forms, kills and signals, exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from tests.reference_fixtures import CHECKOUT

PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KESTREL")}
BATCH = (sys.executable, "-m", "kestrel_grpc", "batch")
WITH_FAKE_ENGINE = (sys.executable, "-m", "tests.server.cli.batch_program")


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


async def test_an_engine_of_its_own_and_a_server_write_the_same_bytes(tmp_path: Path) -> None:
    greedy = {"temperature": 0, "max_tokens": 12}
    message = {"role": "user", "content": "What is a kite?"}
    chat = {"model": "moondream3-preview", "messages": [message], "max_tokens": 4}
    lines = write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "query", "image": str(PICTURE), "question": "What color is the star?", "settings": greedy},
            {"id": "sampled", "image": str(PICTURE), "skill": "caption", "settings": {"temperature": 1.5}},
            {"id": "kestrel", "image": str(PICTURE), "skill": "point", "object": "star", "format": "kestrel"},
            {"id": "wrong", "skill": "detect", "image": "data:image/png;base64,AAAA", "object": "star"},
            {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "other", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
        ],
    )
    one_by_one = ("--skill", "query", "--deterministic", "--max-batch-size", "2")
    own = asyncio.create_task(asyncio.to_thread(run, BATCH, lines, tmp_path / "own.jsonl", *one_by_one))
    engine = await asyncio.to_thread(LocalEngine.start, EngineConfig(deterministic=True, max_batch_size=2))
    async with Server(engine, ServerConfig(port=0, http_port=0)) as server:
        served = await asyncio.to_thread(
            run,
            BATCH,
            *(lines, tmp_path / "served.jsonl", "--skill", "query"),
            *("--address", f"http://127.0.0.1:{server.http_port}/v1", "--in-flight", "3"),
        )
    assert (served.returncode, (await own).returncode) == (1, 1), served.stderr + (await own).stderr
    assert (tmp_path / "served.jsonl").read_bytes() == (tmp_path / "own.jsonl").read_bytes()
    query, sampled, kestrel, wrong, chatted, other = read_lines(tmp_path / "own.jsonl")
    assert query["id"] == "query"
    assert query["answer"] == "yellow"
    assert query["finish_reason"] == "stop"
    assert query["metrics"].keys() == {"input_tokens", "output_tokens"}
    assert sampled["caption"]
    assert kestrel.keys() == {"id", "model", "points", "finish_reason", "input_tokens", "output_tokens"}
    assert (wrong["id"], wrong["error"]["code"]) == ("wrong", "IMAGE_DECODE_FAILED")
    assert chatted["response"]["status_code"] == 200
    assert chatted["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert (other["custom_id"], other["response"]["status_code"]) == ("other", 404)
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}  # noqa: ASYNC240 — nothing else runs


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
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


def test_a_signal_has_what_is_in_flight_written_and_says_how_to_go_on(tmp_path: Path) -> None:
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


def test_progress_and_failures_are_told(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [*questions(3), "{", {"id": "x", "question": "?", "hue": 1}])
    done = ask(lines, tmp_path / "out.jsonl", "--progress")
    assert done.returncode == 1
    assert "kestrel-grpc: 5 lines, 2 failed, " in done.stderr
    *answered, torn, unknown = read_lines(tmp_path / "out.jsonl")
    assert [line["answer"] for line in answered] == [f"question {number} with {number}" for number in (1, 2, 3)]
    assert torn["error"]["violations"][0]["description"] == "the line is not a JSON object in UTF-8"
    assert unknown["error"]["violations"] == [{"field": "hue", "description": "is not a field of this request"}]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
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
) -> None:
    from kestrel_grpc.cli.commands import run as run_command

    write_lines(tmp_path / "in.jsonl", questions(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "kestrel_runtime.engine.engine", None)  # importing it fails
    try:
        status = run_command(["batch", *words])
    except SystemExit as error:  # argparse
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
