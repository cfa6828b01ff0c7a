"""Tokens per second that the engine generates, over the last seconds. One thread adds, any thread reads."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 5.0


class TokenRate:
    """Counts tokens by time; forgets those older than the window."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()  # (moment in seconds, tokens)

    def add(self, now: float, num_tokens: int) -> None:
        """Count tokens that were generated at `now`, in seconds of the monotonic clock."""
        self._counts.append((now, num_tokens))
        while self._counts[0][0] < now - _WINDOW_S:
            self._counts.popleft()

    def per_second(self, now: float) -> float:
        """Tokens per second over the window that ends at `now`."""
        since = now - _WINDOW_S
        return sum(count for moment, count in list(self._counts) if moment >= since) / _WINDOW_S
