"""Applies the limits of tokens to all front ends together: the supervisor counts their calls.

A front end asks for each call of a token that has limits, and reports the end of the call. The supervisor knows
the calls of each front end, so it stops counting the calls of a front end that dies.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable

from kestrel_grpc.access.limits import CountedCall, RateLimited, TokenLimit, TokenLimits
from kestrel_grpc.multiprocess.protocol.link import Link
from kestrel_grpc.multiprocess.protocol.messages import AdoptCall, EnterCall, LeaveCall


class SharedLimits:
    """Implements `Limits` for a front end: the supervisor counts. Belongs to the event loop of the link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers = itertools.count(1)

    async def enter(self, limit: TokenLimit, count: int = 1, *, takes_place: bool = True) -> CountedCall:
        """Counts a call as `count` requests; `takes_place` is as in `Limits.enter`.

        Raises `RateLimited`, or `SupervisorUnavailable` if there is no answer in time.
        """
        call = _SharedCall(self._link, next(self._numbers))
        try:
            await self._link.ask(EnterCall(call.number, limit, count, takes_place))
        except RateLimited:
            raise
        except BaseException:
            # The supervisor may have counted the call, or does so later.
            call.leave()
            raise
        return call

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Counts a call that runs already."""
        call = _SharedCall(self._link, next(self._numbers))
        self._link.notify(AdoptCall(call.number, limit))
        return call


class _SharedCall:
    """Represents a call that the supervisor counts by its number."""

    __slots__ = ("_link", "number")

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self.number = number

    def leave(self) -> None:
        self._link.notify(LeaveCall(self.number))


class LimitOwner:
    """Counts the calls of all front ends, in the supervisor. Belongs to one event loop."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits = limits
        # The counted calls of each front end, by their numbers.
        self._calls: dict[str, dict[int, CountedCall]] = {}

    def join(self, identity: str, link: Link) -> None:
        """Answers a new front end from now on."""
        calls = self._calls[identity] = {}
        # Questions that are decided once more, and whose askers still wait.
        undecided: set[int] = set()

        def take(question: EnterCall) -> None:
            if identity not in self._calls:  # it asked before it ended
                raise RateLimited(question.limit.name, "", 0.0)
            calls[question.number] = self._limits.take(
                question.limit, question.count, takes_place=question.takes_place
            )

        def enter(question: EnterCall) -> Awaitable[None] | None:
            try:
                return take(question)
            except RateLimited as refusal:
                if question.limit.concurrency is None:
                    raise
                undecided.add(question.number)
                return decide_again(question, refusal)

        async def decide_again(question: EnterCall, refusal: RateLimited) -> None:
            # A caller whose call has ended on one front end may make its next on another. The note of the end was
            # sent before that question, but over another link, which may be read later. Now all links are read.
            await asyncio.sleep(0)
            if question.number not in undecided:
                raise refusal
            undecided.discard(question.number)
            take(question)

        def adopt(note: AdoptCall) -> None:
            if identity in self._calls:
                calls[note.number] = self._limits.adopt(note.limit)

        def leave(note: LeaveCall) -> None:
            undecided.discard(note.number)
            call = calls.pop(note.number, None)
            if call is not None:  # else the call was refused, or its caller left before the answer
                call.leave()

        link.on(EnterCall, enter)
        link.on(AdoptCall, adopt)
        link.on(LeaveCall, leave)

    def drop(self, identity: str) -> None:
        """Stops counting the calls of a front end, which has ended."""
        for call in self._calls.pop(identity, {}).values():
            call.leave()
