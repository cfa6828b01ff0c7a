"""What a server asks the other processes that serve on the same ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Peers(Protocol):
    """The other front ends of the host."""

    @property
    def own_name(self) -> str:
        """The name of this process among them, such as "frontend-0"; empty where it is the whole server."""
        ...

    @property
    def num_frontends(self) -> int:
        """How many front ends the host has, this process included; 0 where it is the whole server."""
        ...

    def answer(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        """Answer questions of others about a topic. Called before `take_part`."""
        ...

    def take_part(self) -> None:
        """Be asked by others from now on."""
        ...

    async def ask(self, topic: str, question: bytes, *, needs_all: bool = True) -> Sequence[bytes]:
        """The answers of all of them, or of those that answer in time unless `needs_all`.

        Raises `SupervisorUnavailable` where a needed one, or the supervisor, does not answer in time.
        """
        ...


class NoPeers:
    """For the only process on its ports."""

    own_name = ""
    num_frontends = 0

    def answer(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        """Nobody asks."""

    def take_part(self) -> None:
        """Nobody asks."""

    async def ask(self, topic: str, question: bytes, *, needs_all: bool = True) -> Sequence[bytes]:
        """Nobody answers."""
        return ()
