"""Admits requests to the queue, and estimates how long a new request would wait there. Safe in any thread.

A request is in the queue from `enter` until it starts or leaves; waiting for a preprocessing worker is part of it.

Rules
  B1  Requests, image bytes and estimated tokens in the queue are each bounded, except that an empty queue takes any
      request.
  B2  Each bound is a `FairLimit`: no tenant takes all of it.
  B3  A request whose estimated wait exceeds its wait limit is refused at once, instead of timing out in the queue.

The wait is estimated from recent starts: those of all requests, and those of its own tenant with its priority. The
longer estimate counts. Only time in which requests were waiting counts, since an idle engine starts few requests
although it is fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple

from kestrel_runtime.api.errors import Overloaded, QueueBound
from kestrel_runtime.api.requests import Priority
from kestrel_runtime.fairness.fair_limit import FairLimit

_MIN_STARTS = 8
_MAX_STARTS = 64
_WINDOW_S = 60.0
_RETRY_UNKNOWN_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0

_Line = tuple[str, Priority, Priority]
"""The requests that start one after the other, those of one tenant, priority and standing: `Cost[:3]`."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The upper bounds of the queue."""

    requests: int
    image_bytes: int
    tokens: int


class Cost(NamedTuple):
    """The cost of a request in the queue, and its tenant. `tokens` is an upper estimate of its prompt."""

    tenant: str
    priority: Priority
    standing: Priority
    """The priority compared with requests of other tenants."""
    image_bytes: int
    tokens: int


