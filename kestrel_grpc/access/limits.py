"""Counts the calls of tokens that have limits: a rate with a burst, and a number of concurrent calls.

One `Limits` counts for all front ends of a server. `TokenLimits` keeps the counts in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# An estimate: the end of the token's other calls is unknown.
_RETRY_CONCURRENT_S = 1.0
_MIN_SWEEP = 1024
"""The number of accounts from which unused ones are dropped."""


class AccessRefused(Exception):
    """The root of the errors of refused calls."""

    name = ""
    """The name of the token in its file; empty if it is unknown."""


class RateLimited(AccessRefused):
    """The token has reached a limit, which `limit` describes."""

    def __init__(self, name: str, limit: str, retry_after_s: float) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Describes the limits of a token: `rate` in calls per second, `burst` and `concurrency` in calls.

    None as `rate` or `concurrency` means no limit.
    """

    name: str
    sha256: bytes
    rate: float | None
    burst: int
    concurrency: int | None

    def never_allows(self, count: int) -> str:
        """Returns the limit that a call of `count` requests exceeds at any time; empty if there is none."""
        if self.concurrency is not None and count > self.concurrency:
            return f"at most {self.concurrency} requests at a time"
        if self.rate is not None and count > self.burst:
            return f"at most {self.burst} requests at once"
        return ""

    def refusal(self, wait_s: float | None) -> RateLimited:
        """Returns the error of a call that exceeds the rate, which allows it in `wait_s` seconds.

        If `wait_s` is None, it returns the error of a call that exceeds the concurrency.
        """
        if wait_s is None:
            return RateLimited(self.name, f"at most {self.concurrency} requests at a time", _RETRY_CONCURRENT_S)
        limit = f"at most {self.rate:g} requests per second, and {self.burst} at once"
        return RateLimited(self.name, limit, wait_s)


class CountedCall(Protocol):
    """Represents a call that counts towards the limits of its token."""

    def leave(self) -> None:
        """Ends the counting of the call. Called once, when the call has ended."""
        ...


class Limits(Protocol):
    """Counts the calls of tokens."""

    async def enter(self, limit: TokenLimit, count: int = 1, *, takes_place: bool = True) -> CountedCall:
        """Counts a call as `count` requests, or raises `RateLimited`.

        With `takes_place` False it counts towards the rate alone: another call holds its place among the concurrent
        ones. Raises `SupervisorUnavailable` if the process that counts does not answer.
        """
        ...

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Counts a call that runs already, for a token that had no limit before. Never refuses it."""
        ...


class TokenLimits:
    """Keeps the counts in this process. Belongs to one event loop; `enter` never waits."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By hash, so that a token whose limits change keeps what it has used.
        self._accounts: dict[bytes, _Account] = {}
        self._sweep_at = _MIN_SWEEP

    @property
    def num_accounts(self) -> int:
        """The number of tokens whose use is recorded."""
        return len(self._accounts)

    async def enter(self, limit: TokenLimit, count: int = 1, *, takes_place: bool = True) -> CountedCall:
        """Counts a call as `count` requests, or raises `RateLimited`."""
        return self.take(limit, count, takes_place=takes_place)

    def take(self, limit: TokenLimit, count: int = 1, *, takes_place: bool = True) -> CountedCall:
        """Counts a call as `count` requests, or raises `RateLimited`; `takes_place` is as in `Limits.enter`."""
        account, num_places = self._account(limit), count if takes_place else 0
        if num_places and limit.concurrency is not None and account.num_calls + num_places > limit.concurrency:
            raise limit.refusal(None)
        if limit.rate is not None:
            wait_s = account.spend(count, limit.rate, limit.burst, self._clock())
            if wait_s > 0.0:
                raise limit.refusal(wait_s)
        account.num_calls += num_places
        return account if num_places == 1 else _OtherPlaces(account, num_places)

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Counts a call that runs already."""
        account = self._account(limit)
        account.num_calls += 1
        return account

    def _account(self, limit: TokenLimit) -> _Account:
        account = self._accounts.get(limit.sha256)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._drop_unused()
            account = self._accounts[limit.sha256] = _Account(limit.burst, self._clock())
        return account

    def _drop_unused(self) -> None:
        """Drops the accounts that equal a new one. Tokens are removed from their file without notice here."""
        now = self._clock()
        self._accounts = {sha256: account for sha256, account in self._accounts.items() if not account.is_new(now)}
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._accounts))


class _Account:
    """Records the use of one token: a bucket of calls that fills at the rate, and the number of running calls."""

    __slots__ = ("_burst", "_level", "_level_at", "_rate", "num_calls")

    def __init__(self, burst: int, now: float) -> None:
        self.num_calls = 0
        self._burst = burst
        self._rate: float | None = None
        self._level = float(burst)
        self._level_at = now

    def spend(self, count: int, rate: float, burst: int, now: float) -> float:
        """Takes `count` calls out of the bucket. If it has fewer, returns the seconds until it has them, else 0."""
        self._rate, self._burst = rate, burst
        self._level = min(burst, self._level + (now - self._level_at) * rate)
        self._level_at = now
        if self._level < count:
            return (count - self._level) / rate
        self._level -= count
        return 0.0

    def leave(self) -> None:
        """Counts the end of a call."""
        self.num_calls -= 1

    def is_new(self, now: float) -> bool:
        """Returns True if no call runs and the bucket is full."""
        if self.num_calls:
            return False
        return self._rate is None or self._level + (now - self._level_at) * self._rate >= self._burst


class _OtherPlaces:
    """Represents a call that takes several places among the concurrent ones, or none."""

    __slots__ = ("_account", "_count")

    def __init__(self, account: _Account, count: int) -> None:
        self._account = account
        self._count = count

    def leave(self) -> None:
        """Counts the end of the call."""
        self._account.num_calls -= self._count
