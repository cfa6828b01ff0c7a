"""How far a run has come: one line that is rewritten on a terminal, and one line a step anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24


class Progress:
    """Counts steps of a run whose length is known."""

    def __init__(self, num_steps: int, stream: TextIO = sys.stderr) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._num_done = 0
        self._started = time.perf_counter()

    def begin(self, what: str) -> None:
        """A step begins."""
        self._show(what)

    def end(self, what: str) -> None:
        """It has ended."""
        self._num_done += 1
        self._show(what)

    def close(self) -> None:
        """No step follows."""
        if self._stream.isatty():
            self._stream.write("\n")

    def _show(self, what: str) -> None:
        filled = _WIDTH * self._num_done // max(self._num_steps, 1)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        elapsed_s = time.perf_counter() - self._started
        line = f"{bar} {self._num_done}/{self._num_steps} {elapsed_s:4.0f} s  {what}"
        self._stream.write(f"\r\x1b[K{line}" if self._stream.isatty() else f"{line}\n")
        self._stream.flush()
