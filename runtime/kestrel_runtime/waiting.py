"""Who starts next among those that wait. Pure decisions: no torch, no threads, no clock.

Rules, the first that tells two sequences apart decides
  W1  Those that had started and were put back come before everybody, in the order they had started.
  W2  Priority: interactive before normal before batch. A sequence rises one level per `ageing_s` of waiting, up to
      the top, so urgent requests delay it for a bounded time.
  W3  Among tenants, the one that has been served least (start-time fair queueing). Service is counted in prompt
      positions admitted and tokens generated. Who comes back after a pause has the service of whoever is served
      then, not less: idleness earns no credit.
  W4  The order of submission.

Ageing stops at the top because W3 rules there: a tenant's backlog may be minutes old, and still another tenant's
newcomer need not wait for all of it. Nothing starves: at the top a tenant that is passed over becomes the one
served least, and within a tenant the oldest is first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from kestrel_runtime.requests import Priority
from kestrel_runtime.sequence import Sequence

_TOP = min(Priority)
_MAX_IDLE_TENANTS = 1024


class WaitingQueue:
    """Sequences without pages. A choice costs a look at each tenant, whatever the length of the queue."""

    def __init__(self, *, ageing_s: float) -> None:
        assert ageing_s > 0, "ageing takes time"
        self._ageing_s = ageing_s
        self._put_back: list[Sequence] = []
        self._tenants: dict[str, _Tenant] = {}
        self._num_waiting = 0
        self._num_pushed = 0
        # The service of the tenant chosen last, when it was chosen. It never falls.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._put_back) + self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody: first who was put back, then by tenant, priority and age."""
        yield from self._put_back
        for tenant in self._tenants.values():
            for line in tenant.lines.values():
                yield from (place.sequence for place in line)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence that has not started yet."""
        tenant = self._tenant(sequence.tenant)
        if not tenant.is_waiting:
            tenant.service = max(tenant.service, self._virtual_time)
        self._num_pushed += 1
        insort(tenant.lines[sequence.priority], _Place(sequence.clock.submitted, self._num_pushed, sequence))
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """Take in a sequence that had started before everybody who was put back earlier."""
        self._put_back.insert(0, sequence)

    def first(self, now: float) -> Sequence | None:
        """Who starts next."""
        if self._put_back:
            return self._put_back[0]
        ranks = (
            (max(priority - int((now - line[0].submitted) / self._ageing_s), _TOP), tenant.service, line[0])
            for tenant in self._tenants.values()
            for priority, line in tenant.lines.items()
            if line
        )
        best = min(ranks, default=None)
        return None if best is None else best[2].sequence

    def start(self, sequence: Sequence) -> None:
        """The sequence starts: it leaves, and its tenant has been served its prompt."""
        if sequence in self._put_back:
            self._put_back.remove(sequence)  # its prompt was counted when it started first
            return
        tenant = self._tenants[sequence.tenant]
        self._virtual_time = max(self._virtual_time, tenant.service)
        tenant.service += sequence.num_prompt_positions
        self._take_out(tenant, sequence)

    def serve(self, sequence: Sequence) -> None:
        """A token was generated for a sequence that has started."""
        self._tenant(sequence.tenant).service += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence leaves without having started again."""
        if sequence in self._put_back:
            self._put_back.remove(sequence)
        else:
            self._take_out(self._tenants[sequence.tenant], sequence)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_tenants()
            tenant = self._tenants[name] = _Tenant(self._virtual_time)
        return tenant

    def _forget_tenants(self) -> None:
        """Idle tenants that would come back with the virtual time anyway; of too many others, the least served."""
        idle = sorted((item.service, name) for name, item in self._tenants.items() if not item.is_waiting)
        for place, (service, name) in enumerate(idle):
            if service <= self._virtual_time or len(idle) - place > _MAX_IDLE_TENANTS:
                del self._tenants[name]

    def _take_out(self, tenant: _Tenant, sequence: Sequence) -> None:
        line = tenant.lines[sequence.priority]
        index = bisect_left(line, sequence.clock.submitted, key=lambda place: place.submitted)
        while line[index].sequence is not sequence:
            index += 1
        del line[index]
        self._num_waiting -= 1


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """A place in a line: no two are equal, so sequences are never compared."""

    submitted: float
    number: int
    sequence: Sequence = field(compare=False)


@dataclass(slots=True)
class _Tenant:
    """A tenant's lines, one per priority, oldest first, and the service it has had."""

    service: float
    lines: dict[Priority, list[_Place]] = field(default_factory=lambda: {priority: [] for priority in Priority})

    @property
    def is_waiting(self) -> bool:
        return any(self.lines.values())
