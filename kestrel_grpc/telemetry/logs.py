"""Writes the log as text or JSON: messages, the lines of calls, and the line on standard output.

A thread of its own formats and writes lines, so that a slow or blocked reader of the log delays no call:

    any thread                                        the writer's thread
    logger.info(...) ── LogWriter.emit ── queue ──→   format, and write many lines at a time

Lines keep their order. The queue is bounded: a line that finds it full is dropped and counted. `logging.shutdown`
waits until the queue is written; Python calls it at a normal exit, and `end_now` before any other. A line that
cannot be written, because the disk is full or the stream is closed, is lost: no call fails for its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from kestrel_grpc.calls.call_context import AUDITED_METHODS, CallContext, Outcome
from kestrel_grpc.calls.caller_address import CallerAddresses
from kestrel_grpc.process.terminal import print_error, printable, printable_json

MAX_WAITING_LINES = 16_384
"""The most lines that wait to be written. A waiting line takes about a kilobyte."""
MAX_FAILURE_LINES = 10
"""The most lines of failed calls per second for one tenant and one reason."""
MAX_REPEATED_LINES = 10
"""The most warnings and errors per second of one place in the code."""
FLUSH_TIMEOUT_S = 2.0
"""The longest time that `flush` and `close` each wait for a reader of the log, in seconds."""
_GATHER_S = 0.01
"""The time that a line waits for others, with which it is written, in seconds."""
_MAX_LINES_AT_ONCE = 1024
_MAX_UNMIXED_BYTES = 4096
_COUNT_EVERY_S = 1.0
_CALL = "request_id=%(request_id)s method=%(method)s outcome=%(outcome)s duration_ms=%(duration_ms).1f"
_COUNTED_CALLS = "outcome=%(outcome)s: %(calls)d more calls ended so within a second, without a line each"
_LEFT_OUT = "%(lines)d more lines like %(like)r within a second were left out"
_DROPPED = "%(lines)d lines of the log were dropped, because they were not read in time"

_calls = logging.getLogger("kestrel_grpc.calls")
_audit = logging.getLogger("kestrel_grpc.audit")
_log = logging.getLogger(__name__)


class CallLog:
    """Writes a line for each call that has ended.

    Of the failures of one tenant for the same reason, `MAX_FAILURE_LINES` are written each second, then one line
    with the count of the others. Callers without a name count as one tenant. Belongs to one event loop.
    """

    def __init__(self, addresses: CallerAddresses | None = None) -> None:
        """`addresses` finds the addresses of callers; without it lines have none."""
        self._addresses = addresses
        self._failures: Counter[tuple[str, str, str]] = Counter()
        """The failures since the timer started, by tenant, code and reason."""
        self._timer: asyncio.TimerHandle | None = None

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Writes the line of a call that has ended."""
        if not _calls.isEnabledFor(logging.INFO):
            return
        is_audited = call.method in AUDITED_METHODS
        if self._is_repeated(call, outcome) and not is_audited:
            return
        facts: dict[str, Any] = {
            "request_id": call.request_id,
            "method": call.method,
            "code": outcome.code,
            "outcome": outcome.reason,
            "duration_ms": round(call.duration_s * 1000.0, 1),
        }
        line = _CALL
        if self._addresses is not None:
            facts["peer"] = self._addresses.of(call)
            line += " peer=%(peer)s"
        if call.principal:
            facts["tenant"] = call.principal
            line += " tenant=%(tenant)s"
        if is_audited:
            changed = call.audited or {}
            _log_facts(line + "".join(f" {name}=%({name})s" for name in changed), {**facts, **changed}, _audit)
        if call.request is not None and call.request.adapter:
            facts["adapter"] = call.request.adapter
            line += " adapter=%(adapter)s"
        if call.finished is not None:
            facts["input_tokens"] = call.finished.usage.num_input_tokens
            facts["output_tokens"] = call.finished.usage.num_output_tokens
        if call.trace_id:
            facts["trace_id"] = call.trace_id
            line += " trace_id=%(trace_id)s"
        _log_facts(line, facts)

    def close(self) -> None:
        """Writes the outstanding counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._count()

    def _is_repeated(self, call: CallContext, outcome: Outcome) -> bool:
        if outcome.is_ok:
            return False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COUNT_EVERY_S, self._count)
        key = (call.principal, outcome.code, outcome.reason)
        self._failures[key] += 1
        return self._failures[key] > MAX_FAILURE_LINES

    def _count(self) -> None:
        self._timer = None
        for (tenant, code, reason), count in self._failures.items():
            if count > MAX_FAILURE_LINES:
                facts = {"code": code, "outcome": reason, "calls": count - MAX_FAILURE_LINES}
                if tenant:
                    facts["tenant"] = tenant
                _log_facts(_COUNTED_CALLS, facts)
        self._failures.clear()


def _log_facts(message: str, facts: Mapping[str, Any], logger: logging.Logger = _calls) -> None:
    """Logs a message with named values. Does not search for the calling line, as `Logger.info` does: no format
    shows it."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (facts,), None))


