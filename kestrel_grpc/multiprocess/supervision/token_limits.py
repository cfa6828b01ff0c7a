"""Limits of tokens that hold for all front ends together: the supervisor counts their calls.

A front end asks for each call of a token that has limits, and notes the end of the call. The supervisor knows which
front end has which places, so a front end that dies gives its places back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable

import msgspec

from kestrel_grpc.access.limits import CountedCall, RateLimited, TokenLimit, TokenLimits
from kestrel_grpc.multiprocess.supervision.link import ANSWER_TIMEOUT_S, Link


class EnterCall(msgspec.Struct, array_like=True):
    """Asks to count a call. The front end numbers its calls."""

    number: int
    limit: TokenLimit


class AdoptCall(msgspec.Struct, array_like=True):
    """Notes a call to be counted that runs already."""

    number: int
    limit: TokenLimit


class LeaveCall(msgspec.Struct, array_like=True):
    """Notes that a call has ended, or that nobody waits for the answer to its `EnterCall` any more."""

    number: int


class Verdict(msgspec.Struct, array_like=True):
    """The answer to `EnterCall`."""

    is_counted: bool
    retry_after_s: float = 0.0
    limit: str = ""
    """The limit that the token has reached, where it is not counted."""


class SharedLimits:
    """The `Limits` of a front end: the supervisor counts. Belongs to the event loop of the link."""

    def __init__(self, link: Link, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)

    async def enter(self, limit: TokenLimit) -> CountedCall:
        """Count a call. Raises `RateLimited`, or `SupervisorUnavailable` where there is no answer in time."""
        place = _SharedPlace(self._link, next(self._numbers))
        try:
            verdict = await self._link.ask(EnterCall(place.number, limit), Verdict, timeout_s=self._timeout_s)
        except BaseException:
            # The supervisor may have counted the call, or does so later.
            place.leave()
            raise
        if not verdict.is_counted:
            raise RateLimited(limit.name, verdict.limit, verdict.retry_after_s)
        return place

    def adopt(self, limit: TokenLimit) -> CountedCall:
        """Count a call that runs already."""
        place = _SharedPlace(self._link, next(self._numbers))
        self._link.tell(AdoptCall(place.number, limit))
        return place


class _SharedPlace:
    """The place of a call, which the supervisor knows by its number."""

    __slots__ = ("_link", "number")

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self.number = number

    def leave(self) -> None:
        self._link.tell(LeaveCall(self.number))


class LimitOwner:
    """Counts for all front ends, in the supervisor. Belongs to one event loop."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits = limits
        # The places that calls of each front end have, by their numbers.
        self._places: dict[str, dict[int, CountedCall]] = {}

    def join(self, identity: str, link: Link) -> None:
        """Answer a new front end."""
        places = self._places[identity] = {}
        # Questions that are looked at once more, and whose askers still wait.
        undecided: set[int] = set()

        def take(question: EnterCall) -> Verdict:
            if identity not in self._places:  # it asked before its end, and reads no answer
                return Verdict(is_counted=False)
            try:
                places[question.number] = self._limits.take(question.limit)
            except RateLimited as refusal:
                return Verdict(is_counted=False, retry_after_s=refusal.retry_after_s, limit=refusal.limit)
            return Verdict(is_counted=True)

        def enter(question: EnterCall) -> Verdict | Awaitable[Verdict]:
            verdict = take(question)
            if verdict.is_counted or question.limit.concurrency is None:
                return verdict
            undecided.add(question.number)
            return look_again(question, verdict)

        async def look_again(question: EnterCall, verdict: Verdict) -> Verdict:
            # A caller whose call has ended on one front end may make its next on another. The note of the end was
            # sent before that question, but over another link, which may be read later. Now all links are read.
            await asyncio.sleep(0)
            if question.number not in undecided:
                return verdict
            undecided.discard(question.number)
            return take(question)

        def adopt(note: AdoptCall) -> None:
            if identity in self._places:
                places[note.number] = self._limits.adopt(note.limit)

        def leave(note: LeaveCall) -> None:
            undecided.discard(note.number)
            place = places.pop(note.number, None)
            if place is not None:  # else the call was refused, and nobody waited for the answer
                place.leave()

        link.on(EnterCall, enter)
        link.on(AdoptCall, adopt)
        link.on(LeaveCall, leave)

    def drop(self, identity: str) -> None:
        """A front end has ended: its calls have, too."""
        for place in self._places.pop(identity, {}).values():
            place.leave()
