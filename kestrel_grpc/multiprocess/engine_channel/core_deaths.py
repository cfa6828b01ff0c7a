"""Decides what a front end does with its requests when the process of an engine core ends.

    the process of a core ends
     │
     ├─ each request in its flight record: it may be the cause, and gets a count
     │    │   + 2 after a fault, + 1 if the process was killed from outside
     │    ├─ count of 2 or more ─▶ isolated: it runs alone the next time
     │    │     └─ it completes ─▶ the count is forgotten
     │    └─ count of 4 or more, and it was in flight alone ─▶ quarantined: every core refuses it
     │
     └─ each request of this front end that the core had
          ├─ quarantined ───────────────────▶ refused (`RequestRefused`)
          ├─ its caller has received events ─▶ ended (`EngineUnavailable`): they cannot be taken back
          └─ otherwise ─────────────────────▶ submitted again, to another core if there is one

This is a bisection in one step: all requests that were in flight together run alone, and the one that ends a
process again is the poison request. Every front end reads the same flight record, so all of them count alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from kestrel_grpc.multiprocess.protocol.messages import Isolate, Quarantine
from kestrel_runtime.api.errors import EngineUnavailable, KestrelError, RequestRefused

_REMEMBERED_S = 600.0
_FAULT, _KILL = 2, 1
"""The numbers that the end of a process adds to the count of a request in flight. SIGKILL is sent from outside, as
when memory runs out, and may have another cause."""
_IS_ISOLATED, _IS_QUARANTINED = 2, 4
"""The counts from which a request runs alone, and is quarantined if it ran alone when its core ended."""
_MAX_REMEMBERED = 256
"""The most fingerprints with a count, and the most in quarantine."""

_log = logging.getLogger(__name__)


class CoreDeaths:
    """The ends of core processes that one front end has seen, by the fingerprints of the requests in flight.

    The fingerprint of a core may end with that of the request's adapter, which a front end does not know.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}  # with the time of the last end
        self._quarantined: dict[str, None] = {}

    def record(self, in_flight: Iterable[str], *, is_fault: bool) -> None:
        """Count the end of a core's process; without `is_fault` it was killed from outside."""
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

    def error_of(self, fingerprint: str, *, has_events: bool) -> KestrelError | None:
        """Returns the error that ends a request of the core that has ended; None if it is submitted again.

        `has_events`: True if its caller has received events.
        """
        if any(name.startswith(fingerprint) for name in self._quarantined):
            return RequestRefused(f"{fingerprint} has ended an engine process")
        return ended_error() if has_events else None

    def notes(self) -> Iterator[Isolate | Quarantine]:
        """Yields what every core must know before it gets these requests again."""
        if isolated := tuple(name for name, (count, _) in self._counts.items() if count >= _IS_ISOLATED):
            yield Isolate(isolated)
        if self._quarantined:
            yield Quarantine(tuple(self._quarantined))

    @property
    def has_counts(self) -> bool:
        """True while any request has a count."""
        return bool(self._counts)

    def completed_alone(self, fingerprint: str) -> None:
        """Forget the count of a request that a core has completed alone."""
        self._counts.pop(fingerprint, None)

    def completed(self, fingerprint: str) -> None:
        """Forget the counts of a request of this front end that has completed."""
        for name in [name for name in self._counts if name.startswith(fingerprint)]:
            del self._counts[name]


def ended_error() -> EngineUnavailable:
    """Returns the error of requests and questions whose core has ended."""
    return EngineUnavailable("the engine process has ended")
