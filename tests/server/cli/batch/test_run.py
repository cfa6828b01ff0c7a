"""A run of a batch over a fake engine: order, bounds, retries, stops, memory."""

import asyncio
import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.cli.batch import run as batch_run
from kestrel_grpc.cli.batch.callers import Caller, EngineCaller, Reply, RunEnded, Unreachable
from kestrel_grpc.cli.batch.lines import InputUnusable, OutputLine, Record, Template, open_source
from kestrel_grpc.cli.batch.output import Output
from kestrel_grpc.cli.batch.run import Progress, Run
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import NoRemoteImages
from kestrel_runtime.api.errors import ConstraintFailed, EngineUnavailable, Overloaded, QueueTimeout
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Usage
from kestrel_runtime.api.requests import Query, Request
from tests.fakes import HOLD, TIMING, FakeEngine

Script = Callable[[str], Iterable[object]]


def told(text: str) -> Finished:
    return Finished(QueryOutput(text, None), FinishReason.STOP, Usage(3, 0, 2), TIMING)


def engine_of(script: Script) -> FakeEngine:
    """Answers each question by a script."""

    def play(request: Request) -> Iterable[object]:
        assert isinstance(request, Query)
        return script(request.question)

    return FakeEngine(play)


def caller_of(engine: FakeEngine) -> EngineCaller:
    return EngineCaller(engine, ServerConfig(), NoRemoteImages())


def records(*questions: str) -> Iterator[Record]:
    for number, question in enumerate(questions, 1):
        yield Record(number, f"{number:016x}", {"id": number, "question": question})


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    output = Output(tmp_path / "out.jsonl", {}, resumes=False, replaces=False)
    yield output
    output.close()


def run_of(
    given: Iterator[Record], output: Output, caller: Caller, *, num_in_flight: int = 4, max_retry_s: float = 60.0
) -> Run:
    template = Template("query")
    return Run(given, output, caller, template, num_in_flight=num_in_flight, max_retry_s=max_retry_s)


def written(output: Output) -> list[Any]:
    return [json.loads(line) for line in output.path.read_text().splitlines()]


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_FIRST_WAIT_S", 0.0)


async def test_lines_are_written_in_the_order_of_the_input(output):
    engine = engine_of(lambda question: [HOLD, told(question)] if question == "slow" else [told(question)])
    run = run_of(records("slow", "b", "c"), output, caller_of(engine), num_in_flight=3)
    running = asyncio.create_task(run.run())
    for _ in range(3):
        await engine.num_submitted.acquire()
    assert written(output) == []
    engine.release()
    assert await running
    assert [(line["id"], line["answer"]) for line in written(output)] == [(1, "slow"), (2, "b"), (3, "c")]


async def test_so_many_requests_are_in_flight_and_no_more(output):
    engine = engine_of(lambda question: [HOLD, told(question)])
    running = asyncio.create_task(run_of(records(*"abcdefgh"), output, caller_of(engine), num_in_flight=3).run())
    for _ in range(3):
        await engine.num_submitted.acquire()
    assert len(engine.requests) == 3
    engine.release()
    assert await running
    assert len(written(output)) == 8


async def test_a_slow_line_lets_others_run_ahead_within_the_window(output):
    ahead: list[int] = []

    def script(question: str) -> Iterable[object]:
        ahead.append(int(question) - output.num_lines)
        return [HOLD, told(question)] if question == "1" else [told(question)]

    engine = engine_of(script)
    numbers = map(str, range(1, 201))
    running = asyncio.create_task(run_of(records(*numbers), output, caller_of(engine), num_in_flight=2).run())
    for _ in range(32):
        await engine.num_submitted.acquire()
    engine.release()
    assert await running
    assert [line["id"] for line in written(output)] == list(range(1, 201))
    assert max(ahead) == 32


async def test_a_failed_line_says_why_and_the_others_are_answered(output):
    engine = engine_of(lambda question: [ConstraintFailed()] if question == "b" else [told(question)])
    assert await run_of(records("a", "b", "c"), output, caller_of(engine)).run()
    first, failed, last = written(output)
    assert (first["answer"], last["answer"]) == ("a", "c")
    assert (failed["id"], failed["error"]["code"], failed["error"]["status"]) == (2, "CONSTRAINT_FAILED", 422)
    assert output.num_failures == 1


async def test_an_image_that_cannot_be_read_fails_its_line_alone(output, tmp_path):
    engine = engine_of(lambda question: [told(question)])
    os.mkfifo(tmp_path / "pipe.png")
    given = [
        Record(1, "0" * 16, {"question": "a", "image": tmp_path / "gone.png"}),  # found, and then deleted
        Record(2, "1" * 16, {"question": "b"}),
        Record(3, "2" * 16, {"question": "c", "image": tmp_path / "pipe.png"}),
    ]
    reasons: list[str] = []
    run = Run(
        iter(given),
        output,
        caller_of(engine),
        Template("query"),
        num_in_flight=1,
        max_retry_s=60.0,
        on_first_failure=reasons.append,
    )
    assert await run.run()
    gone, answered, pipe = written(output)
    why = "cannot be read: No such file or directory"
    assert gone["error"]["violations"] == [{"field": "image", "description": why}]
    assert answered["answer"] == "b"
    assert pipe["error"]["violations"] == [{"field": "image", "description": "is no regular file"}]
    assert reasons == [f"record 1 failed: INVALID_REQUEST: image: {why}"]


