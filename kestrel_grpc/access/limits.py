"""Counts the calls of tokens that have limits: a rate with a burst, and calls at a time.

One `Limits` counts for all front ends of a host. `TokenLimits` keeps the counts in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# A guess: when another call of the token will end is not known.
_RETRY_CONCURRENT_S = 1.0
_MIN_SWEEP = 1024
"""Accounts from which unused ones are looked for."""


class AccessRefused(Exception):
    """The root of the refusals."""

    name = ""
    """The name of the token in its file; empty where none is known."""


class RateLimited(AccessRefused):
    """The token has reached a limit, which `limit` describes."""

    def __init__(self, name: str, limit: str, retry_after_s: float) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """What a token may use. `rate` is in calls per second; None means no limit, as for `concurrency`."""

    name: str
    sha256: bytes
    rate: float | None
    burst: int
    concurrency: int | None

    def refusal(self, wait_s: float | None) -> RateLimited:
        """The error of a call for which its rate has no room for `wait_s` seconds; None: too many calls run."""
        if wait_s is None:
            return RateLimited(self.name, f"at most {self.concurrency} requests at a time", _RETRY_CONCURRENT_S)
        limit = f"at most {self.rate:g} requests per second, and {self.burst} at once"
        return RateLimited(self.name, limit, wait_s)


class CountedCall(Protocol):
    """The place of a call that is counted."""

    def leave(self) -> None:
        """The call has ended. Called once."""
        ...


class Limits(Protocol):
    """Counts calls of tokens."""

    async def enter(self, limit: TokenLimit) -> CountedCall:
        """Count a call, or raise `RateLimited`. Raises `SupervisorUnavailable` where the counts cannot be had."""
        ...

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Count a call that runs already: its token has had no limit before."""
        ...


class TokenLimits:
    """The counts of this process. Belongs to one event loop; `enter` never waits."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By hash, so that a token whose limits change keeps what it has used.
        self._accounts: dict[bytes, _Account] = {}
        self._sweep_at = _MIN_SWEEP

    @property
    def num_accounts(self) -> int:
        """Of tokens that have been used."""
        return len(self._accounts)

    async def enter(self, limit: TokenLimit) -> CountedCall:
        """Count a call, or raise `RateLimited`."""
        return self.take(limit)

    def take(self, limit: TokenLimit) -> CountedCall:
        """Count a call, or raise `RateLimited`."""
        account = self._account(limit)
        if limit.concurrency is not None and account.num_calls >= limit.concurrency:
            raise limit.refusal(None)
        if limit.rate is not None:
            wait_s = account.spend(limit.rate, limit.burst, self._clock())
            if wait_s > 0.0:
                raise limit.refusal(wait_s)
        account.num_calls += 1
        return account

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Count a call that runs already."""
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
        """Drop accounts that a new one would equal: tokens come and go, and only their users know when."""
        now = self._clock()
        self._accounts = {sha256: account for sha256, account in self._accounts.items() if not account.is_new(now)}
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._accounts))


class _Account:
    """The use of one token: a bucket of calls that fills at its rate, and the calls that run."""

    __slots__ = ("_burst", "_level", "_level_at", "_rate", "num_calls")

    def __init__(self, burst: int, now: float) -> None:
        self.num_calls = 0
        self._burst = burst
        self._rate: float | None = None
        self._level = float(burst)
        self._level_at = now

    def spend(self, rate: float, burst: int, now: float) -> float:
        """Take one call out; where there is none, the seconds until there will be."""
        self._rate, self._burst = rate, burst
        self._level = min(burst, self._level + (now - self._level_at) * rate)
        self._level_at = now
        if self._level < 1.0:
            return (1.0 - self._level) / rate
        self._level -= 1.0
        return 0.0

    def leave(self) -> None:
        """A call of the token has ended."""
        self.num_calls -= 1

    def is_new(self, now: float) -> bool:
        """Whether no call runs and the bucket is full."""
        if self.num_calls:
            return False
        return self._rate is None or self._level + (now - self._level_at) * self._rate >= self._burst
