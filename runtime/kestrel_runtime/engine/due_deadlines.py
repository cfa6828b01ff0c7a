"""Finds the requests whose deadline has passed. `engine/loop.py` ends them, once a turn."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from kestrel_runtime.scheduling.sequence import TokenSequence


class Deadlines:
    """Holds the deadlines of sequences, the soonest first."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int]] = []  # a heap of (moment, sequence id)
        self._sequences: dict[int, TokenSequence] = {}

    def watch(self, sequence: TokenSequence) -> None:
        """Has `due` yield the sequence once for each of its deadlines."""
        clock = sequence.clock
        self._sequences[sequence.id] = sequence
        for moment in (clock.deadline, clock.queue_deadline):
            if moment is not None:
                heappush(self._moments, (moment, sequence.id))

    def forget(self, sequence: TokenSequence) -> None:
        """Removes a sequence that has ended: `due` no longer yields it."""
        del self._sequences[sequence.id]
        # Else distant deadlines of ended sequences would accumulate: a caller may set one years ahead.
        if len(self._moments) > 64 + 4 * len(self._sequences):
            self._moments = [item for item in self._moments if item[1] in self._sequences]
            heapify(self._moments)

    def due(self, now: float) -> Iterator[TokenSequence]:
        """Yields the sequences with a deadline at or before `now`, once for each deadline."""
        while self._moments and self._moments[0][0] <= now:
            sequence = self._sequences.get(heappop(self._moments)[1])
            if sequence is not None:
                yield sequence
