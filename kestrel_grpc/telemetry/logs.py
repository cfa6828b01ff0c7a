"""Logging as text or JSON, set up once at start; the log lines of calls; the line on standard output.

A line that cannot be written, because the disk is full or the stream closed, is lost: no call fails for its log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, TextIO

from kestrel_grpc.wire.call_context import CallContext, Outcome

_CALL = "request_id=%(request_id)s method=%(method)s outcome=%(outcome)s duration_ms=%(duration_ms).1f"
_TRACED_CALL = f"{_CALL} trace_id=%(trace_id)s"

_COUNTED_CALLS = "outcome=%(outcome)s: %(calls)d more calls ended so within a second, without a line each"
MAX_FAILURE_LINES = 10
"""Each second, for one tenant and one reason."""
_COUNT_EVERY_S = 1.0

_calls = logging.getLogger("kestrel_grpc.calls")
_log = logging.getLogger(__name__)


class CallLog:
    """Writes a line for each call that has ended.

    Of calls that fail for the same reason, of one tenant or of all callers without a name, a number of lines are
    written each second, and one line with the count of the others. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._failures: Counter[tuple[str, str, str]] = Counter()
        """By tenant, code and reason, since the timer started."""
        self._timer: asyncio.TimerHandle | None = None

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Write the line of a call that has ended."""
        if not _calls.isEnabledFor(logging.INFO) or self._is_repeated(call, outcome):
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

    def close(self) -> None:
        """Write the counts that are outstanding."""
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
                _calls.info(_COUNTED_CALLS, facts)
        self._failures.clear()


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
