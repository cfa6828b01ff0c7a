"""Chooses the engine core that a request goes to.

Rules
  C1  A request with an image belongs to the core that rendezvous hashing of its digest names, so that an image that
      comes again meets its cache. If one of N cores leaves, 1/N of the images move.
  C2  It goes to the next core in that order only where its home has waiting requests and is more loaded than
      others: by more than a quarter, and by more than one batch.
  C3  A request without an image goes to the core with the least load.
  C4  A core that does not serve gets nothing, and neither does one that has stopped to answer, while others do.

Rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

_FACTOR = 1.25


class Destination(Protocol):
    """A core as routing sees it."""

    @property
    def index(self) -> int: ...

    @property
    def load(self) -> int:
        """Requests that it has, and those on their way to it."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that it has and has not started."""
        ...

    @property
    def max_batch_size(self) -> int: ...


Core = TypeVar("Core", bound=Destination)


def home_order(digest: bytes, indices: Sequence[int]) -> list[int]:
    """The cores by preference for the image of this digest."""
    return sorted(indices, key=lambda index: hashlib.sha256(b"%d:" % index + digest).digest())


def choose(cores: Sequence[Core], digest: bytes | None) -> Core:
    """One of the cores that serve, of which there is at least one. `digest`: of the image; None without one."""
    if len(cores) == 1:
        return cores[0]
    if digest is None:
        return min(cores, key=lambda core: (core.load, core.index))
    by_index = {core.index: core for core in cores}
    mean = sum(core.load for core in cores) / len(cores)
    ordered = [by_index[index] for index in home_order(digest, list(by_index))]
    for core in ordered:
        if not core.num_waiting or core.load <= max(_FACTOR * mean, mean + core.max_batch_size):
            return core
    return ordered[0]
