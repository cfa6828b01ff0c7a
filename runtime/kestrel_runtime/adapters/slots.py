"""Assigns adapters to slots: leases, and which adapter is evicted. No torch, no threads, no files.

Rules
  S1  A slot is written only while no request uses it, from `reserve` to `place` or `give_back`.
  S2  A request uses the version of an adapter that its name meant when it got its lease, until the lease ends.
  S3  A new version takes another slot than the one it replaces, unless no request uses that one. The replaced
      version leaves when its last lease ends.
  S4  If another slot is needed, an adapter that no request uses is evicted: the least recently used adapter of the
      tenant that holds the most slots. A tenant holds the slots that its requests use, and the slots without
      requests that it used last.
  S5  If all slots are in use, one adapter drains: the adapter that was placed first, of the tenant that holds the
      most slots. A draining adapter gets no new leases, and leaves when its last lease ends. So an adapter that is
      always in use does not keep others out for ever.
  S6  If the tenant that needs the slot then holds no more slots than the tenant that loses it, the leases of the
      draining adapter are taken back before they end. Leases of a replaced version are not taken back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Residence:
    """The stay of one version of an adapter in a slot."""

    name: str
    digest: bytes
    slot: int
    number: int
    """Rises in the order in which adapters are placed."""
    last_use: int
    last_tenant: str
    """The tenant of the request that used this version last, or had it loaded."""
    leases: Counter[str] = field(default_factory=Counter[str])
    """The number of requests that use this version, by tenant; without zeros."""
    is_current: bool = True
    """True while new leases of the name are for this version."""
    is_draining: bool = False
    is_reclaimed: bool = False
    """True if requests that use this version have to give their leases back."""

    @property
    def num_leases(self) -> int:
        return self.leases.total()


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
        """Returns all residences, in the order in which they were placed."""
        return tuple(self._residences)

    def current(self, name: str) -> Residence | None:
        """Returns the version for new leases of a name; None if there is none, or if it drains."""
        found = (item for item in self._residences if item.is_current and item.name == name)
        return next((item for item in found if not item.is_draining), None)

    def num_held_by(self, tenant: str) -> int:
        """Returns how many slots a tenant holds."""
        return self._held()[tenant]

    def lease(self, residence: Residence, tenant: str = "") -> None:
        """Counts one more request of a tenant that uses this version."""
        assert residence.is_current
        assert not residence.is_draining
        residence.leases[tenant] += 1
        residence.last_use, residence.last_tenant = next(self._uses), tenant

    def end_lease(self, residence: Residence, tenant: str = "") -> None:
        """Ends the lease of a request of a tenant."""
        residence.leases[tenant] -= 1
        assert residence.leases[tenant] >= 0
        if not residence.leases[tenant]:
            del residence.leases[tenant]
        if not residence.num_leases and (residence.is_draining or not residence.is_current):
            self._leave(residence)

    def reserve(self, tenant: str = "") -> int | None:
        """Returns a slot to write for a tenant, or None; after None a slot becomes free when leases end."""
        if not self._free:
            idle = [item for item in self._residences if not item.leases]
            held = self._held()
            if idle:
                self._leave(min(idle, key=lambda item: (-held[item.last_tenant], item.last_use)))
                self.num_evictions += 1
            elif self._residences:
                self._drain_one(tenant, held)
        return self._free.pop() if self._free else None

    def stop_draining(self) -> None:
        """Keeps draining adapters in their slots, since no further slot is needed."""
        for item in self._residences:
            if item.is_draining and item.is_current:
                item.is_draining = item.is_reclaimed = False
                self.num_evictions -= 1

    def give_back(self, slot: int) -> None:
        """Gives a reserved slot back unused."""
        self._free.append(slot)

    def place(self, slot: int, name: str, digest: bytes, tenant: str = "") -> Residence:
        """Records the residence in a reserved slot that was written for a tenant; retires the version before it."""
        self.retire(name)
        residence = Residence(name, digest, slot, next(self._numbers), next(self._uses), tenant)
        self._residences.append(residence)
        return residence

    def retire(self, name: str) -> Residence | None:
        """Gives no new leases of a name. Its version, which is returned, leaves now or when its last lease ends."""
        residence = next((item for item in self._residences if item.is_current and item.name == name), None)
        if residence is not None:
            residence.is_current = False
            if not residence.num_leases:
                self._leave(residence)
        return residence

    def _drain_one(self, tenant: str, held: Counter[str]) -> None:
        """Chooses an adapter to leave, unless one is draining already. All slots are in use."""
        if any(item.is_reclaimed for item in self._residences):
            return
        # If several tenants use an adapter, the tenant that holds the fewest slots counts.
        least = {item.slot: min(held[user] for user in item.leases) for item in self._residences}
        by_share = sorted(self._residences, key=lambda item: (not item.is_draining, -least[item.slot]))
        found = [item for item in by_share if item.is_current and least[item.slot] >= held[tenant] + 2]
        if found:
            found[0].is_reclaimed = True
        elif any(item.is_draining or not item.is_current for item in self._residences):
            return
        item = (found or by_share)[0]
        self.num_evictions += not item.is_draining
        item.is_draining = True

    def _held(self) -> Counter[str]:
        return Counter(tenant for item in self._residences for tenant in (item.leases or (item.last_tenant,)))

    def _leave(self, residence: Residence) -> None:
        self._residences.remove(residence)
        self._free.append(residence.slot)
