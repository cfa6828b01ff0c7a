"""Carries questions of a front end to all others, through the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.link import ANSWER_TIMEOUT_S, Link
from kestrel_grpc.multiprocess.protocol.messages import AskAll, AskOne, TakePart

KEEP_INTERVAL_S = 5.0
"""The time between two questions of the supervisor for answers that count when a process has ended."""
_MARGIN_S = 1.0
"""The supervisor asks every other front end before it answers."""


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
        return await self._link.ask(AskAll(topic, question, needs_all), timeout_s=ANSWER_TIMEOUT_S + _MARGIN_S)


Join = Callable[[Iterable[bytes]], bytes]
"""Returns one answer in place of several."""


class Switchboard:
    """Passes questions on, in the supervisor. Belongs to one event loop.

    `lasting` are the topics whose answers still count when a process has ended: the last one that it gave, `joined`
    with those of others that have ended, is a further answer from then on.
    """

    def __init__(self, lasting: Mapping[str, Join]) -> None:
        self._lasting = lasting
        self._links: dict[str, Link] = {}
        self._last: dict[str, dict[str, bytes]] = {}
        """The last answer to each lasting topic, by the identity of front ends that answer questions."""
        self._of_ended: dict[str, bytes] = {}
        """The answer of all that have ended, by lasting topic."""

    def join(self, identity: str, link: Link) -> None:
        """Serve a new front end, which is asked once it takes part."""
        self._links[identity] = link

        def take_part(_: TakePart) -> None:
            if identity in self._links:
                self._last[identity] = {}

        link.on(TakePart, take_part)
        link.on(AskAll, lambda asked: self._ask_others(asked, identity))

    def drop(self, identity: str) -> None:
        """Forget a front end that has ended, but for its last answers to lasting topics."""
        self._links.pop(identity, None)
        for topic, answer in self._last.pop(identity, {}).items():
            earlier = self._of_ended.get(topic)
            self._of_ended[topic] = self._lasting[topic]([answer] if earlier is None else [earlier, answer])

    async def watch(self) -> None:
        """Ask for the answers to lasting topics again and again."""
        while True:
            await asyncio.sleep(KEEP_INTERVAL_S)
            for topic in self._lasting:
                with contextlib.suppress(SupervisorUnavailable):
                    await self._ask_others(AskAll(topic, b"", needs_all=False))

    async def _ask_others(self, asked: AskAll, identity: str | None = None) -> list[bytes]:
        """Returns the answers of all but one front end, and that of those that have ended."""
        # A front end that ends meanwhile counts once: by the answer that it gave before.
        before = {name: last.get(asked.topic) for name, last in self._last.items() if name != identity}
        of_ended = self._of_ended.get(asked.topic)
        given = await asyncio.gather(*(self._ask_one(name, asked) for name in before))
        found = [last if now is None else now for now, last in zip(given, before.values(), strict=True)]
        return [answer for answer in (*found, of_ended) if answer is not None]

    async def _ask_one(self, identity: str, asked: AskAll) -> bytes | None:
        """Returns the answer of a front end; None if it ended meanwhile, or if it is silent and not needed.

        Raises `SupervisorUnavailable`.
        """
        link = self._links[identity]
        try:
            answer = await link.ask(AskOne(asked.topic, asked.question), timeout_s=ANSWER_TIMEOUT_S)
        except SupervisorUnavailable:
            if link.closed.done() or not asked.needs_all:
                return None
            raise
        if asked.topic in self._lasting and identity in self._last:
            self._last[identity][asked.topic] = answer
        return answer
