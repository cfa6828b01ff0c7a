"""Decides which waiting item starts next. Uses no torch, threads or clock.

Rules
  W1  Each tenant has an order of its own. Items that return are first: preempted ones in the order in which they
      had started, then those that were parked. The others follow by priority, interactive before normal before
      batch, then by age. An item rises one level per `ageing_s` of waiting, up to the top, so urgent requests delay
      it for a bounded time.
  W2  Between tenants the first item of each is compared, by its standing: its priority, or the highest that its
      tenant may have between tenants if that is lower. It rises with age as in W1. An item has the level of the
      most urgent first item of equal or lower standing, so a tenant with a long backlog gains nothing from the age
      of its items.
  W3  Of those with equal levels, the item of the tenant that holds the smallest share of the running batch, if the
      caller passes the shares; then of the tenant that has been served least (start-time fair queueing). Service is
      the cost of the items started plus the tokens generated. A tenant that returns after a pause starts with the
      service of the tenant that is served then: idle time earns no credit.
  W4  The order of submission.

No item starves: at the highest level a tenant that is not served becomes the one that holds and was served least,
and within a tenant the oldest item is first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from kestrel_runtime.api.requests import Priority

# Priorities are compared as integers, which is several times faster than as enum members.
_TOP, _LAST, _NUM_PRIORITIES = int(min(Priority)), int(max(Priority)), len(Priority)
_MAX_IDLE_TENANTS = 1024


class Waiter(Protocol):
    """An item of the queue: a sequence that waits for pages, or a request that waits for a preprocessing worker."""

    @property
    def tenant(self) -> str:
        """The tenant of the item; "" if tenants are not distinguished."""
        ...

    @property
    def priority(self) -> Priority:
        """The priority among the items of the tenant."""
        ...

    @property
    def standing(self) -> Priority:
        """The priority among the items of all tenants."""
        ...

    @property
    def submitted(self) -> float:
        """The arrival of the request, in seconds of a monotonic clock."""
        ...

    @property
    def cost(self) -> int:
        """The service that the start counts as, in the same unit for all items of the queue."""
        ...


Item = TypeVar("Item", bound=Waiter)


class WaitingQueue(Generic[Item]):
    """Items that have not started. Choosing one takes time linear in the number of tenants, not of items."""

    def __init__(self, *, ageing_s: float) -> None:
        assert ageing_s > 0, "ageing takes time"
        self._ageing_s = ageing_s
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._num_waiting = 0
        self._num_pushed = 0
        # The service of the tenant chosen last, when it was chosen. It never falls.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def has_one_tenant(self) -> bool:
        """True if no more than one tenant has been seen lately, waiting or served."""
        return len(self._tenants) <= 1

    def __iter__(self) -> Iterator[Item]:
        """Yields all items by tenant: those that return, then the others by priority and age."""
        for tenant in self._tenants.values():
            yield from (position.item for position in tenant.returning)
            for line in tenant.lines:
                yield from (position.item for position in line)

    def push(self, item: Item) -> None:
        """Adds an item that has not started yet."""
        tenant = self._tenant(item.tenant)
        if not tenant.is_waiting:
            tenant.service = max(tenant.service, self._virtual_time)
        self._add(tenant.lines[item.priority], item, item.submitted)

    def push_returning(self, item: Item, start_number: int | None) -> None:
        """Adds an item that has started before, or was parked when it was its turn.

        `start_number` rises in the order in which items start; None for an item that has not started.
        """
        order = float("inf") if start_number is None else float(start_number)
        self._add(self._tenant(item.tenant).returning, item, order)

    def first(
        self,
        now: float,
        shares: Callable[[], Callable[[str], float]] | None = None,
        *,
        may_start: Callable[[Item], bool] | None = None,
    ) -> Item | None:
        """Returns the item that starts next, or None.

        `shares` makes a function that returns the share of a tenant (W3); it is called if several tenants wait.
        With `may_start`, only an item for which it returns True is returned.
        """
        if not self._num_waiting:
            return None
        if self.has_one_tenant:
            for tenant in self._tenants.values():
                position = self._first_of(tenant, now, may_start)
                return None if position is None else position.item
            return None
        heads: list[tuple[int, int, _Tenant[Item], _Position[Item]]] = []
        levels = [_LAST] * _NUM_PRIORITIES  # the most urgent of each standing, then of it and all lower ones
        for tenant in self._tenants.values():
            position = self._first_of(tenant, now, may_start)
            if position is None:
                continue
            standing = int(position.item.standing)
            level = self._level(standing, position.item, now)
            if level < levels[standing]:
                levels[standing] = level
            heads.append((standing, level, tenant, position))
        if len(heads) < 2:
            return heads[0][3].item if heads else None
        share_of = None if shares is None else shares()
        for standing in range(_LAST, _TOP, -1):
            levels[standing - 1] = min(levels[standing - 1], levels[standing])
        best = min(
            (
                levels[standing],
                0.0 if share_of is None else share_of(position.item.tenant),
                tenant.service,
                level,
                position.item.submitted,
                position.number,
                position,
            )
            for standing, level, tenant, position in heads
        )
        return best[-1].item

    def start(self, item: Item) -> None:
        """Removes an item that starts, and adds its cost to its tenant's service."""
        tenant = self._tenants[item.tenant]
        if not self._take_out(tenant, item):  # the cost of one that returns was counted when it started first
            self._virtual_time = max(self._virtual_time, tenant.service)
            tenant.service += item.cost

    def serve(self, items: Iterable[Item]) -> None:
        """Counts a token generated for each of these items, which have started."""
        name = tenant = None
        for item in items:
            if tenant is None or item.tenant != name:
                name = item.tenant
                tenant = self._tenants.get(name) or self._tenant(name)
            tenant.service += 1

    def service_of(self, tenant: str) -> float:
        """Returns the service of a tenant, as if it began to wait now."""
        known = self._tenants.get(tenant)
        return self._virtual_time if known is None else known.service

    def remove(self, item: Item) -> None:
        """Removes an item that does not start."""
        self._take_out(self._tenants[item.tenant], item)

    def _first_of(
        self, tenant: _Tenant[Item], now: float, may_start: Callable[[Item], bool] | None
    ) -> _Position[Item] | None:
        first = _first_in(tenant.returning, may_start)
        if first is not None:
            return first
        lines = [(priority, line) for priority, line in enumerate(tenant.lines) if line]
        if len(lines) == 1:
            return _first_in(lines[0][1], may_start)
        first_level = _LAST
        for priority, line in lines:
            position = _first_in(line, may_start)
            if position is None:
                continue
            level = self._level(priority, position.item, now)
            if first is None or (level, position) < (first_level, first):
                first, first_level = position, level
        return first

    def _level(self, priority: int, item: Item, now: float) -> int:
        level = priority - int((now - item.submitted) / self._ageing_s)
        return level if level > _TOP else _TOP

    def _tenant(self, name: str) -> _Tenant[Item]:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_tenants()
            tenant = self._tenants[name] = _Tenant(self._virtual_time)
        return tenant

    def _forget_tenants(self) -> None:
        """Drops idle tenants whose service is at most the virtual time; beyond a limit, also the least served."""
        idle = sorted((item.service, name) for name, item in self._tenants.items() if not item.is_waiting)
        for index, (service, name) in enumerate(idle):
            if service <= self._virtual_time or len(idle) - index > _MAX_IDLE_TENANTS:
                del self._tenants[name]

    def _add(self, line: list[_Position[Item]], item: Item, order: float) -> None:
        self._num_pushed += 1
        insort(line, _Position(order, self._num_pushed, item))
        self._num_waiting += 1

    def _take_out(self, tenant: _Tenant[Item], item: Item) -> bool:
        """Removes an item from its line. Returns True if it was one that returns."""
        self._num_waiting -= 1
        for index, position in enumerate(tenant.returning):
            if position.item is item:
                del tenant.returning[index]
                return True
        line = tenant.lines[item.priority]
        index = bisect_left(line, _Position(item.submitted, 0, item))
        while line[index].item is not item:
            index += 1
        del line[index]
        return False


class _Position(Struct, Generic[Item], order=True):
    """A position in a tenant's line: by arrival or, for items that return, by start.

    Numbers begin with 1, and no two positions have the same, so that items themselves are never compared.
    """

    order: float
    number: int
    item: Item


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    """The state of a tenant: its items that return, its lines (one per priority, oldest first), and its service."""

    service: float
    returning: list[_Position[Item]] = field(default_factory=list)
    lines: list[list[_Position[Item]]] = field(default_factory=lambda: [[] for _ in Priority])

    @property
    def is_waiting(self) -> bool:
        return bool(self.returning) or any(self.lines)


def _first_in(line: list[_Position[Item]], may_start: Callable[[Item], bool] | None) -> _Position[Item] | None:
    if may_start is None or not line:
        return line[0] if line else None
    return next((position for position in line if may_start(position.item)), None)
