"""Logging, set up once at start. Each call writes one line, through the logger `kestrel_grpc.calls`."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO


def set_up_logging(level: str, stream: TextIO = sys.stderr) -> None:
    """Write lines of `level` and above."""
    # Nobody reads these, and collecting them for each line costs as much as writing it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _LineFormatter(logging.Formatter):
    """Times as `2026-11-21T07:35:39.097Z`. The part before the point is formatted once a second."""

    def __init__(self, line_format: str) -> None:
        super().__init__(line_format)
        self._second = -1
        self._second_text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (overrides)
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(record.msecs):03d}Z"
