"""Logging, set up once at start, as text or as JSON; the one line that each call writes, and the one on stdout.

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
    """Print a line for whoever started the server; where standard output cannot be written, log it."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("standard output cannot be written: %s", error.strerror)
        _log.info("%s", line)
        # What is left in the buffer is written once more at the end of the process, and would fail it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_up_logging(level: str, stream: TextIO | None = None, *, line_format: str = "text") -> None:
    """Write lines of `level` and above to `stream`, by default standard error, as `text` or `json`."""
    _claim_standard_error()
    # Nobody reads these, and collecting them for each line costs as much as writing it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _LossyHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if line_format == "json" else _LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _claim_standard_error() -> None:
    """Where it is closed, the next file or socket to be opened would bear its number, and be written to."""
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _LossyHandler(logging.StreamHandler[TextIO]):
    """Loses what cannot be written. The library's own complains to standard error, which may be what is broken."""

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
    """One object a line. What a message was given by name stands as fields of its own."""

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