class QueueAdmission:
    """Bounds the engine's queue: the requests in it, their image bytes and their estimated tokens.

    Keys identify requests; all times are of one monotonic clock.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._requests = FairLimit(limits.requests)
        self._image_bytes = FairLimit(limits.image_bytes)
        self._tokens = FairLimit(limits.tokens)
        self._lock = RLock()
        self._costs: dict[Hashable, Cost] = {}
        self._lines: dict[_Line, int] = {}  # without zeros
        self._pace = _Pace()
        self._line_paces: dict[_Line, _Pace] = {}  # of lines that have started requests lately

    def __len__(self) -> int:
        return len(self._costs)

    def enter(self, key: Hashable, cost: Cost, now: float, *, wait_limit_s: float | None = None) -> None:
        """Admits a request, or raises `Overloaded`. `wait_limit_s` is the longest wait that its caller accepts."""
        with self._lock:
            if self._costs:
                self._check_bounds(cost, now)
                wait_s = None if wait_limit_s is None else self.estimated_wait_s(cost, now)
                if wait_s is not None and wait_limit_s is not None and wait_s > wait_limit_s:
                    raise Overloaded(wait_limit_s, wait_s, QueueBound.WAIT)
            self._costs[key] = cost
            self._book(cost, 1)

    def start(self, key: Hashable, now: float) -> None:
        """Removes a request from the queue because it starts, and counts the start."""
        with self._lock:
            cost = self._costs.get(key)
            if cost is None:
                return
            self._pace.start(now)
            self._line_pace(cost[:3], now).start(now)
            self.leave(key)

    def leave(self, key: Hashable) -> None:
        """Removes a request that has not started. Has no effect if it is not in the queue."""
        if key not in self._costs:  # most often, at the end of a request: do not wait for another thread then
            return
        with self._lock:
            cost = self._costs.pop(key, None)
            if cost is not None:
                self._book(cost, -1)
                if not self._costs:
                    self._pace.pause()
                line = cost[:3]
                if line not in self._lines and line in self._line_paces:
                    self._line_paces[line].pause()

    def estimated_wait_s(self, cost: Cost, now: float) -> float | None:
        """Returns the estimated wait of a new request, rather too short than too long; None without enough recent
        starts.

        All requests of its own tenant with at least its priority start before it, and as many of each other tenant
        with at least its standing. Requests that others send while it waits are not among these: they show in the
        time between the starts of its own line.
        """
        own, ahead = 0, dict[str, int]()
        with self._lock:
            pace_s = self._pace.mean_s(now)
            if pace_s is None:
                return None
            line = cost[:3]
            line_pace, num_in_line = self._line_paces.get(line), self._lines.get(line, 0)
            line_pace_s = None if line_pace is None else line_pace.mean_s(now)
            for (tenant, priority, standing), count in self._lines.items():
                if tenant == cost.tenant:
                    own += count if priority <= cost.priority else 0
                elif standing <= cost.standing:
                    ahead[tenant] = ahead.get(tenant, 0) + count
        wait_s = pace_s * (own + sum([min(count, own + 1) for count in ahead.values()]))
        return wait_s if line_pace_s is None else max(wait_s, line_pace_s * num_in_line)

    def _check_bounds(self, cost: Cost, now: float) -> None:
        tenant = cost.tenant
        if (
            self._requests.allows(tenant, 1)
            and self._image_bytes.allows(tenant, cost.image_bytes)
            and self._tokens.allows(tenant, cost.tokens)
        ):
            return
        for bound, limit, wanted in (
            (QueueBound.REQUESTS, self._requests, 1),
            (QueueBound.IMAGE_BYTES, self._image_bytes, cost.image_bytes),
            (QueueBound.TOKENS, self._tokens, cost.tokens),
        ):
            if wanted and not limit.has_room(wanted):
                raise Overloaded(limit.limit, self._retry_after_s(len(self), now), bound)
            if wanted and not limit.has_share(tenant):
                num_own = self._requests.taken_by(tenant)
                raise Overloaded(limit.limit, self._retry_after_s(num_own, now), bound, is_tenant_share=True)

    def _retry_after_s(self, num_requests: int, now: float) -> float:
        """Returns the time in which half of `num_requests` start. Shorter delays would make many retries fail
        again."""
        pace_s = self._pace.mean_s(now)
        if pace_s is None:
            return _RETRY_UNKNOWN_S
        return min(max(pace_s * num_requests / 2, _MIN_RETRY_S), _MAX_RETRY_S)

    def _line_pace(self, line: _Line, now: float) -> _Pace:
        pace = self._line_paces.get(line)
        if pace is None:
            for other in [other for other, known in self._line_paces.items() if known.is_over(now)]:
                del self._line_paces[other]
            pace = self._line_paces[line] = _Pace()
        return pace

    def _book(self, cost: Cost, sign: int) -> None:
        tenant, _, _, image_bytes, num_tokens = cost
        self._requests.count(tenant, sign)
        self._image_bytes.count(tenant, sign * image_bytes)
        self._tokens.count(tenant, sign * num_tokens)
        line = cost[:3]
        count = self._lines.get(line, 0) + sign
        if count:
            self._lines[line] = count
        else:
            del self._lines[line]


class _Pace:
    """Measures the time between two starts while requests wait."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, float]] = deque()  # (moment, time since last start)
        self._intervals_s = 0.0  # their sum
        self._last_start: float | None = None  # None where no request has waited since

    def start(self, now: float) -> None:
        """Counts a start."""
        last_start, self._last_start = self._last_start, now
        if last_start is not None:
            intervals, interval_s = self._intervals, now - last_start
            change_s = interval_s - intervals.popleft()[1] if len(intervals) == _MAX_STARTS else interval_s
            intervals.append((now, interval_s))
            self._intervals_s += change_s

    def pause(self) -> None:
        """Ends the current interval, since no request waits: the time until the next start does not count."""
        self._last_start = None

    def mean_s(self, now: float) -> float | None:
        """Returns the mean time between two starts, in seconds; None without enough recent starts."""
        while self._intervals and self._intervals[0][0] < now - _WINDOW_S:
            self._intervals_s -= self._intervals.popleft()[1]
        if len(self._intervals) < _MIN_STARTS:
            return None
        return max(0.0, self._intervals_s) / len(self._intervals)

    def is_over(self, now: float) -> bool:
        """True once no request waits and no interval is recent."""
        return self._last_start is None and (not self._intervals or self._intervals[-1][0] < now - _WINDOW_S)
