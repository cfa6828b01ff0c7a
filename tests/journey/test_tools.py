"""The tools people use: grpcurl, buf curl and our own commands, against the true server on reference answers."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.__main__ import main
from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, copy_with_one_image, expected

BIN = Path(sys.executable).parent
CASE = expected(MD3_SMALL)["images"][1]
IMAGE = MD3_SMALL / CASE["image"]
QUERY = CASE["calls"][0]
REQUEST = json.dumps(
    {
        "question": QUERY["args"]["question"],
        "image": {"data": base64.b64encode(IMAGE.read_bytes()).decode()},
        "sampling": {"temperature": 0, "max_tokens": expected(MD3_SMALL)["max_tokens"]},
    }
)
REFERENCE_ANSWER = QUERY["expect"]["answer"]


async def run(*command: str, stdin: str = "") -> str:
    """Run a program to its end and return what it printed; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate(stdin.encode())
    assert process.returncode == 0, err.decode()
    return out.decode()


def json_values(text: str) -> list[dict[str, Any]]:
    """The JSON values of a text, one after the other."""
    decoder, values = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


async def test_grpcurl_lists_the_services_and_streams_the_reference_answer(live_server: LiveServer):
    grpcurl = str(BIN / "grpcurl")
    services = (await run(grpcurl, "-plaintext", live_server.address, "list")).split()
    assert {"kestrel.v1.VisionService", "kestrel.v1.EngineService", "grpc.health.v1.Health"} <= set(services)
    method = "kestrel.v1.VisionService/Query"
    printed = json_values(await run(grpcurl, "-plaintext", "-d", "@", live_server.address, method, stdin=REQUEST))
    assert "started" in printed[0]
    assert printed[-1]["completed"]["answer"] == REFERENCE_ANSWER
    assert "".join(item.get("delta", {}).get("text", "") for item in printed) == REFERENCE_ANSWER


async def test_buf_curl_lists_the_methods_and_gets_the_reference_answer(live_server: LiveServer):
    curl = (str(BIN / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge")
    methods = (await run(*curl, "--list-methods", f"http://{live_server.address}")).split()
    assert "kestrel.v1.VisionService/CompleteQuery" in methods
    url = f"http://{live_server.address}/kestrel.v1.VisionService/CompleteQuery"
    printed = json_values(await run(*curl, "-d", "@-", url, stdin=REQUEST))
    assert printed[0]["result"]["answer"] == REFERENCE_ANSWER


async def test_our_own_command_streams_the_reference_answer(live_server: LiveServer):
    command = (sys.executable, "-m", "kestrel_grpc", "query", str(IMAGE), QUERY["args"]["question"])
    options = ("--address", live_server.address, "--temperature", "0", "--max-tokens", "24")
    assert (await run(*command, *options)).removesuffix(os.linesep) == REFERENCE_ANSWER


def test_verify_prints_a_line_per_case_and_then_the_count(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["verify", str(copy_with_one_image(MD2_SMALL, tmp_path / "fixture"))]) == 0
    *cases, count = capsys.readouterr().out.splitlines()
    assert len(cases) > 5
    assert count == f"{len(cases)} passed, 0 failed"


def test_verify_of_something_else_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