def announce(line: str) -> None:
    """Prints a line on standard output, as JSON if the log is JSON; logs it if standard output cannot be
    written."""
    formatter = _json_formatter()
    try:
        if formatter is None:
            print(printable(line), flush=True)
        else:
            print(
                formatter.format(_log.makeRecord(_log.name, logging.INFO, "", 0, "%s", (line,), None)), flush=True
            )
    except OSError as error:
        _log.warning("standard output cannot be written: %s", error.strerror)
        _log.info("%s", line)
        # Python writes the rest of the buffer when the process ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_up_logging(
    level: str, stream: TextIO | None = None, *, line_format: str = "text", process: str | None = None
) -> None:
    """Has lines of `level` and above written to `stream`, by default standard error, as `text` or `json`.

    `process` is the name of this process in every line, for several processes that write to one stream.
    """
    # No line contains these values, and collecting them costs as much as writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LogWriter(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter(process) if line_format == "json" else _LineFormatter(process))
    # A command may have set up logging before it knew that there are several processes.
    logging.basicConfig(level=level.upper(), handlers=[handler], force=process is not None)
    if line_format == "json":
        _log_uncaught()


def log_end(why: str, *, began: float) -> None:
    """Logs that the server has ended and why, as the last line. `began` is on the monotonic clock."""
    facts = {"ended": why, "uptime_s": round(time.monotonic() - began, 1)}
    _log.info("the server has ended after %(uptime_s)s s: %(ended)s", facts)


def report(line: str) -> None:
    """Writes the reason for the end of a command to standard error: as `print_error` does, or as a line of the log
    if that is JSON."""
    if _json_formatter() is None:
        print_error(line)
    else:
        _log.error("%s", line)


