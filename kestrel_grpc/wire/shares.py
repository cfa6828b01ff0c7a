"""Divides a fixed number of units, such as open calls, fairly among tenants."""

from __future__ import annotations

from collections import Counter


class Shares:
    """At most `limit` units are taken at a time.

    A named tenant may take one more only while it has fewer than are free: alone it gets half, two get a third
    each. So one tenant can never take all units. The tenant "" stands for all callers without a token, which may
    take all. Belongs to one thread.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_taken = 0
        self._taken_by: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether all units are taken."""
        return self._num_taken >= self.limit

    def take(self, tenant: str) -> bool:
        """Take one for a tenant; False where it may not have one."""
        num_free = self.limit - self._num_taken
        if num_free <= 0 or (tenant and self._taken_by[tenant] >= num_free):
            return False
        self._num_taken += 1
        if tenant:
            self._taken_by[tenant] += 1
        return True

    def give_back(self, tenant: str) -> None:
        """Give back one that was taken for this tenant."""
        self._num_taken -= 1
        if tenant:
            self._taken_by[tenant] -= 1
            if not self._taken_by[tenant]:
                del self._taken_by[tenant]