@pytest.mark.usefixtures("without_waiting")
async def test_a_line_that_finds_the_queue_full_is_asked_again(output):
    refusals = iter([Overloaded(4, retry_after_s=0.0)] * 3)
    engine = engine_of(lambda question: [next(refusals, told(question))])
    assert await run_of(records("a", "b"), output, caller_of(engine)).run()
    assert [line["answer"] for line in written(output)] == ["a", "b"]
    assert len(engine.requests) == 5


async def test_a_line_that_limits_its_own_wait_is_not_asked_again(output):
    engine = engine_of(lambda question: [QueueTimeout(1.0)])
    assert await run_of(records("a"), output, caller_of(engine)).run()
    assert written(output)[0]["error"]["code"] == "QUEUE_TIMEOUT"


class _Failing:
    """Raises, or answers, for each question."""

    def __init__(self, outcomes: Mapping[str, Any]) -> None:
        self.outcomes = outcomes

    async def post(self, path: str, body: bytes, request_id: str) -> Reply:
        outcome = self.outcomes.get(json.loads(body)["question"], Reply(200, {"answer": "yes"}))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.usefixtures("without_waiting")
async def test_a_server_that_stays_away_ends_the_run_and_fails_no_line(output):
    caller = _Failing({"b": Unreachable("connection refused")})
    with pytest.raises(RunEnded, match="no line was answered for 0 s: connection refused"):
        await run_of(records("a", "b", "c"), output, caller, num_in_flight=1, max_retry_s=0.0).run()
    assert [line["id"] for line in written(output)] == [1]
    assert output.num_failures == 0


async def test_an_engine_that_dies_ends_the_run_and_fails_no_line(output):
    def script(question: str) -> Iterable[object]:
        if question == "b":
            engine.die()
        return [EngineUnavailable("died") if question == "b" else told(question)]

    engine = engine_of(script)
    with pytest.raises(RunEnded, match="the engine has failed"):
        await run_of(records("a", "b", "c"), output, caller_of(engine), num_in_flight=1).run()
    assert [line["id"] for line in written(output)] == [1]


async def test_a_stop_writes_what_is_in_flight_and_takes_nothing_more(output):
    engine = engine_of(lambda question: [HOLD, told(question)])
    run = run_of(records(*"abcdefgh"), output, caller_of(engine), num_in_flight=3)
    running = asyncio.create_task(run.run())
    for _ in range(3):
        await engine.num_submitted.acquire()
    run.stop()
    engine.release()
    assert not await running
    assert [line["answer"] for line in written(output)] == ["a", "b", "c"]


async def test_a_stop_does_not_wait_for_a_server_that_is_away(output):
    caller = _Failing({"a": Reply(503, {"error": {"code": "DRAINING"}}, retry_after_s=3600.0)})
    has_taken_all = asyncio.Event()

    def given() -> Iterator[Record]:
        yield from records("a", "b", "c")
        has_taken_all.set()

    run = run_of(given(), output, caller, num_in_flight=2)
    running = asyncio.create_task(run.run())
    await has_taken_all.wait()
    run.stop()
    assert not await running
    assert written(output) == []  # those that are answered come behind one that is not


async def test_a_disk_that_is_full_ends_the_run(output, monkeypatch):
    append = output.append

    def append_or_fail(digest: str, line: OutputLine) -> None:
        if output.num_lines == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(digest, line)

    monkeypatch.setattr(output, "append", append_or_fail)
    with pytest.raises(OSError, match="No space left"):
        await run_of(records(*"abcdefgh"), output, _Failing({}), num_in_flight=3).run()
    assert [line["id"] for line in written(output)] == [1, 2]


async def test_an_input_that_cannot_be_read_further_ends_the_run(output):
    def broken() -> Iterator[Record]:
        yield from records("a")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(InputUnusable, match="the input cannot be read: Input/output error"):
        await run_of(broken(), output, _Failing({})).run()
    assert len(written(output)) == 1


async def test_progress_tells_rate_failures_and_the_time_left(output, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"question": "a"}\n{"question": "b"}\n{"question": "c"}\n')
    source = open_source(path)
    run = run_of(iter(source), output, _Failing({"b": Reply(400, {"error": {"code": "INVALID_REQUEST"}})}))
    progress = Progress(run, source, output)
    given = iter(source)
    next(given)
    run.num_written = 1
    assert " left" in progress.line()
    assert await run.run()
    line = progress.line()
    assert line.startswith("3 lines, 1 failed, ")
    assert line.endswith("/s")


async def test_memory_does_not_grow_with_the_number_of_lines(tmp_path):
    num_lines, text = 10_000, "a" * 2_000
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(num_lines):
            file.write(json.dumps({"id": number, "question": text}) + "\n")
    sizes: list[int] = []

    def script(question: str) -> Iterable[object]:
        sizes.append(0)
        if len(sizes) % 2_500 == 0:
            sizes[-1] = resident_bytes()
        return [told(question)]

    engine = engine_of(script)
    for name in ("requests", "deadlines_s", "tenants", "namespaces"):  # it keeps all of them for other tests
        setattr(engine, name, deque(maxlen=1))
    output = Output(tmp_path / "out.jsonl", {}, resumes=False, replaces=False)
    assert await run_of(iter(open_source(path)), output, caller_of(engine), num_in_flight=32).run()
    output.close()
    assert output.num_lines == num_lines
    # All questions take 20 MB, and so do all answers.
    assert max(sizes) - sizes[2_499] < 8 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
