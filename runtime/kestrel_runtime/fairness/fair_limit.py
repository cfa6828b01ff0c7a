"""Divides a fixed amount, such as open calls or bytes of images, so that no tenant takes all of it."""

from __future__ import annotations


class FairLimit:
    """Divides units between tenants, who take them and give them back, in the server and in the engine.

    Rules
      F1  At most `limit` units are taken at a time.
      F2  A named tenant may take more only while it holds less than the free units: a single tenant gets half, two
          get a third each. So a new tenant finds units however many another one wants. The tenant "" stands for
          callers that are not distinguished; it may take all.

    Belongs to one thread, or to those that hold a lock.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0
        self._taken_by: dict[str, int] = {}  # without zeros

    @property
    def is_full(self) -> bool:
        """True while all units are taken."""
        return self.num_taken >= self.limit

    def taken_by(self, tenant: str) -> int:
        """Returns the units that a tenant holds."""
        return self._taken_by.get(tenant, 0)

    def has_room(self, amount: int = 1) -> bool:
        """Returns True if F1 allows `amount` further units."""
        return self.num_taken + amount <= self.limit

    def has_share(self, tenant: str) -> bool:
        """Returns True if F2 lets a tenant take more."""
        return not tenant or self._taken_by.get(tenant, 0) < self.limit - self.num_taken

    def allows(self, tenant: str, amount: int) -> bool:
        """Returns True if the rules let a tenant take `amount` units, which may be none."""
        num_free = self.limit - self.num_taken
        return not amount or (amount <= num_free and (not tenant or self._taken_by.get(tenant, 0) < num_free))

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Takes units for a tenant. Returns False, and takes none, if a rule forbids it."""
        if not (self.has_room(amount) and self.has_share(tenant)):
            return False
        self.count(tenant, amount)
        return True

    def count(self, tenant: str, amount: int) -> None:
        """Takes units even if a rule forbids it. A negative amount gives units back."""
        taken_by = self._taken_by
        self.num_taken += amount
        held = taken_by.get(tenant, 0) + amount
        if held:
            taken_by[tenant] = held
        else:
            taken_by.pop(tenant, None)

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Gives back units that were taken for this tenant."""
        self.count(tenant, -amount)
