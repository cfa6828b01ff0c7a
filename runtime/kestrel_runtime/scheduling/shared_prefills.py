"""Sequences that wait until another one has computed the prefix that they share. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterator

from kestrel_runtime.scheduling.prefix_keys import Digest
from kestrel_runtime.scheduling.sequence import Sequence


class SharedPrefills:
    """Which sequence computes which prefix, and which ones are parked until it is published or its filler leaves.

    A sequence fills one key at most, and is parked under one key at most.
    """

    def __init__(self) -> None:
        self._key_of: dict[Sequence, Digest] = {}  # of the fillers
        self._parked: dict[Digest, list[Sequence]] = {}  # in the order of parking; a key for each filler

    def __len__(self) -> int:
        return sum(map(len, self._parked.values())) if self._parked else 0

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._parked.values():
            yield from sequences

    def is_filled(self, key: Digest) -> bool:
        """Whether a sequence computes what the key names."""
        return key in self._parked

    def begin(self, key: Digest, filler: Sequence) -> None:
        """The sequence computes what the key names from now on; without effect where another one does."""
        if key not in self._parked:
            self._key_of[filler] = key
            self._parked[key] = []

    def park(self, key: Digest, sequence: Sequence) -> None:
        """Have a sequence wait for the filler of the key."""
        self._parked[key].append(sequence)

    def end(self, filler: Sequence) -> list[Sequence]:
        """The sequence has published what it fills, or leaves; who waited for it. Without effect for others."""
        key = self._key_of.pop(filler, None)
        return [] if key is None else self._parked.pop(key)

    def remove(self, sequence: Sequence) -> None:
        """A parked sequence leaves."""
        for sequences in self._parked.values():
            if sequence in sequences:
                sequences.remove(sequence)
                return
