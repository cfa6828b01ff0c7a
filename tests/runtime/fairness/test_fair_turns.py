"""Jobs of tenants take turns in a pool of threads."""

from typing import NamedTuple

from kestrel_runtime.fairness.fair_turns import FairTurns


class Job(NamedTuple):
    tenant: str
    number: int


def turns_of(*jobs: Job, max_per_tenant: int = 2) -> FairTurns[Job]:
    turns: FairTurns[Job] = FairTurns(max_per_tenant)
    for job in jobs:
        turns.push(job)
    return turns


def test_t1_a_tenant_runs_at_most_its_part_until_a_job_of_it_ends():
    for tenant in ("a", ""):
        jobs = [Job(tenant, number) for number in range(3)]
        turns = turns_of(*jobs)
        assert [turns.start() for _ in range(3)] == [*jobs[:2], None]
        turns.end(tenant)
        assert turns.start() == jobs[2]


def test_t2_the_oldest_job_of_the_tenants_that_run_fewest_is_next():
    turns = turns_of(Job("a", 0), Job("a", 1), Job("b", 2), Job("c", 3))
    assert [turns.start() for _ in range(4)] == [Job("a", 0), Job("b", 2), Job("c", 3), Job("a", 1)]
    turns.push(Job("a", 4))
    turns.push(Job("b", 5))
    assert turns.start() == Job("b", 5)
    assert turns.start() is None


def test_a_job_that_was_removed_does_not_run():
    turns = turns_of(Job("a", 0), Job("a", 1))
    turns.remove(Job("a", 0))
    assert [turns.start(), turns.start()] == [Job("a", 1), None]
