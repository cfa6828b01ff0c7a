"""Logging as text or JSON, set up once at start; the log line of each call; the line on standard output.

A line that cannot be written, because the disk is full or the stream closed, is lost: no call fails for its log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from kestrel_grpc.wire.call_context import CallContext, Outcome

_CALL = "request_id=%(request_id)s method=%(method)s outcome=%(outcome)s duration_ms=%(duration_ms).1f"
_TRACED_CALL = f"{_CALL} trace_id=%(trace_id)s"

_calls = logging.getLogger("kestrel_grpc.calls")
_log = logging.getLogger(__name__)


def log_call(call: CallContext, outcome: Outcome) -> None:
    """Write the line of a call that has ended."""
    if not _calls.isEnabledFor(logging.INFO):
        return
    facts: dict[str, Any] = {
        "request_id": call.request_id,
        "method": call.method,
        "code": outcome.code,
        "outcome": outcome.reason,
        "duration_ms": round(call.duration_s * 1000.0, 1),
    }
    if call.principal:
        facts["tenant"] = call.principal
    if call.finished is not None:
        facts["input_tokens"] = call.finished.usage.num_input_tokens
        facts["output_tokens"] = call.finished.usage.num_output_tokens
    if call.trace_id:
        facts["trace_id"] = call.trace_id
    _calls.info(_TRACED_CALL if call.trace_id else _CALL, facts)


def announce(line: str) -> None:
    """Print a line on standard output; log it where that cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("standard output cannot be written: %s", error.strerror)
        _log.info("%s", line)
        # Python writes the rest of the buffer when the process ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_up_logging(level: str, stream: TextIO | None = None, *, line_format: str = "text") -> None:
    """Write lines of `level` and above to `stream`, by default standard error, as `text` or `json`."""
    _claim_standard_error()
    # These are not part of a line, and collecting them costs as much as writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _LossyHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if line_format == "json" else _LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _claim_standard_error() -> None:
    """Open standard error if it is closed: the next file or socket would get its number, and log lines with it."""
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _LossyHandler(logging.StreamHandler[TextIO]):
    """Ignores errors of writing. The standard handler writes them to standard error, which may be broken."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (overrides)
        pass


class _LineFormatter(logging.Formatter):
    """Times as `2026-11-21T07:35:39.097Z`. The part before the point is formatted once a second."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._second = -1
        self._second_text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (overrides)
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(record.msecs):03d}Z"


class _JsonFormatter(_LineFormatter):
    """One object per line. Named arguments of a message are fields of the object."""

    def __init__(self) -> None:
        super().__init__()
        self._encode = json.JSONEncoder(ensure_ascii=False, default=str).encode

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.args, Mapping):
            facts |= record.args
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return self._encode(facts)
