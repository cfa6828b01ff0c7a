"""`kestrel-grpc chat`, from a pipe and on a terminal, against a canned server."""

import argparse
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.cli.chat import add_chat_command
from tests.client import canned
from tests.client.canned import CannedVision

ANSWER = "".join(canned.ANSWER_PIECES)


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "picture.png"
    path.write_bytes(b"a picture")
    return str(path)


def _run(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    parser = argparse.ArgumentParser(prog="kestrel-grpc")
    add_chat_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args(("chat", *words))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return arguments.run(arguments)


def said(request: Any) -> list[tuple[str, str, list[bytes]]]:
    return [
        (
            wire.ChatRole.Name(message.role).removeprefix("CHAT_ROLE_").lower(),
            "".join(part.text for part in message.parts),
            [part.image.data for part in message.parts if part.HasField("image")],
        )
        for message in request.messages
    ]


def test_each_line_of_a_pipe_is_a_question_about_all_before(
    address: str, vision: CannedVision, picture: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    lines = f"What is it?\n\n/image {picture}\nAnd this?\n/new\nWho?\n/quit\nnot asked\n"
    words = (picture, "--system", "Be brief.", "--max-tokens", "7", "--address", address)
    assert _run(monkeypatch, lines, *words) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n" * 3, "")
    first, second, third = vision.requests
    system, asked = ("system", "Be brief.", []), ("user", "What is it?", [b"a picture"])
    assert said(first) == [system, asked]
    assert said(second) == [system, asked, ("assistant", ANSWER, []), ("user", "And this?", [b"a picture"])]
    assert said(third) == [system, ("user", "Who?", [])]
    assert {request.sampling.max_tokens for request in vision.requests} == {7}


def test_reasoning_goes_beside_the_answer_and_not_into_the_next_turn(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    assert _run(monkeypatch, "a\nb\n", "--reasoning", "--address", address) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n" * 2, f"{canned.THOUGHT}\n" * 2)
    assert said(vision.requests[1])[1] == ("assistant", ANSWER, [])


def test_results_may_be_lines_of_json(address: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert _run(monkeypatch, "a\nb\n", "--json", "--address", address) == 0
    assert [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()] == [ANSWER] * 2


@pytest.mark.parametrize("line", ["/image no.png", "/image", "/colour"])
def test_a_mistake_in_a_pipe_ends_the_command(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch, capsys: Any, line: str
):
    assert _run(monkeypatch, f"{line}\nWhat?\n", "--address", address) == 1
    assert line.split()[-1] in capsys.readouterr().err
    assert vision.requests == []


def test_the_part_of_an_answer_that_came_before_a_failure_is_a_line(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    vision.fails_midway = True
    assert _run(monkeypatch, "What?\n", "--address", address) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{canned.ANSWER_PIECES[0]}\n"
    assert "a failed step" in shown.err


def test_on_a_terminal_a_failed_question_is_not_part_of_the_conversation(address: str, vision: CannedVision):
    vision.failures = [canned.status(code_pb2.INVALID_ARGUMENT, "too long")]
    code = (
        "import argparse, sys; from kestrel_grpc.cli.chat import add_chat_command;"
        "parser = argparse.ArgumentParser(); add_chat_command(parser.add_subparsers());"
        "arguments = parser.parse_args(); sys.exit(arguments.run(arguments))"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, "chat", "--address", address]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, b"first\n/image no.png\nsecond\n/quit\n")
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            shown = b""
            # The end of a terminal is an error on Linux.
            while ANSWER.encode() not in shown:
                shown += terminal.read(4096)
            assert process.stderr is not None
            complaint = process.stderr.read().decode()
            assert process.wait(canned.MAX_WAIT_S) == 0
    assert "too long" in complaint
    assert "no.png: No such file or directory" in complaint
    assert [said(request) for request in vision.requests] == [[("user", "first", [])], [("user", "second", [])]]
