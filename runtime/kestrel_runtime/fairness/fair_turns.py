"""Decides which waiting job a pool of threads runs next, so that no tenant occupies all threads."""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar


class TenantJob(Protocol):
    """Represents a job of a tenant."""

    @property
    def tenant(self) -> str:
        """The tenant of the job; "" if tenants are not distinguished."""
        ...


Job = TypeVar("Job", bound=TenantJob)


class FairTurns(Generic[Job]):
    """Holds waiting jobs, and counts running jobs by tenant.

    Rules
      T1  A tenant, also the tenant "", runs at most `max_per_tenant` jobs at a time.
      T2  The next job is the oldest of the jobs whose tenants run fewest.

    Belongs to one thread, or to threads that hold a lock.
    """

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._waiting: list[Job] = []
        self._num_running: Counter[str] = Counter()  # without zeros

    def push(self, job: Job) -> None:
        """Adds a job that waits."""
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Removes a job that waits."""
        self._waiting.remove(job)

    def start(self) -> Job | None:
        """Counts the next job as running and returns it; None if no tenant with a waiting job may run another."""
        job = min(self._waiting, key=lambda job: self._num_running[job.tenant], default=None)
        if job is None or self._num_running[job.tenant] >= self._max_per_tenant:
            return None
        self._waiting.remove(job)
        self._num_running[job.tenant] += 1
        return job

    def end(self, tenant: str) -> None:
        """Stops counting a job of this tenant as running."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
