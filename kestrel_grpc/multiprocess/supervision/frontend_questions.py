"""Carries questions of a front end to all others, through the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from kestrel_grpc.multiprocess.protocol.link import ANSWER_TIMEOUT_S, Link, SupervisorUnavailable

_MARGIN_S = 1.0
"""The supervisor asks every other front end before it answers."""


class TakePart(msgspec.Struct, array_like=True):
    """Notes that a front end answers the questions of others from now on."""


class AskAll(msgspec.Struct, array_like=True):
    """Asks all other front ends. The answer is the list of their answers."""

    topic: str
    question: bytes
    needs_all: bool
    """True if a front end that does not answer is an error; otherwise its answer is left out."""


class AskOne(msgspec.Struct, array_like=True):
    """Asks one front end, for another."""

    topic: str
    question: bytes


class LinkedPeers:
    """The `Peers` of a front end. Belongs to the event loop of the link."""

    def __init__(self, link: Link, own_name: str, num_frontends: int) -> None:
        self.own_name = own_name
        self.num_frontends = num_frontends
        self._link = link
        self._answers: dict[str, Callable[[bytes], bytes]] = {}
        link.on(AskOne, lambda asked: self._answers[asked.topic](asked.question))

    def answer(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        """Answer questions of others about a topic."""
        self._answers[topic] = answer

    def take_part(self) -> None:
        """Answer questions from now on; every topic has its function."""
        self._link.notify(TakePart())

    async def ask(self, topic: str, question: bytes, *, needs_all: bool = True) -> Sequence[bytes]:
        """Returns the answer of each other front end. Raises `SupervisorUnavailable`."""
        asked = AskAll(topic, question, needs_all)
        return await self._link.ask(asked, list[bytes], timeout_s=ANSWER_TIMEOUT_S + _MARGIN_S)


class Switchboard:
    """Passes questions on, in the supervisor. Belongs to one event loop."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._asked: set[str] = set()
        """The identities of front ends that answer questions."""

    def join(self, identity: str, link: Link) -> None:
        """Serve a new front end, which is asked once it takes part."""
        self._links[identity] = link

        def take_part(_: TakePart) -> None:
            if identity in self._links:
                self._asked.add(identity)

        async def ask_others(asked: AskAll) -> list[bytes]:
            others = [self._links[name] for name in self._asked if name != identity]
            answers = await asyncio.gather(*(_ask_one(other, asked) for other in others))
            return [answer for answer in answers if answer is not None]

        link.on(TakePart, take_part)
        link.on(AskAll, ask_others)

    def drop(self, identity: str) -> None:
        """Forget a front end that has ended."""
        self._links.pop(identity, None)
        self._asked.discard(identity)


async def _ask_one(link: Link, asked: AskAll) -> bytes | None:
    """Returns the answer of a front end; None if it ended meanwhile, or if it is silent and not needed.

    Raises `SupervisorUnavailable`.
    """
    try:
        return await link.ask(AskOne(asked.topic, asked.question), bytes, timeout_s=ANSWER_TIMEOUT_S)
    except SupervisorUnavailable:
        if link.closed.done() or not asked.needs_all:
            return None
        raise
