"""What is logged, in both formats, and what happens where nothing can be written."""

import fcntl
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kestrel_client import Client
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.calls.call_context import OK, CallContext, Outcome, RequestSummary
from kestrel_grpc.calls.caller_address import CallerAddresses
from kestrel_grpc.telemetry import logs
from kestrel_grpc.telemetry.logs import (
    MAX_FAILURE_LINES,
    MAX_REPEATED_LINES,
    CallLog,
    LogWriter,
    announce,
    dropped_lines,
    report,
    set_up_logging,
)
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Timing, Usage
from kestrel_runtime.api.requests import Query, RequestOptions
from tests.reference_fixtures import MD3_SMALL
from tests.server.serving import serving

QUERY = "kestrel.v1.VisionService/Query"
MAX_WAIT_S = 60.0
SERVE = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--model", str(MD3_SMALL))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch) -> Iterator[None]:
    """Logging belongs to the process; a test borrows it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    for name in ("logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, getattr(logging, name))
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    yield
    logging.captureWarnings(False)
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


class Log:
    """A log that a test reads."""

    def __init__(self, level: str = "info", line_format: str = "text") -> None:
        self._stream = io.StringIO()
        logging.getLogger().handlers.clear()  # the test runner's, with which nothing would be set up
        set_up_logging(level, self._stream, line_format=line_format)

    def text(self) -> str:
        """What has been written."""
        for handler in logging.getLogger().handlers:
            handler.flush()
        return self._stream.getvalue()


def new_call() -> CallContext:
    return CallContext((("x-request-id", "abc"),), None, QUERY)


async def test_a_call_is_one_line_of_text():
    log = Log()
    CallLog().record(new_call(), Outcome("RESOURCE_EXHAUSTED", "QUEUE_FULL"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO kestrel_grpc\.calls request_id=abc "
        r"method=kestrel\.v1\.VisionService/Query outcome=QUEUE_FULL duration_ms=\d+\.\d\n",
        log.text(),
    )


async def test_the_line_of_a_call_names_its_adapter():
    call = new_call()
    call.request = RequestSummary(Query("?", options=RequestOptions(adapter="birds/best@7")))
    lines = []
    for line_format in ("text", "json"):
        log = Log(line_format=line_format)
        CallLog().record(call, OK)
        lines.append(log.text())
    assert "adapter=birds/best@7" in lines[0].split()
    assert json.loads(lines[1])["adapter"] == "birds/best@7"


def test_a_call_is_one_object_of_json_with_its_facts_as_fields():
    log = Log(line_format="json")
    call = new_call()
    call.finished = Finished(
        QueryOutput("a secret\nin two lines", None), FinishReason.STOP, Usage(735, 729, 3), Timing(0, 0, 0, 0, 0)
    )
    call.trace_id = "0af7"
    call.principal = "alice"
    CallLog().record(call, OK)
    assert log.text().count("\n") == 1
    found = json.loads(log.text())
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
    assert "secret" not in log.text()


def test_an_exception_is_a_field_of_its_line():
    log = Log(line_format="json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kestrel_grpc.calls").exception("request_id=%(request_id)s failed", {"request_id": "abc"})
    found = json.loads(log.text())
    assert (found["message"], found["request_id"]) == ("request_id=abc failed", "abc")
    assert found["exception"].endswith("ValueError: broken")


def call_from(peer: str, *headers: tuple[str, str]) -> CallContext:
    call = CallContext((("x-request-id", "abc"), *headers), None, QUERY)
    call.peer = lambda: peer
    call.principal = "alice"
    return call


def test_the_line_of_a_call_has_the_address_and_the_name_of_its_caller():
    call = call_from("ipv4:10.0.0.5:1", ("x-forwarded-for", "203.0.113.9"))
    for trusted, expected in (((), "10.0.0.5"), (("10.0.0.0/8",), "203.0.113.9")):
        log = Log()
        CallLog(CallerAddresses(trusted)).record(call, OK)
        assert f" peer={expected} tenant=alice" in log.text()
        log = Log(line_format="json")
        CallLog(CallerAddresses(trusted)).record(call, OK)
        assert json.loads(log.text())["peer"] == expected
    log = Log(line_format="json")
    CallLog().record(call, OK)
    assert "10.0.0.5" not in log.text()
    assert "peer" not in log.text()


async def test_a_call_of_an_operator_leaves_a_line_of_its_own_whatever_others_there_are():
    log = Log(line_format="json")
    calls = CallLog(CallerAddresses(()))
    for number in range(MAX_FAILURE_LINES + 5):
        call = call_from("unix:")
        call.method = "kestrel.v1.EngineService/LoadAdapter"
        call.audited = {"adapter": f"a{number}"}
        calls.record(call, Outcome("NOT_FOUND", "ADAPTER_NOT_FOUND"))
    calls.close()
    lines = [json.loads(line) for line in log.text().splitlines()]
    audited = [line for line in lines if line["logger"] == "kestrel_grpc.audit"]
    assert [line["adapter"] for line in audited] == [f"a{number}" for number in range(MAX_FAILURE_LINES + 5)]
    assert {(line["peer"], line["tenant"], line["outcome"]) for line in audited} == {
        ("unix", "alice", "ADAPTER_NOT_FOUND")
    }


def test_warnings_and_uncaught_exceptions_are_json_where_the_log_is():
    log = Log(line_format="json")

    def fail() -> None:
        raise ValueError("broken\nin two lines")

    warnings.showwarning("an old name", DeprecationWarning, "module.py", 7)
    thread = threading.Thread(target=fail, name="worker")
    thread.start()
    thread.join()
    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    report("a mistake\x1b[31m\x9b")
    lines = [json.loads(line) for line in log.text().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "error", "critical", "error"]
    assert "an old name" in lines[0]["message"]
    assert "worker" in lines[1]["message"]
    assert lines[1]["exception"].endswith("ValueError: broken\nin two lines")
    assert lines[3]["message"] == "a mistake\x1b[31m\x9b"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", log.text())


def test_the_announcement_is_json_where_the_log_is(capsys):
    Log(line_format="json")
    announce("kestrel-grpc serves m on 127.0.0.1:1 (cpu)")
    assert json.loads(capsys.readouterr().out)["message"] == "kestrel-grpc serves m on 127.0.0.1:1 (cpu)"
    Log()
    announce("served\x1b[31m")
    assert capsys.readouterr().out == "served\\x1b[31m\n"


def test_names_of_others_neither_steer_a_terminal_nor_begin_a_line():
    log = Log()
    name = "x\x1b]0;title\x07\r\n2026-11-21 INFO forged \x9b1m\u202e"
    logging.getLogger("kestrel_grpc").warning("no adapter %s", name)
    assert log.text().endswith("no adapter x\\x1b]0;title\\x07\\r\n  2026-11-21 INFO forged \\x9b1m\\u202e\n")


def test_errors_that_repeat_are_counted():
    log = Log()
    logger = logging.getLogger("kestrel_grpc")
    for number in range(MAX_REPEATED_LINES + 7):
        try:
            raise ValueError(number)
        except ValueError:
            logger.exception("request %d failed", number)
    for _ in range(3):
        logger.error("another")
    for _ in range(30):
        logger.info("told")
    for handler in logging.getLogger().handlers:
        handler.close()
    text = log.text()
    assert text.count("Traceback") == text.count("failed\n") == MAX_REPEATED_LINES
    assert text.count("another") == 3
    assert text.count("told") == 30
    assert text.endswith("ERROR kestrel_grpc 7 more lines like 'request %d failed' within a second were left out\n")


def test_the_count_of_repeated_errors_is_written_without_a_further_line(monkeypatch):
    monkeypatch.setattr(logs, "_COUNT_EVERY_S", 0.0)
    written = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "were left out" in text:
                written.set()
            return super().write(text)

    logging.getLogger().handlers.clear()
    set_up_logging("info", Stream())
    for _ in range(MAX_REPEATED_LINES + 1):
        logging.getLogger("kestrel_grpc").error("broken")
    assert written.wait(MAX_WAIT_S)


async def test_of_calls_that_fail_alike_some_have_a_line_and_the_others_are_counted():
    log = Log(line_format="json")
    calls, alices = CallLog(), new_call()
    alices.principal = "alice"
    for _ in range(1000):
        calls.record(new_call(), Outcome("UNAUTHENTICATED", "TOKEN_INVALID"))
    calls.record(new_call(), Outcome("UNIMPLEMENTED", "METHOD_UNKNOWN"))
    calls.record(alices, Outcome("UNAUTHENTICATED", "TOKEN_INVALID"))
    calls.record(new_call(), OK)
    calls.close()
    found = [json.loads(line) for line in log.text().splitlines()]
    assert len([line for line in found if line["outcome"] == "TOKEN_INVALID"]) == MAX_FAILURE_LINES + 2
    assert [line["outcome"] for line in found[MAX_FAILURE_LINES:]] == [
        "METHOD_UNKNOWN",
        "TOKEN_INVALID",
        "OK",
        "TOKEN_INVALID",
    ]
    assert (found[-1]["calls"], "tenant" in found[-1]) == (1000 - MAX_FAILURE_LINES, False)


class BlockedStream(io.StringIO):
    """A stream whose reader takes nothing until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.is_waiting = threading.Event()

    def write(self, text: str) -> int:
        self.is_waiting.set()
        assert self.go.wait(MAX_WAIT_S)
        return super().write(text)


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_each_line_says_which_of_several_processes_wrote_it(line_format: str):
    stream = io.StringIO()
    logging.getLogger().handlers.clear()
    set_up_logging("info", stream, line_format=line_format, process="frontend-1")
    logging.getLogger("kestrel_grpc.server").info("serving")
    logging.getLogger().handlers[0].flush()
    line = stream.getvalue()
    if line_format == "json":
        assert json.loads(line)["process"] == "frontend-1"
    else:
        assert line.endswith(" INFO frontend-1 kestrel_grpc.server serving\n")


