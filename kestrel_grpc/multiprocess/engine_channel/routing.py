"""Chooses the engine core that a request goes to.

Rules
  C1  Rendezvous hashing of a request's key chooses its core. The key is the route that the caller has given, or the
      digest of the first image. So requests about one image, and the turns of one conversation, find in that core's
      cache what those before them have computed. If one of N cores leaves, 1/N of the keys move.
  C2  Such a request goes to the next core in that order only if its core has waiting requests and is more loaded
      than others: by more than a quarter, and by more than one batch.
  C3  A request without a key goes to the core with the least load.
  C4  A core that does not serve gets no requests, nor does a core that has stopped to answer while others answer.

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
        """The requests that the core has, and those on their way to it."""
        ...

    @property
    def num_waiting(self) -> int:
        """The requests that the core has and has not started."""
        ...

    @property
    def max_batch_size(self) -> int: ...


Core = TypeVar("Core", bound=Destination)


def home_order(key: bytes, indices: Sequence[int]) -> list[int]:
    """Returns the indices of cores in the order of preference for a key."""
    return sorted(indices, key=lambda index: hashlib.sha256(b"%d:" % index + key).digest())


def choose(cores: Sequence[Core], key: bytes | None) -> Core:
    """Returns the core, of at least one that serves, for a request with this key, or with none."""
    if len(cores) == 1:
        return cores[0]
    if key is None:
        return min(cores, key=lambda core: (core.load, core.index))
    by_index = {core.index: core for core in cores}
    mean = sum(core.load for core in cores) / len(cores)
    ordered = [by_index[index] for index in home_order(key, list(by_index))]
    for core in ordered:
        if not core.num_waiting or core.load <= max(_FACTOR * mean, mean + core.max_batch_size):
            return core
    return ordered[0]
