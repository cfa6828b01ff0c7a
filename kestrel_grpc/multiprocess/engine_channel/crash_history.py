"""Counts the ends of core processes in which each request had a part, to find poison requests.

When a core's process ends, the requests in its flight record are isolated: each runs alone the next time, until it
completes. A request that was in flight alone when a process ended, and in flight at an earlier end too, is
quarantined: every core refuses it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

_REMEMBERED_S = 600.0
_FAULT, _KILL = 2, 1
"""The numbers that the end of a process adds to the count of a request in flight. SIGKILL is sent from outside, as
when memory runs out, and may have another cause."""
_RUNS_ALONE, _IS_QUARANTINED = 2, 4
"""The counts from which a request runs alone, and is quarantined if it ran alone when its core ended."""
_MAX_REMEMBERED = 256
"""The most fingerprints with a count, and the most in quarantine."""

_log = logging.getLogger(__name__)


class CrashHistory:
    """The counts of one front end, by the fingerprints of requests."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}  # with the time of the last end
        self._quarantined: dict[str, None] = {}

    def record(self, in_flight: Iterable[str], *, is_fault: bool) -> None:
        """Count the end of a core's process; without `is_fault` it was killed from outside.

        A request is isolated at once after a fault, and after the second kill. If it was in flight alone, it is
        quarantined after the second fault or the fourth kill.
        """
        now = time.monotonic()
        for fingerprint in [name for name, (_, since) in self._counts.items() if since < now - _REMEMBERED_S]:
            del self._counts[fingerprint]
        names = frozenset(in_flight)
        for fingerprint in names:
            before, _ = self._counts.pop(fingerprint, (0, now))
            count = before + (_FAULT if is_fault else _KILL)
            self._counts[fingerprint] = count, now
            if len(names) == 1 and count >= _IS_QUARANTINED:
                self._quarantined[fingerprint] = None
                _log.error("%s has ended engine processes: it is refused from now on", fingerprint)
        for known in (self._counts, self._quarantined):
            while len(known) > _MAX_REMEMBERED:
                del known[next(iter(known))]

    @property
    def isolated(self) -> tuple[str, ...]:
        """The fingerprints of requests that must run alone."""
        return tuple(name for name, (count, _) in self._counts.items() if count >= _RUNS_ALONE)

    @property
    def quarantined(self) -> tuple[str, ...]:
        """The fingerprints of requests that cores refuse."""
        return tuple(self._quarantined)

    def has_quarantined(self, fingerprint: str) -> bool:
        """Returns True if the request is quarantined, with any adapter."""
        return any(name.startswith(fingerprint) for name in self._quarantined)

    @property
    def has_counts(self) -> bool:
        """True while any request has a count."""
        return bool(self._counts)

    def completed(self, fingerprint: str) -> None:
        """Forget the count of a request that completed alone."""
        self._counts.pop(fingerprint, None)

    def completed_request(self, fingerprint: str) -> None:
        """Forget the counts of a request that completed, with any adapter."""
        for name in [name for name in self._counts if name.startswith(fingerprint)]:
            del self._counts[name]
