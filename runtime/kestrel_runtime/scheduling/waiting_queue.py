"""Which waiting item starts next. Pure decisions: no torch, no threads, no clock.

Rules, in this order: the first on which two items differ decides
  W1  Preempted items come first, in the order in which they had started.
  W2  Priority: interactive before normal before batch. An item rises one level per `ageing_s` of waiting, up to
      the top, so urgent requests delay it for a bounded time.
      Between tenants, an item has the level of the most urgent waiting item of equal or lower priority, so a
      tenant with a long backlog gains nothing from the age of its items.
  W3  Among tenants, the one that has been served least (start-time fair queueing). Service is the cost
      of the items started plus the tokens generated. A tenant that returns after a pause starts with the service
      of the tenant that is served then: idle time earns no credit.
  W4  The order of submission.

No item starves: at the highest level a tenant that is not served becomes the one served least, and within a tenant
the oldest item is first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kestrel_runtime.api.requests import Priority

# Priorities are compared as integers, which is several times faster than as enum members.
_TOP, _LAST, _NUM_PRIORITIES = int(min(Priority)), int(max(Priority)), len(Priority)
_MAX_IDLE_TENANTS = 1024


class Waiter(Protocol):
    """What can wait here: sequences for pages, requests for a preprocessing worker."""

    @property
    def tenant(self) -> str:
        """The tenant it belongs to; "" where tenants are not distinguished."""
        ...

    @property
    def priority(self) -> Priority: ...

    @property
    def submitted(self) -> float:
        """When its request arrived, in seconds of a monotonic clock."""
        ...

    @property
    def cost(self) -> int:
        """How much service its start counts as, in a unit that all items of the queue share."""
        ...


Item = TypeVar("Item", bound=Waiter)


class WaitingQueue(Generic[Item]):
    """Items that have not started. Choosing one takes time linear in the number of tenants, not of items."""

    def __init__(self, *, ageing_s: float) -> None:
        assert ageing_s > 0, "ageing takes time"
        self._ageing_s = ageing_s
        self._preempted: list[Item] = []
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._num_waiting = 0
        self._num_pushed = 0
        # The service of the tenant chosen last, when it was chosen. It never falls.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._preempted) + self._num_waiting

    def __iter__(self) -> Iterator[Item]:
        """All items: preempted ones first, then by tenant, priority and age."""
        yield from self._preempted
        for tenant in self._tenants.values():
            for line in tenant.lines:
                yield from (place.item for place in line)

    def push(self, item: Item) -> None:
        """Add an item that has not started yet."""
        tenant = self._tenant(item.tenant)
        if not tenant.is_waiting:
            tenant.service = max(tenant.service, self._virtual_time)
        self._num_pushed += 1
        insort(tenant.lines[item.priority], _Place(item.submitted, self._num_pushed, item))
        self._num_waiting += 1

    def push_preempted(self, item: Item) -> None:
        """Add an item that has started before; it must have started before all preempted items in the queue."""
        self._preempted.insert(0, item)

    def push_parked(self, item: Item) -> None:
        """Add an item that was parked after it was its turn to start: it comes behind preempted ones."""
        self._preempted.append(item)

    def first(self, now: float, may_start: Callable[[Item], bool] | None = None) -> Item | None:
        """The item that starts next, or None. With `may_start`, the first item for which it returns True."""
        if may_start is None and self._preempted:
            return self._preempted[0]
        for item in self._preempted:
            if may_start is not None and may_start(item):
                return item
        heads: list[tuple[int, float, int, _Place[Item]]] = []
        levels = [_LAST] * _NUM_PRIORITIES  # the most urgent of each priority, then of it and all lower ones
        for tenant in self._tenants.values():
            for priority, line in enumerate(tenant.lines):
                if not line:
                    continue
                place = line[0] if may_start is None else _first_in(line, may_start)
                if place is None:
                    continue
                level = priority - int((now - place.submitted) / self._ageing_s)
                if level < _TOP:
                    level = _TOP
                if level < levels[priority]:
                    levels[priority] = level
                heads.append((priority, tenant.service, level, place))
        if not heads:
            return None
        for priority in range(_LAST, _TOP, -1):
            levels[priority - 1] = min(levels[priority - 1], levels[priority])
        best = min((levels[priority], service, level, place) for priority, service, level, place in heads)
        return best[3].item

    def start(self, item: Item) -> None:
        """The item starts: it leaves the queue, and its cost is added to its tenant's service."""
        if item in self._preempted:
            self._preempted.remove(item)  # its cost was counted when it first started
            return
        tenant = self._tenants[item.tenant]
        self._virtual_time = max(self._virtual_time, tenant.service)
        tenant.service += item.cost
        self._take_out(tenant, item)

    def serve(self, item: Item) -> None:
        """Count a token generated for an item that has started."""
        self._tenant(item.tenant).service += 1

    def remove(self, item: Item) -> None:
        """The item leaves the queue without starting."""
        if item in self._preempted:
            self._preempted.remove(item)
        else:
            self._take_out(self._tenants[item.tenant], item)

    def _tenant(self, name: str) -> _Tenant[Item]:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_tenants()
            tenant = self._tenants[name] = _Tenant(self._virtual_time)
        return tenant

    def _forget_tenants(self) -> None:
        """Drop idle tenants whose service is at most the virtual time; beyond a limit, also the least served."""
        idle = sorted((item.service, name) for name, item in self._tenants.items() if not item.is_waiting)
        for place, (service, name) in enumerate(idle):
            if service <= self._virtual_time or len(idle) - place > _MAX_IDLE_TENANTS:
                del self._tenants[name]

    def _take_out(self, tenant: _Tenant[Item], item: Item) -> None:
        line = tenant.lines[item.priority]
        index = bisect_left(line, item.submitted, key=lambda place: place.submitted)
        while line[index].item is not item:
            index += 1
        del line[index]
        self._num_waiting -= 1


@dataclass(frozen=True, slots=True, order=True)
class _Place(Generic[Item]):
    """A position in a tenant's line. No two are equal, so items are never compared."""

    submitted: float
    number: int
    item: Item = field(compare=False)


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    """A tenant's lines, one per priority, oldest first, and the service it has had."""

    service: float
    lines: list[list[_Place[Item]]] = field(default_factory=lambda: [[] for _ in Priority])

    @property
    def is_waiting(self) -> bool:
        return any(self.lines)


def _first_in(line: list[_Place[Item]], may_start: Callable[[Item], bool]) -> _Place[Item] | None:
    return next((place for place in line if may_start(place.item)), None)
