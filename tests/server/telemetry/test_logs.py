"""What is logged, in both formats, and what happens where nothing can be written."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kestrel_client import Client
from kestrel_grpc.telemetry.logs import MAX_FAILURE_LINES, CallLog, set_up_logging
from kestrel_grpc.wire.call_context import OK, CallContext, Outcome
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Timing, Usage
from tests.reference_fixtures import MD3_SMALL

QUERY = "kestrel.v1.VisionService/Query"
SERVE = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--model", str(MD3_SMALL))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch) -> Iterator[None]:
    """Logging belongs to the process; a test borrows it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    for name in ("logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, getattr(logging, name))
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logging_to(stream: io.StringIO, level: str = "info", line_format: str = "text") -> None:
    logging.getLogger().handlers.clear()  # the test runner's, with which nothing would be set up
    set_up_logging(level, stream, line_format=line_format)


def new_call() -> CallContext:
    return CallContext((("x-request-id", "abc"),), None, QUERY)


async def test_a_call_is_one_line_of_text():
    stream = io.StringIO()
    logging_to(stream)
    CallLog().record(new_call(), Outcome("RESOURCE_EXHAUSTED", "QUEUE_FULL"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO kestrel_grpc\.calls request_id=abc "
        r"method=kestrel\.v1\.VisionService/Query outcome=QUEUE_FULL duration_ms=\d+\.\d\n",
        stream.getvalue(),
    )


def test_a_call_is_one_object_of_json_with_its_facts_as_fields():
    stream = io.StringIO()
    logging_to(stream, line_format="json")
    call = new_call()
    call.finished = Finished(
        QueryOutput("a secret\nin two lines", None), FinishReason.STOP, Usage(735, 729, 3), Timing(0, 0, 0, 0, 0)
    )
    call.trace_id = "0af7"
    call.principal = "alice"
    CallLog().record(call, OK)
    assert stream.getvalue().count("\n") == 1
    found = json.loads(stream.getvalue())
    facts = {
        "request_id": "abc",
        "method": QUERY,
        "code": "OK",
        "outcome": "OK",
        "trace_id": "0af7",
        "tenant": "alice",
    }
    assert facts.items() <= found.items()
    assert (found["input_tokens"], found["output_tokens"]) == (735, 3)
    assert (found["level"], found["logger"]) == ("info", "kestrel_grpc.calls")
    assert "secret" not in stream.getvalue()


def test_an_exception_is_a_field_of_its_line():
    stream = io.StringIO()
    logging_to(stream, line_format="json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kestrel_grpc.calls").exception("request_id=%(request_id)s failed", {"request_id": "abc"})
    found = json.loads(stream.getvalue())
    assert (found["message"], found["request_id"]) == ("request_id=abc failed", "abc")
    assert found["exception"].endswith("ValueError: broken")


async def test_of_calls_that_fail_alike_some_have_a_line_and_the_others_are_counted():
    stream = io.StringIO()
    logging_to(stream, line_format="json")
    log, alices = CallLog(), new_call()
    alices.principal = "alice"
    for _ in range(1000):
        log.record(new_call(), Outcome("UNAUTHENTICATED", "TOKEN_INVALID"))
    log.record(new_call(), Outcome("UNIMPLEMENTED", "METHOD_UNKNOWN"))
    log.record(alices, Outcome("UNAUTHENTICATED", "TOKEN_INVALID"))
    log.record(new_call(), OK)
    log.close()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len([line for line in found if line["outcome"] == "TOKEN_INVALID"]) == MAX_FAILURE_LINES + 2
    assert [line["outcome"] for line in found[MAX_FAILURE_LINES:]] == [
        "METHOD_UNKNOWN",
        "TOKEN_INVALID",
        "OK",
        "TOKEN_INVALID",
    ]
    assert (found[-1]["calls"], "tenant" in found[-1]) == (1000 - MAX_FAILURE_LINES, False)


def test_calls_are_not_logged_above_info():
    stream = io.StringIO()
    logging_to(stream, "warning")
    CallLog().record(new_call(), OK)
    assert stream.getvalue() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("errors", ["2>/dev/full", "2>&-"])
def test_a_full_disk_or_a_closed_stream_fails_no_request(errors):
    with subprocess.Popen(
        ("sh", "-c", f'exec "$0" "$@" {errors}', *SERVE), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r" on (\S+) ", server.stdout.readline())
            assert found is not None
            with Client(found[1]) as client:
                for _ in range(2):
                    assert client.complete_query(None, "hi", max_tokens=2).usage.output_token_count > 0
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


@contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("wb") as file:
        yield file.fileno()


@contextmanager
def reader_that_has_gone() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("output", [full_disk, reader_that_has_gone])
def test_standard_output_that_cannot_be_written_keeps_no_server_from_starting(output):
    command = [*SERVE, "--log-level", "info"]
    with output() as stdout, subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(match for line in server.stderr if (match := re.search(r"serves \S+ on (\S+) ", line)))
            with Client(found[1]) as client:
                assert client.complete_query(None, "hi", max_tokens=2).usage.output_token_count > 0
        finally:
            server.send_signal(signal.SIGINT)
        _, rest = server.communicate()
    assert server.returncode == 0
    assert "Exception" not in rest
