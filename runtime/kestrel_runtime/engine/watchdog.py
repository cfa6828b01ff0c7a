"""Watches the engine thread from another thread and detects that it has ended or hangs.

A device that hangs blocks the engine thread in a call that never returns, so the engine thread cannot detect it.
Nor can it always report its own end. The watchdog takes no lock of the loop and reads only a few numbers, so it
does not slow the loop down.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

_LOOKS_PER_LIMIT = 20
_MAX_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class StallDetector:
    """A detector of activities whose counter has not changed for `limit_s` seconds.

    The time between two checks counts as `max_gap_s` seconds at most: if the whole process is suspended or starved
    of processor time, checks stop too, and no activity counts as stalled.
    """

    def __init__(self, limit_s: float, *, max_gap_s: float) -> None:
        self._limit_s = limit_s
        self._max_gap_s = max_gap_s
        self._last_look: float | None = None
        self._seen: dict[str, tuple[int, float]] = {}  # name → (its number, seconds without another one)

    def look(self, activities: Mapping[str, int], now: float) -> list[str]:
        """Compare the counters at `now`, in seconds of any clock. Returns the names of the stalled activities."""
        gap_s = 0.0 if self._last_look is None else min(now - self._last_look, self._max_gap_s)
        self._last_look = now
        before, self._seen = self._seen, {}
        for name, number in activities.items():
            old_number, stalled_s = before.get(name, (None, 0.0))
            self._seen[name] = (number, stalled_s + gap_s if number == old_number else 0.0)
        return [name for name, (_, stalled_s) in self._seen.items() if stalled_s >= self._limit_s]


class Watchdog:
    """A thread that calls `on_end` once, when the watched thread has ended, or after `on_stall` when it hangs.

    `join` waits for the end of the watched thread, at most the given seconds, and returns True if it has ended.
    `activities` returns progress counters by activity. `on_stall` gets the names of the activities that stalled.
    All run in the watchdog's thread.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        join: Callable[[float], bool],
        activities: Callable[[], Mapping[str, int]],
        on_stall: Callable[[list[str]], None],
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._join = join
        self._activities = activities
        self._interval_s = min(limit_s / _LOOKS_PER_LIMIT, _MAX_INTERVAL_S)
        self._detector = StallDetector(limit_s, max_gap_s=2 * self._interval_s)
        self._on_stall = on_stall
        self._on_end = on_end
        self._clock = clock
        self._is_guarding = False
        self._thread = threading.Thread(target=self._run, name="kestrel-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch a thread that has been started."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for `on_end` to return; returns True if it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def guard(self) -> None:
        """Looks for stalls from now on; until then it only notices the end of the thread."""
        self._is_guarding = True

    def look(self) -> list[str]:
        """Returns the activities that stall now. The watchdog's thread calls this, and tests in its place."""
        activities = self._activities() if self._is_guarding else {}
        return self._detector.look(activities, self._clock())

    def _run(self) -> None:
        try:
            while not self._join(self._interval_s):
                if stalled := self.look():
                    self._on_stall(stalled)
                    break
        except Exception:
            _log.exception("the watchdog failed; the engine ends, since nothing would notice its end or its stall")
        finally:
            self._on_end()


def all_stacks() -> str:
    """Returns the stacks of all threads of the process, for the log: file, line and function, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
