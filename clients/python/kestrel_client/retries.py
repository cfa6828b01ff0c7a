"""Decides whether and when a refused call is sent again, for both clients. Waits for nothing itself.

Only a server that says when to try again is asked again: one whose queue is full, that limits the rate of a token,
or that is stopping or recovering. gRPC itself repeats calls that no server has accepted, within about a second.
"""

from __future__ import annotations

import random
import time

from kestrel_client.errors import KestrelClientError, Overloaded, Unavailable

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Retries:
    """The attempts of one call, all of them within `timeout_s`, and none begun later than `max_retry_s`."""

    def __init__(self, timeout_s: float, max_retry_s: float, max_queue_s: float | None) -> None:
        self.timeout_s = timeout_s
        now = time.monotonic()
        self._ends = now + timeout_s
        # A caller who limits the wait for a start does not wait longer by waiting here.
        self._gives_up = now + min(max_retry_s, timeout_s, max_retry_s if max_queue_s is None else max_queue_s)
        self._least_wait_s = _FIRST_WAIT_S

    @property
    def remaining_s(self) -> float:
        """Time that is left for the next attempt."""
        return self._ends - time.monotonic()

    def wait_s(self, error: KestrelClientError) -> float | None:
        """How long to wait after this failure before the next attempt; None to give up."""
        if not isinstance(error, Overloaded | Unavailable) or error.reason == "QUEUE_TIMEOUT":
            return None
        if error.retry_after_s is None:
            return None
        # Callers that were refused together must not come back together.
        wait_s = max(error.retry_after_s, self._least_wait_s) * random.uniform(1.0, 1.5)
        self._least_wait_s = min(2 * self._least_wait_s, _LONGEST_WAIT_S)
        return wait_s if time.monotonic() + wait_s <= self._gives_up else None
