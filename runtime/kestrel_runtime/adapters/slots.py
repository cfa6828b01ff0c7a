"""Assigns adapters to slots: leases, and which adapter is evicted. No torch, no threads, no files.

Rules
  S1  A slot is written only while no request uses it, from `reserve` to `place` or `give_back`.
  S2  A request uses the version of an adapter that its name meant when it got its lease, until the lease ends.
  S3  A new version takes another slot than the one it replaces, unless no request uses that one. The replaced
      version leaves when its last lease ends.
  S4  Where another slot is needed, the adapter that was used longest ago is evicted, of those that no
      request uses.
  S5  Where all are in use, the one that was placed first drains: it gets no new leases, and leaves when its last
      one ends. So an adapter that is always in use does not keep others out for ever.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Residence:
    """The stay of one version of an adapter in a slot."""

    name: str
    digest: bytes
    slot: int
    number: int
    """Rises in the order in which adapters are placed."""
    last_use: int
    num_leases: int = 0
    is_current: bool = True
    """Whether new leases of the name are for it."""
    is_draining: bool = False


class AdapterSlots:
    """Slots from 1 to `num_slots`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._free = list(range(num_slots, 0, -1))
        self._residences: list[Residence] = []  # in the order of their numbers
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)

    @property
    def residences(self) -> tuple[Residence, ...]:
        """All, in the order in which they were placed."""
        return tuple(self._residences)

    def current(self, name: str) -> Residence | None:
        """The version that new leases of a name are for; None where there is none, or it drains."""
        found = (item for item in self._residences if item.is_current and item.name == name)
        return next((item for item in found if not item.is_draining), None)

    def lease(self, residence: Residence) -> None:
        """One more request uses it."""
        assert residence.is_current
        assert not residence.is_draining
        residence.num_leases += 1
        residence.last_use = next(self._uses)

    def end_lease(self, residence: Residence) -> None:
        """A request is over."""
        residence.num_leases -= 1
        assert residence.num_leases >= 0
        if not residence.num_leases and (residence.is_draining or not residence.is_current):
            self._leave(residence)

    def reserve(self) -> int | None:
        """A slot to write, or None, and then one becomes free when leases end."""
        if not self._free:
            idle = [item for item in self._residences if not item.num_leases]
            if idle:
                self._leave(min(idle, key=lambda item: item.last_use))
                self.num_evictions += 1
            elif self._residences and not any(item.is_draining or not item.is_current for item in self._residences):
                self._residences[0].is_draining = True
                self.num_evictions += 1
        return self._free.pop() if self._free else None

    def stop_draining(self) -> None:
        """No further slot is needed any more."""
        for item in self._residences:
            if item.is_draining and item.is_current:
                item.is_draining = False
                self.num_evictions -= 1

    def give_back(self, slot: int) -> None:
        """A reserved slot is not needed."""
        self._free.append(slot)

    def place(self, slot: int, name: str, digest: bytes) -> Residence:
        """A reserved slot has been written. The version that the name meant before is retired."""
        self.retire(name)
        residence = Residence(name, digest, slot, next(self._numbers), next(self._uses))
        self._residences.append(residence)
        return residence

    def retire(self, name: str) -> Residence | None:
        """No new leases of a name: its version leaves now, or when its last lease ends. Returns that version."""
        residence = next((item for item in self._residences if item.is_current and item.name == name), None)
        if residence is not None:
            residence.is_current = False
            if not residence.num_leases:
                self._leave(residence)
        return residence

    def _leave(self, residence: Residence) -> None:
        self._residences.remove(residence)
        self._free.append(residence.slot)
