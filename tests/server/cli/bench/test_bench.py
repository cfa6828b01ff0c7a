"""The command `kestrel-grpc bench`: every API against a server, the flags, and the page of the documentation."""

import argparse
import asyncio
import io
import json
import os
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.cli.bench.calls import Question, Target
from kestrel_grpc.cli.bench.command import Step, add_bench_command, steps_of
from kestrel_grpc.cli.bench.loops import Sample
from kestrel_grpc.cli.bench.processes import Tally
from kestrel_grpc.cli.bench.progress import Progress
from kestrel_grpc.cli.commands import run
from kestrel_grpc.process.machine import processors
from kestrel_runtime.api.errors import Overloaded
from tests.fakes import HOLD, FakeEngine, answers, fails
from tests.reference_fixtures import CHECKOUT
from tests.server.serving import Serving, serving

PICTURE = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
APIS = ("grpc", "rest", "openai", "triton")
LONGEST_S = 60.0


def address_of(server: Serving, api: str) -> str:
    return f"http://127.0.0.1:{server.server.http_port}" if api in ("rest", "openai") else server.address


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_command(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


async def bench(server: Serving, api: str, *words: str) -> int:
    """The exit status. The processes of load ask the server, which runs on this event loop."""
    command = ["bench", "--api", api, "--address", address_of(server, api), "--processes", "1", *words]
    return await asyncio.to_thread(run, command)


async def asked(server: Serving, api: str, *questions: Question, timeout_s: float = LONGEST_S) -> list[Sample]:
    """The questions, one after another, without processes."""
    target = Target(api, address_of(server, api), model=server.engine.info.model)
    async with target.connected() as caller:
        return [await caller.call(question, time.perf_counter(), timeout_s) for question in questions]


@pytest.mark.parametrize("api", APIS)
async def test_each_api_streams_an_answer_and_gives_it_whole(api: str):
    async with serving(http_port=0) as server:
        streamed = Question("query", "What?", PICTURE, max_tokens=5, temperature=0.0)
        whole = Question("query", "What?", PICTURE, max_tokens=5, temperature=0.0, is_streamed=False)
        samples = await asked(server, api, streamed, streamed, whole)
        requests: list[Any] = server.engine.requests
    assert [(sample.error, sample.message) for sample in samples] == [("", "")] * 3
    assert [sample.num_tokens for sample in samples] == [3, 3, 3]
    assert [sample.num_input_tokens for sample in samples] == [735] * 3
    assert len(samples[2].arrivals) == 1
    for sample in samples:
        assert 1 <= len(sample.arrivals) <= 2
        assert sample.arrivals[-1] <= sample.ended
    assert {request.question for request in requests} == {"What?"}
    assert {request.sampling.max_tokens for request in requests} == {5}
    assert {request.sampling.temperature for request in requests} == {0.0}
    assert all(request.image is not None for request in requests)


@pytest.mark.parametrize("api", ["grpc", "rest", "triton"])
@pytest.mark.parametrize("skill", ["caption", "point", "detect", "segment"])
async def test_each_skill_is_asked_for(api: str, skill: str):
    async with serving(http_port=0) as server:
        (sample,) = await asked(server, api, Question(skill, "" if skill == "caption" else "star", PICTURE))
        (request,) = server.engine.requests
    assert (sample.error, sample.message) == ("", "")
    assert request.skill == skill
    assert sample.num_tokens == 3


@pytest.mark.parametrize(
    ("api", "status"), [("grpc", "RESOURCE_EXHAUSTED"), ("rest", "429"), ("openai", "429"), ("triton", "FAILED")]
)
async def test_a_refusal_is_a_sample_with_its_status_and_the_connection_goes_on(api: str, status: str):
    refused = Question("query", "no")
    script: Any = lambda request: (fails(Overloaded(4, 0.5)) if request.question == "no" else answers)(request)  # noqa: E731 (a script is a function)
    async with serving(FakeEngine(script), http_port=0) as server:
        samples = await asked(server, api, refused, Question("query", "yes"), refused)
    assert [bool(sample.error) for sample in samples] == [True, False, True]
    assert samples[0].error == status
    assert samples[0].message


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_that_does_not_come_is_a_timeout(api: str):
    async with serving(FakeEngine(lambda request: [HOLD, *answers(request)]), http_port=0) as server:
        (sample,) = await asked(server, api, Question("query", "What?"), timeout_s=0.05)
    assert sample.error == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("api", APIS)
async def test_the_command_measures_three_requests(api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    words = ("-n", "3", "--concurrency", "2", "--warm-up", "0", "--text", "What?", "--num-pictures", "1")
    async with serving(http_port=0) as server:
        slo = ("--slo", "total_ms=1e9")
        assert await bench(server, api, *words, *slo, "--json", str(result), "--html", str(page)) == 0
        assert len(server.engine.requests) == 3
    found = json.loads(result.read_text())
    assert (found["count"], found["completed"], found["failed"]) == (3, 3, 0)
    assert (found["max_concurrency"], found["request_rate"], found["backend"]) == (2, "inf", api)
    assert found["statusCodeDistribution"] == {"OK": 3}
    assert found["total_output_tokens"] == 9
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["request_throughput"] == pytest.approx(3 / found["duration"])
    assert found["fastest"] <= found["average"] <= found["slowest"] <= found["total"]
    assert found["options"]["text"] == ["What?"]
    assert "token" not in found["options"]
    assert (found["asked"]["picture_sizes"], found["asked"]["texts"]) == ({"800 × 557 px": 1}, "1 given")
    assert found["client"]["processors"] == processors()
    assert (found["server"]["model"], found["server"]["devices"]) == ("fake", [processors()])
    assert found["server"]["settings"]["prefix_cache"] == "on"
    printed = capsys.readouterr()
    assert "3 requests in" in printed.out
    assert "answered" not in printed.err, "progress is for terminals"
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("api", ["grpc", "rest"])
async def test_a_server_with_an_admin_port_is_measured_without_what_it_says_there(api: str, tmp_path: Path):
    result = tmp_path / "result.json"
    async with serving(admin_port=0, http_port=0) as server:
        words = ("-n", "2", "--warm-up", "0", "--num-pictures", "0", "--json", str(result))
        assert await bench(server, api, *words) == 0
    found = json.loads(result.read_text())
    assert (found["completed"], found["server"], found["model_id"]) == (2, None, "fake" if api == "rest" else "")


async def test_an_open_loop_and_a_ramp_have_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = tmp_path / "result.json"
    words = ("-n", "2", "--warm-up", "0", "--num-pictures", "0", "--json", str(result))
    async with serving() as server:
        assert await bench(server, "grpc", *words, "--rate-ramp", "500:1500") == 0
    found = json.loads(result.read_text())
    assert [step["request_rate"] for step in found["steps"]] == [500.0, 1000.0, 1500.0]
    assert [step["completed"] for step in found["steps"]] == [2, 2, 2]
    assert "1,500 sent/s" in capsys.readouterr().out


async def test_failed_requests_are_counted_by_status_and_the_exit_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = tmp_path / "result.json"
    async with serving(FakeEngine(fails(Overloaded(4, 0.5)))) as server:
        words = ("-n", "2", "--concurrency", "1", "--warm-up", "0", "--num-pictures", "0", "--json", str(result))
        assert await bench(server, "grpc", *words) == 1
    found = json.loads(result.read_text())
    assert found["statusCodeDistribution"] == {"RESOURCE_EXHAUSTED": 2}
    assert list(found["errorDistribution"].values()) == [2]
    assert (found["completed"], found["failed"], found["median_ttft_ms"]) == (0, 2, None)
    assert "2 requests in" in capsys.readouterr().out


@asynccontextmanager
async def started(server: Serving, *words: str) -> AsyncIterator[Process]:
    """The command in a process group of its own, as a shell starts it."""
    command = ("-m", "kestrel_grpc", "bench", "--address", server.address, "--processes", "1", *words)
    command += ("--warm-up", "0", "--num-pictures", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_an_interrupt_ends_the_measurement_and_what_was_measured_is_shown(tmp_path: Path):
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    is_loaded = asyncio.Event()

    def script(request: Any) -> Any:
        if len(server.engine.requests) >= 10:
            is_loaded.set()
        return answers(request)

    async with (
        serving(FakeEngine(script)) as server,
        started(server, "--ramp", "2:4", "-n", "1000000", "--json", str(result), "--html", str(page)) as process,
    ):
        await is_loaded.wait()
        os.killpg(process.pid, signal.SIGINT)
        printed, complaints = await process.communicate()
        num_received = len(server.engine.requests)
    assert process.returncode == 130, complaints.decode()
    found = json.loads(result.read_text())
    (step,) = found["steps"]
    assert found["endReason"] == "cancel"
    assert step["is_partial"] is True
    assert 1 <= step["completed"] <= num_received
    assert f"{step['count']:,} requests in" in printed.decode()
    assert ": ended early, after " in printed.decode()
    assert ": ended early, after " in page.read_text()
    waits, ended = complaints.decode().splitlines()  # and nothing of the process of load
    assert "ending the measurement" in waits
    assert "ended by SIGINT" in ended


async def test_an_interrupt_after_another_signal_ends_the_command_at_once(tmp_path: Path):
    result = tmp_path / "result.json"
    is_asked = asyncio.Event()

    def script(request: Any) -> Any:
        is_asked.set()
        return [HOLD, *answers(request)]

    async with (
        serving(FakeEngine(script)) as server,
        started(server, "--concurrency", "1", "-n", "5", "--json", str(result)) as process,
    ):
        await is_asked.wait()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stderr is not None
        assert b"ending the measurement" in await process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        printed, complaints = await process.communicate()
    assert process.returncode == 130
    assert (printed, complaints) == (b"", b"")
    assert not result.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rate", "0"], "must be a number above 0"),
        (["--ramp", "8"], "must be FIRST:LAST"),
        (["--ramp", "8:1"], "must begin below its end"),
        (["--ramp", "1:2.5"], "must be a whole number from 1"),
        (["--slo", "ttft=5"], "must be one of first_token_ms, per_token_ms, total_ms"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with argument"),
        (["--skill", "point", "--num-pictures", "0"], "a point needs a picture"),
        (["--skill", "caption", "--text", "What?", "--pictures", "x", "--num-pictures", "2"], "a caption has none"),
        (["--api", "openai", "--skill", "detect"], "OpenAI's API has queries alone"),
        (["--api", "triton", "--adapter", "gold"], "Triton's API has none"),
        (["--api", "rest", "--tell-pictures"], "needs --api grpc"),
        (["--pictures", "nowhere.png"], "nowhere.png: no such file"),
        (["--json", "nowhere/result.json"], "--json: "),
        (["compare", "a.json"], "usage: kestrel-grpc bench compare [-h] A.json B.json\n"),
    ],
)
def test_a_mistake_in_the_call_is_told_before_anything_is_sent(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    try:
        status = run(["bench", *words])
    except SystemExit as error:  # argparse
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("api", APIS)
def test_a_server_that_is_not_there_is_told_in_a_line(api: str, capsys: pytest.CaptureFixture[str]):
    assert run(["bench", "--api", api, "--address", "localhost:1", "--timeout", "5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kestrel-grpc: localhost:1: ")


def test_a_ramp_doubles_and_ends_where_it_is_told():
    assert [step.concurrency for step in steps_of(parsed("--ramp", "1:64"))] == [1, 2, 4, 8, 16, 32, 64]
    assert [step.concurrency for step in steps_of(parsed("--ramp", "3:10"))] == [3, 6, 10]
    assert [step.rate_per_s for step in steps_of(parsed("--rate-ramp", "0.5:2"))] == [0.5, 1.0, 2.0]
    assert steps_of(parsed()) == [Step(8, None)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal():
    terminal = Terminal()
    progress = Progress(2, 30.0, None, terminal)
    progress.begin(str(Step(4, None)))
    progress.show(Tally(20, 1, 60))
    assert "\n" not in terminal.getvalue()
    assert "step 1 of 2, 4 at once, " in terminal.getvalue()
    assert progress.line(Tally(20, 1, 60), 10.0).endswith("10 s of 30: 20 answered, 1 failed, 2.0/s, 6 tokens/s")
    progress.close()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_every_flag_is_described_once_in_the_documentation():
    page = (CHECKOUT / "docs" / "bench.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(--?[a-z-]+)[ `]", page, re.MULTILINE)
    described += re.findall(r", `(--requests) N` \|", page)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_bench_command(commands)
    flags = {flag for action in commands.choices["bench"]._actions for flag in action.option_strings}
    # Those of every client command, and those that have a text of their own.
    others = {"-h", "--help", "--api", "--address", "--token", "--timeout", "--slo", "--json", "--html"}
    others |= {"--tls-ca", "--tls-client-certificate", "--tls-client-key"}
    assert sorted(described) == sorted(flags - others)
    assert all(f"`{flag}" in page for flag in others - {"-h", "--help"} if not flag.startswith("--tls"))
