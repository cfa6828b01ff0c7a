"""Defines what a server asks the other processes that serve on the same ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Peers(Protocol):
    """Represents the other front ends of the host."""

    @property
    def own_name(self) -> str:
        """The name of this process among them, such as "frontend-0"; empty if it is the whole server."""
        ...

    @property
    def num_frontends(self) -> int:
        """The number of front ends of the host, this process included; 0 if it is the whole server."""
        ...

    def answer(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        """Registers the answer to questions of others about a topic. Called before `take_part`."""
        ...

    def take_part(self) -> None:
        """Lets others ask this process from now on."""
        ...

    async def ask(self, topic: str, question: bytes, *, needs_all: bool = True) -> Sequence[bytes]:
        """Returns the answers of all others, or without `needs_all` of those that answer in time.

        Raises `SupervisorUnavailable` if a needed process, or the supervisor, does not answer in time.
        """
        ...


class NoPeers:
    """Stands for the peers of a process that serves alone."""

    own_name = ""
    num_frontends = 0

    def answer(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        """Ignores the answer: no other process asks."""

    def take_part(self) -> None:
        """Does nothing: no other process asks."""

    async def ask(self, topic: str, question: bytes, *, needs_all: bool = True) -> Sequence[bytes]:
        """Returns no answers: there is no other process."""
        return ()
