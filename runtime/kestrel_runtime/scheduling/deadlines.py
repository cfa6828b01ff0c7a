"""When to look at whom: moments by which something must have happened. Pure bookkeeping; no clock."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from kestrel_runtime.scheduling.sequence import Sequence


class Deadlines:
    """The deadlines of sequences, soonest first; a step looks at those that are due and at no other."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int]] = []  # a heap of (moment, sequence id)
        self._sequences: dict[int, Sequence] = {}

    def watch(self, sequence: Sequence) -> None:
        """Name the sequence once each of its deadlines is due."""
        clock = sequence.clock
        self._sequences[sequence.id] = sequence
        for moment in (clock.deadline, clock.queue_deadline):
            if moment is not None:
                heappush(self._moments, (moment, sequence.id))

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        del self._sequences[sequence.id]
        # Far deadlines of sequences long gone would pile up: a caller may set one years away.
        if len(self._moments) > 64 + 4 * len(self._sequences):
            self._moments = [item for item in self._moments if item[1] in self._sequences]
            heapify(self._moments)

    def due(self, now: float) -> Iterator[Sequence]:
        """Those with a deadline at or before `now`; a deadline is named once."""
        while self._moments and self._moments[0][0] <= now:
            sequence = self._sequences.get(heappop(self._moments)[1])
            if sequence is not None:
                yield sequence