def _json_formatter() -> _JsonFormatter | None:
    """Returns the formatter of the log of this process if that is JSON, else None."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter) and isinstance(handler.formatter, _JsonFormatter):
            return handler.formatter
    return None


def _log_uncaught() -> None:
    """Has the log write warnings and uncaught exceptions, which Python would print to standard error."""
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _log.error("interrupted")
        else:
            _log.critical("uncaught exception", exc_info=(kind, error, traceback))

    def uncaught_in_thread(given: threading.ExceptHookArgs) -> None:
        if given.exc_value is not None and not issubclass(given.exc_type, SystemExit):
            name = "" if given.thread is None else given.thread.name
            facts = (given.exc_type, given.exc_value, given.exc_traceback)
            _log.error("uncaught exception in the thread %s", name, exc_info=facts)

    def unraisable(given: sys.UnraisableHookArgs) -> None:
        error = given.exc_value
        facts = None if error is None else (type(error), error, given.exc_traceback)
        _log.error("%s", given.err_msg or "exception ignored", exc_info=facts)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, uncaught_in_thread, unraisable


def dropped_lines() -> int:
    """Returns the number of lines of the log that were dropped since the start of the process."""
    return sum(item.num_dropped for item in logging.getLogger().handlers if isinstance(item, LogWriter))


class LogWriter(logging.Handler):
    """Queues lines for a thread that writes them to `stream`. Closed by `logging.shutdown`.

    The library's `QueueListener` would write each line by itself, and wait for a blocked stream without a limit.
    """

    def __init__(self, stream: TextIO, *, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self.num_dropped = 0
        """The number of lines that found the queue full."""
        self._stream = stream
        self._max_waiting = max_waiting
        self._queue: SimpleQueue[logging.LogRecord | threading.Event | None] = SimpleQueue()
        """The lines to write. An event is set once the lines before it have been written; None ends the thread."""
        self._num_reported = 0
        self._repeats = _Repeats()
        self._thread = threading.Thread(target=self._run, name="kestrel-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line. Called with the handler's lock held."""
        if record.levelno >= logging.WARNING and self._repeats.is_left_out(record):
            return
        try:
            self._detach(record)
        except Exception:  # arguments that do not fit the message
            return
        if not self._thread.is_alive():  # after `close`, or in a forked process
            self._write([record])
        elif self._queue.qsize() >= self._max_waiting:
            self.num_dropped += 1
        else:
            self._queue.put(record)

    def flush(self) -> None:
        """Waits until the lines that are queued now have been written, for at most `FLUSH_TIMEOUT_S`."""
        if self._thread.is_alive():
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Writes the queue and ends the thread, unless the stream blocks for `FLUSH_TIMEOUT_S`."""
        self._queue.put(None)
        self._thread.join(FLUSH_TIMEOUT_S)
        super().close()

    def _detach(self, record: logging.LogRecord) -> None:
        """Keeps texts instead of objects, which may be large or change before the line is written."""
        if record.exc_info:
            record.exc_text = (self.formatter or logging.Formatter()).formatException(record.exc_info)
            record.exc_info = None
        if record.args and not isinstance(record.args, Mapping):
            record.msg, record.args = record.getMessage(), None

    def _run(self) -> None:
        item = self._next()
        while item is not None:
            if isinstance(item, logging.LogRecord):
                time.sleep(_GATHER_S)
            lines: list[logging.LogRecord] = []
            while isinstance(item, logging.LogRecord):
                lines.append(item)
                if len(lines) == _MAX_LINES_AT_ONCE or self._queue.empty():
                    break
                item = self._queue.get()
            self._write(lines)
            if self._queue.empty():
                self._report_dropped()
            if isinstance(item, threading.Event):
                item.set()
            if item is not None:
                item = self._next()
        self._report_dropped()
        self._write(self._repeats.counts(is_last=True))

    def _next(self) -> logging.LogRecord | threading.Event | None:
        """Returns the next item of the queue. Writes the counts of omitted lines when their second is over."""
        while self._repeats.has_counts:
            self._write(self._repeats.counts())
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=_COUNT_EVERY_S)
        return self._queue.get()

    def _report_dropped(self) -> None:
        facts = {"lines": self.num_dropped - self._num_reported}
        if facts["lines"]:
            self._num_reported += facts["lines"]
            self._write([_log.makeRecord(_log.name, logging.WARNING, "", 0, _DROPPED, (facts,), None)])

    def _write(self, records: list[logging.LogRecord]) -> None:
        with contextlib.suppress(Exception):  # reporting it would need the stream
            for text in _pieces(f"{self.format(record)}\n" for record in records):
                self._stream.write(text)
                self._stream.flush()


class _Repeats:
    """Counts the warnings and errors of each place in the code, of which some lines are written in each second.

    A fault that every request meets would write a traceback for each. Used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._seen: Counter[_Kind] = Counter()
        """The lines of this second, by kind."""

    @property
    def has_counts(self) -> bool:
        """True if `counts` may return lines now or later."""
        return bool(self._seen)

    def is_left_out(self, record: logging.LogRecord) -> bool:
        """Counts a line. Returns True if the lines of its kind in this second have reached the limit."""
        error = record.exc_info[0] if record.exc_info else None
        kind = _Kind(record.name, record.levelno, str(record.msg), record.pathname, record.lineno, error)
        with self._lock:
            if not self._seen:
                self._began_s = time.monotonic()
            self._seen[kind] += 1
            return self._seen[kind] > MAX_REPEATED_LINES

    def counts(self, *, is_last: bool = False) -> list[logging.LogRecord]:
        """Returns a line for each kind of omitted lines, once the second is over."""
        with self._lock:
            if not is_last and time.monotonic() - self._began_s < _COUNT_EVERY_S:
                return []
            seen, self._seen = self._seen, Counter()
        return [
            logging.LogRecord(
                kind.logger,
                kind.level,
                kind.path,
                kind.line,
                _LEFT_OUT,
                ({"lines": count - MAX_REPEATED_LINES, "like": kind.message},),
                None,
            )
            for kind, count in seen.items()
            if count > MAX_REPEATED_LINES
        ]


class _Kind(NamedTuple):
    """Returns the kind of a line: the part that it shares with lines that differ in their arguments alone."""

    logger: str
    level: int
    message: str
    path: str
    line: int
    error: type[BaseException] | None


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines joined to pieces, each so short that a pipe does not mix it with the output of other
    processes."""
    piece, num_bytes = "", 0
    for line in lines:
        line_bytes = len(line.encode(errors="replace"))
        if piece and num_bytes + line_bytes > _MAX_UNMIXED_BYTES:
            yield piece
            piece, num_bytes = "", 0
        piece, num_bytes = piece + line, num_bytes + line_bytes
    if piece:
        yield piece


class _LineFormatter(logging.Formatter):
    """Formats lines as text, with times such as `2026-11-21T07:35:39.097Z`. The part before the point is formatted
    once a second."""

    def __init__(self, process: str | None = None) -> None:
        prefix = "" if process is None else f"{process} "
        super().__init__(f"%(asctime)s %(levelname)s {prefix}%(name)s %(message)s")
        self._second = -1
        self._second_text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (overrides)
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line. Further lines of a message are indented, so that no text of callers looks like a line
        of its own."""
        return printable(super().format(record)).replace("\n", "\n  ")


class _JsonFormatter(_LineFormatter):
    """Formats each line as a JSON object. Named arguments of a message are fields of the object."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process
        self._encode = json.JSONEncoder(ensure_ascii=False, default=str).encode

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process is not None:
            facts["process"] = self._process
        if isinstance(record.args, Mapping):
            facts |= record.args
        if record.exc_text:
            facts["exception"] = record.exc_text
        return printable_json(self._encode(facts))