def test_lines_are_written_in_pieces_that_a_pipe_does_not_mix_with_those_of_others():
    pieces: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    writer = LogWriter(Stream())
    lines = [f"{number} {'é' * (number % 700)}" for number in range(1000)]
    for line in lines:
        writer.emit(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
    writer.close()
    assert "".join(pieces).splitlines() == lines
    assert all(piece.endswith("\n") and len(piece.encode()) <= 4096 for piece in pieces)
    assert len(pieces) < len(lines) / 2


def test_a_blocked_reader_delays_no_line_and_the_lines_that_it_loses_are_counted(monkeypatch):
    stream = BlockedStream()
    writer = LogWriter(stream, max_waiting=3)
    logger = logging.Logger("test")
    logger.addHandler(writer)
    logger.info("first")
    assert stream.is_waiting.wait(MAX_WAIT_S)
    for number in range(5):
        logger.info("line %d", number)
    monkeypatch.setattr(logs, "FLUSH_TIMEOUT_S", 0.01)
    writer.flush()  # does not wait for the reader for long
    assert writer.num_dropped == 2
    stream.go.set()
    monkeypatch.setattr(logs, "FLUSH_TIMEOUT_S", MAX_WAIT_S)
    writer.close()
    assert stream.getvalue().splitlines() == [
        *("first", "line 0", "line 1", "line 2"),
        "2 lines of the log were dropped, because they were not read in time",
    ]
    logger.info("after the end")
    assert stream.getvalue().endswith("after the end\n")


@pytest.fixture
def unread_log() -> Iterator[int]:
    """A log whose reader, a pipe's descriptor, takes nothing. The pipe holds the lines of fewer than 30 calls."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    logging.getLogger().handlers.clear()
    stream = open(writer, "w", encoding="utf-8")  # noqa: SIM115 (closing it fails, since its reader is closed first)
    set_up_logging("info", stream)
    yield reader
    os.close(reader)
    for handler in logging.getLogger().handlers:
        handler.close()
    with suppress(BrokenPipeError):
        stream.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="needs pipes of a set size")
async def test_calls_are_served_while_nothing_reads_the_log(unread_log):
    async with serving() as rig:
        for _ in range(100):
            answer = await rig.vision.CompleteQuery(wire.CompleteQueryRequest(question="?"))
            assert answer.result.answer == "a kestrel"
    assert b"kestrel_grpc.calls" in os.read(unread_log, 4096)


def test_lines_of_several_threads_are_complete_and_those_of_one_keep_their_order():
    log = Log()

    def write(name: str) -> None:
        for number in range(500):
            logging.getLogger(name).info("%d", number)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [line.split(" ")[2:] for line in log.text().splitlines()]
    for name in ("a", "b", "c"):
        assert [int(number) for who, number in found if who == name] == list(range(500))
    assert dropped_lines() == 0


class Broken(Exception):
    """An exception that can be referred to weakly."""


def test_a_line_shows_its_arguments_as_they_were_and_keeps_none_of_their_objects():
    log = Log()
    values = [1]
    logging.getLogger("test").info("values %s", values)
    values.append(2)
    logging.getLogger("test").info("no number: %d", "x")  # a mistake of the program, which must not raise
    try:
        raise Broken("broken")
    except Broken as error:
        logging.getLogger("test").exception("failed")
        kept = weakref.ref(error)
    assert "values [1]\n" in log.text()
    assert "Broken: broken\n" in log.text()
    gc.collect()
    assert kept() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_lines_of_a_forked_process_are_written(tmp_path):
    """Kernels are compiled in forked processes, which have no thread that writes."""
    script = (
        "import logging, os, sys; from kestrel_grpc.telemetry.logs import set_up_logging; set_up_logging('info')\n"
        "child = os.fork()\n"
        "if not child: logging.warning('from below'); os._exit(0)\n"
        "os.waitpid(child, 0); logging.warning('from above')\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert [line.rpartition(" root ")[2] for line in printed.splitlines()] == ["from below", "from above"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise SystemExit(3)", 3), ("1/0", 1), ("from kestrel_grpc.process.exit import end_now; end_now(4)", 4)],
)
def test_what_was_logged_before_the_end_of_the_process_is_written(end, status):
    script = (
        "import logging; from kestrel_grpc.telemetry.logs import set_up_logging; set_up_logging('info')\n"
        f"logging.warning('the last line')\n{end}\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert "the last line\n" in ended.stderr


def test_calls_are_not_logged_above_info():
    log = Log("warning")
    CallLog().record(new_call(), OK)
    assert log.text() == ""


def test_a_server_without_standard_error_serves():
    with subprocess.Popen(("sh", "-c", 'exec "$0" "$@" 2>&-', *SERVE), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r" on (\S+) ", server.stdout.readline())
            assert found is not None
            with Client(found[1]) as client:
                assert client.complete_query(None, "hi", max_tokens=2).usage.output_token_count > 0
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("errors", ["2>/dev/full", "2>&-"])
def test_lines_that_cannot_be_written_are_lost_and_reach_no_other_file(errors, tmp_path):
    script = (
        "import logging, os, sys; from kestrel_grpc.process.terminal import open_standard_streams\n"
        "open_standard_streams()\n"
        "from kestrel_grpc.telemetry.logs import set_up_logging; set_up_logging('info')\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "logging.info('a line'); logging.getLogger().handlers[0].flush(); logging.info('another')\n"
        "sys.exit(file == 2)\n"
    )
    target = tmp_path / "other"
    command = ("sh", "-c", f'exec "$0" "$@" {errors}', sys.executable, "-c", script, str(target))
    assert subprocess.run(command, check=False).returncode == 0
    assert target.read_bytes() == b""


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
def test_what_standard_output_does_not_take_is_logged_and_ends_no_process(output):
    script = (
        "from kestrel_grpc.telemetry.logs import announce, set_up_logging\n"
        "set_up_logging('info'); announce('kestrel-grpc serves'); announce('HTTP is served')\n"
    )
    with output() as stdout:
        command = (sys.executable, "-c", script)
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stderr.endswith("kestrel-grpc serves\n")
    assert ended.stderr.count("standard output cannot be written") == 1
    assert "Exception" not in ended.stderr
