"""Shows the progress of a measurement of `kestrel-grpc bench`, as a line on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from kestrel_grpc.cli.bench.processes import Tally

_SHOWN_EVERY_S = 0.5


class Progress:
    """Shows the progress of a measurement: one line, which is rewritten, on a terminal; nothing elsewhere."""

    def __init__(
        self, num_steps: int, duration_s: float, num_requests: int | None, stream: TextIO = sys.stderr
    ) -> None:
        """Creates the line. Each step has a number of requests, or else a duration."""
        self._num_steps = num_steps
        self._duration_s = duration_s
        self._num_requests = num_requests
        self._stream = stream
        self._is_shown = stream.isatty()
        self._number = 0
        self._step = ""
        self._shown_at = self._began = 0.0
        self._is_warm_up = True

    def begin(self, step: str) -> None:
        """Begins a step, with its warm-up."""
        self._step = step
        self._number += 1
        self._began = time.monotonic()
        self._is_warm_up = True

    def show(self, tally: Tally) -> None:
        """Shows the progress of the step."""
        now = time.monotonic()
        if self._is_warm_up and not tally.is_warm_up:
            self._began = now
        self._is_warm_up = tally.is_warm_up
        if self._is_shown and now - self._shown_at >= _SHOWN_EVERY_S:
            self._shown_at = now
            self._stream.write(f"\r\x1b[K{self.line(tally, now - self._began)}")
            self._stream.flush()

    def line(self, tally: Tally, elapsed_s: float) -> str:
        """Returns a line such as "step 2 of 4, 8 at once, 12 s of 30: 345 answered, 2 failed, 28.8/s, 922
        tokens/s".

        Before the window: "step 2 of 4, 8 at once, warm-up, 1 s: 9 answered".
        """
        position = f"step {self._number} of {self._num_steps}, " if self._num_steps > 1 else ""
        if tally.is_warm_up:
            return f"{position}{self._step}, warm-up, {elapsed_s:.0f} s: {tally.num_answered:,} answered"
        goal = f"{elapsed_s:.0f} s of {self._duration_s:g}"
        if self._num_requests is not None:
            goal = f"{elapsed_s:.0f} s, of {self._num_requests:,}"
        failed = f"{tally.num_failed:,} failed, " if tally.num_failed else ""
        rates = [count / max(elapsed_s, 1e-3) for count in (tally.num_answered, tally.num_tokens)]
        return (
            f"{position}{self._step}, {goal}: {tally.num_answered:,} answered, {failed}{rates[0]:.1f}/s, "
            f"{rates[1]:.0f} tokens/s"
        )

    def close(self) -> None:
        """Ends the line after the last step."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
