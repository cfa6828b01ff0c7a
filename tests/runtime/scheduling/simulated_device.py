"""Two streams of a device that write, copy and read KV-cache pages, in any order that streams and waits allow.

Each position of memory, each row of the request state and each crop of an entry for image embeddings holds the
content that was written last. A step checks everything that it reads, so a page, row or entry that is given to a
new owner too early, or one that is shared wrongly, shows as a wrong read.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple


class WrongRead(AssertionError):
    """A step has read a position that does not hold what its sequence needs."""


@dataclass
class RowAccess:
    """What a step does to a sequence's row of the request state, in this order; None where it does not."""

    row: int
    opened: object = None
    read: object = None
    sampled: object = None


@dataclass
class EntryWrite:
    """Crops of an image that a step encodes into an entry."""

    entry: int
    image: object
    crops: tuple[int, ...]
    kept: tuple[tuple[int, object], ...] = ()
    """Places of the pool, with the crops that the step copies there."""
    found: tuple[tuple[int, int, object], ...] = ()
    """Crops that the step reads from places of the pool, with what these must hold."""


class EntryRead(NamedTuple):
    """The image that a step needs in an entry, and its number of crops."""

    entry: int
    image: object
    num_crops: int


@dataclass
class Access:
    """What one sequence does in a step: reads all positions before `start`, then writes [start, end)."""

    pages: tuple[int, ...]
    content: list[object]
    start: int
    end: int
    counts: bool = True
    """Whether the result is used; a sequence that has left reads whatever is there."""
    row: RowAccess | None = None
    embeddings: list[EntryRead] = field(default_factory=list)


@dataclass
class DeviceStep:
    id: int
    stream: str
    accesses: list[Access]
    copies: list[tuple[int, int]]
    after: frozenset[int]
    sequences: list[tuple[Any, int]] = field(default_factory=list)
    """For the launcher: a request, and the position up to which the step writes."""
    encodes: list[EntryWrite] = field(default_factory=list)


class SimulatedDevice:
    """Runs steps of `prefill` and `decode` streams in any allowed order; `random` chooses."""

    def __init__(self, num_pages: int, page_size: int, random: Random) -> None:
        self.page_size = page_size
        self.memory: list[list[object]] = [[None] * page_size for _ in range(num_pages)]
        self.streams: dict[str, deque[DeviceStep]] = {"prefill": deque(), "decode": deque()}
        self.rows: dict[int, object] = {}
        self.pool: dict[int, object] = {}
        """By place, the encoded crop."""
        self.entries: dict[int, dict[int, object]] = {}
        """By entry, the image of each crop."""
        self.executed: set[int] = set()
        self._random = random

    def launch(self, step: DeviceStep) -> None:
        self.streams[step.stream].append(step)

    def run_some(self) -> None:
        """Execute a random number of steps."""
        for _ in range(self._random.randrange(4)):
            self.run_one()

    def run_one(self) -> bool:
        """Execute one step that may run now. False where none is left."""
        ready = [queue for queue in self.streams.values() if queue and queue[0].after <= self.executed]
        if not ready:
            assert not any(self.streams.values()), "the streams wait for each other"
            return False
        self._execute(self._random.choice(ready).popleft())
        return True

    def run_until(self, step_id: int) -> None:
        """Execute steps until this one has been."""
        while step_id not in self.executed:
            assert self.run_one(), "the step was launched"

    def _execute(self, step: DeviceStep) -> None:
        for source, target in step.copies:
            self.memory[target] = list(self.memory[source])
        for write in step.encodes:
            self.pool.update(write.kept)
        for write in step.encodes:
            for _, place, content in write.found:
                if self.pool.get(place) != content:
                    raise WrongRead(f"place {place} holds {self.pool.get(place)}, not {content}")
            crops = self.entries.setdefault(write.entry, {})
            numbers = [*write.crops, *(crop for crop, _, _ in write.found)]
            crops.update(dict.fromkeys(numbers, write.image))
        for access in step.accesses:
            for read in access.embeddings if access.counts else ():
                if not self.holds(read):
                    raise WrongRead(f"entry {read.entry} does not hold {read.image}")
            for position in range(access.start if access.counts else 0):
                found = self.memory[access.pages[position // self.page_size]][position % self.page_size]
                if found != access.content[position]:
                    raise WrongRead(f"position {position} holds {found}, not {access.content[position]}")
            for position in range(access.start, access.end):
                page = access.pages[position // self.page_size]
                self.memory[page][position % self.page_size] = access.content[position]
            if access.row is not None:
                self._access_row(access.row, counts=access.counts)
        self.executed.add(step.id)

    def holds(self, embeddings: EntryRead) -> bool:
        """Whether an entry holds all crops of an image."""
        crops = self.entries.get(embeddings.entry, {})
        return all(crops.get(crop) == embeddings.image for crop in range(embeddings.num_crops))

    def _access_row(self, access: RowAccess, *, counts: bool) -> None:
        if access.opened is not None:
            self.rows[access.row] = access.opened
        found = self.rows.get(access.row)
        if counts and access.read is not None and found != access.read:
            raise WrongRead(f"row {access.row} holds {found}, not {access.read}")
        if access.sampled is not None:
            self.rows[access.row] = access.sampled
