"""J1 to J5 are the rules in the docstring of `kestrel_runtime.engine.workers`."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.engine.workers import Interrupted, Job, Workers
from kestrel_runtime.fairness.image_budget import MemoryBudget

MAX_WAIT_S = 30
MIB = 2**20


class Held:
    """What a job leaves behind, which takes memory."""


class Pool:
    """Workers, whose jobs wait until they are let go, and the order in which these began."""

    def __init__(self, num_threads: int, limit_bytes: int = 1000 * MIB) -> None:
        self.budget = MemoryBudget(limit_bytes)
        self.workers = Workers(num_threads, "test", self.budget)
        self.began: list[str] = []
        self._may_end: dict[str, threading.Event] = {}
        self._change = threading.Condition()
        self._num_submitted = 0
        self._opened = time.monotonic()

    def submit(
        self,
        name: str,
        num_bytes: int = 0,
        *,
        tenant: str = "",
        priority: Priority = Priority.NORMAL,
        compiles: bool = False,
    ) -> Future[str]:
        """A job that begins when it may and ends when `end` says so."""
        may_end = self._may_end[name] = threading.Event()
        self._num_submitted += 1

        def work() -> str:
            with self._change:
                self.began.append(name)
                self._change.notify_all()
            assert may_end.wait(MAX_WAIT_S)
            return name

        submitted = self._opened + self._num_submitted / 1000
        return self.workers.submit(Job(work, submitted, priority, tenant, num_bytes, compiles=compiles))

    def wait_for(self, *names: str) -> None:
        """Return once these have begun."""
        with self._change:
            assert self._change.wait_for(lambda: set(names) <= set(self.began), MAX_WAIT_S), self.began

    def end(self, *names: str) -> None:
        """Let jobs end, whether they have begun or will."""
        for name in names:
            self._may_end[name].set()

    def settle(self) -> None:
        """Return once a job that needs nothing has begun and ended: whatever could begin before it has."""
        probe = f"probe {self._num_submitted}"
        future = self.submit(probe, priority=Priority.BATCH)
        self.end(probe)
        future.result(MAX_WAIT_S)
        self.began.remove(probe)

    def close(self) -> None:
        self.end(*self._may_end)
        self.workers.close()


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


def pool_of(pools: list[Pool], num_threads: int, limit_bytes: int = 1000 * MIB) -> Pool:
    pools.append(Pool(num_threads, limit_bytes))
    return pools[-1]


def result_of(workers: Workers, work: Any) -> Any:
    return workers.submit(Job(work, 0.0)).result(MAX_WAIT_S)


def test_a_result_or_an_error_comes_back(pools: list[Pool]) -> None:
    workers = pool_of(pools, 1).workers
    assert result_of(workers, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        result_of(workers, lambda: 1 / 0)


def test_the_rest_of_a_job_runs_behind_its_result_and_may_fail(pools: list[Pool]) -> None:
    workers, may_end, order = pool_of(pools, 1).workers, threading.Event(), list[str]()

    def rest(result: str) -> None:
        order.append(result)
        raise ValueError(result)

    future = workers.submit(Job(lambda: str(may_end.wait(MAX_WAIT_S)), 0.0, then=rest))
    future.add_done_callback(lambda _: order.append("result"))
    may_end.set()
    assert result_of(workers, lambda: list(order)) == ["result", "True"]


def test_nothing_of_a_job_waits_for_the_garbage_collector(pools: list[Pool]) -> None:
    workers = pool_of(pools, 1).workers
    gc.collect()
    gc.disable()
    try:
        image, broken = Held(), Held()
        gone = weakref.ref(image), weakref.ref(broken)
        result_of(workers, lambda image=image: image and None)
        with pytest.raises(ZeroDivisionError):
            result_of(workers, lambda broken=broken: 1 / (0 if broken else 1))
        del image, broken
        result_of(workers, lambda: None)
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_j1_the_most_urgent_goes_first_and_of_equals_who_came_first(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    pool.submit("busy")
    pool.wait_for("busy")
    futures = [
        pool.submit("late", priority=Priority.BATCH),
        pool.submit("soon"),
        pool.submit("later", priority=Priority.BATCH),
        pool.submit("now", priority=Priority.INTERACTIVE),
    ]
    pool.end("busy", "late", "soon", "later", "now")
    for future in futures:
        future.result(MAX_WAIT_S)
    assert pool.began == ["busy", "now", "soon", "late", "later"]


def test_j1_tenants_take_turns_by_the_bytes_that_they_need(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    pool.submit("busy")
    pool.wait_for("busy")
    flood = [pool.submit(f"flood {number}", 100 * MIB, tenant="flood") for number in range(4)]
    modest = [pool.submit(f"modest {number}", 50 * MIB, tenant="modest") for number in range(4)]
    pool.end("busy", *(f"{name} {number}" for name in ("flood", "modest") for number in range(4)))
    for future in (*flood, *modest):
        future.result(MAX_WAIT_S)
    assert [name.split()[0] for name in pool.began[1:7]].count("modest") == 4


def test_j2_jobs_wait_for_the_memory_that_others_have_taken(pools: list[Pool]) -> None:
    pool = pool_of(pools, 3, 100)
    pool.submit("first", 60)
    second = pool.submit("second", 60)
    pool.wait_for("first")
    pool.settle()
    assert pool.began == ["first"]
    assert pool.budget.used_bytes == 60
    pool.end("first", "second")
    assert second.result(MAX_WAIT_S) == "second"


def test_j2_jobs_wait_for_the_memory_of_what_earlier_ones_left_behind(pools: list[Pool]) -> None:
    pool = pool_of(pools, 2, 100)
    kept: list[Held] = []

    def leave_much() -> None:
        kept.append(Held())
        pool.budget.hold("", kept[0], 80)

    pool.workers.submit(Job(leave_much, 0.0, num_bytes=90)).result(MAX_WAIT_S)
    waiting = pool.submit("waiting", 30)
    pool.settle()
    assert pool.began == []
    kept.clear()
    pool.end("waiting")
    assert waiting.result(MAX_WAIT_S) == "waiting"


def test_j2_a_small_job_passes_one_that_waits_for_memory_and_leaves_it_its_room(pools: list[Pool]) -> None:
    pool = pool_of(pools, 5, 100)
    pool.submit("running", 60)
    pool.wait_for("running")
    pool.submit("large", 70)
    pool.submit("too much", 40)  # fits beside what runs, and not beside the one that waits
    pool.submit("small", 20)
    pool.submit("smaller", 15)  # neither, now that the small one is there
    pool.submit("text")
    pool.wait_for("small", "text")
    pool.settle()
    assert sorted(pool.began) == ["running", "small", "text"]
    pool.end("running")
    pool.wait_for("large")
    pool.settle()
    assert sorted(pool.began) == ["large", "running", "small", "text"]
    pool.end("large")
    pool.wait_for("too much", "smaller")


def test_j2_a_run_of_small_jobs_does_not_starve_a_large_one(pools: list[Pool]) -> None:
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet in every state of the pool
    try:
        for _ in range(200):
            pool = pool_of(pools, 3, 100)
            pool.submit("small 0", 40)
            pool.wait_for("small 0")
            large = pool.submit("large", 80)
            for number in range(1, 20):
                pool.submit(f"small {number}", 40)
            pool.end(*(f"small {number}" for number in range(20)), "large")
            assert large.result(MAX_WAIT_S) == "large"
            assert pool.began[:2] == ["small 0", "large"]
            pool.close()
    finally:
        sys.setswitchinterval(switch_interval_s)


def test_j2_a_tenant_at_its_share_delays_no_other_tenant(pools: list[Pool]) -> None:
    pool = pool_of(pools, 4, 100)
    kept = Held()
    pool.budget.hold("flood", kept, 55)
    pool.submit("flood", 40, tenant="flood", priority=Priority.INTERACTIVE)
    modest = pool.submit("modest", 40, tenant="modest")
    pool.end("modest")
    modest.result(MAX_WAIT_S)
    assert pool.began == ["modest"]
    del kept
    pool.wait_for("flood")


def test_j3_large_jobs_leave_a_thread_to_small_ones(pools: list[Pool]) -> None:
    pool = pool_of(pools, 3)
    for number in range(3):
        pool.submit(f"large {number}", 200 * MIB)
    pool.wait_for("large 0", "large 1")
    small = pool.submit("small", 10 * MIB)
    pool.end("small")
    assert small.result(MAX_WAIT_S) == "small"
    assert "large 2" not in pool.began
    pool.end("large 0")
    pool.wait_for("large 2")


def test_j3_a_single_thread_does_large_jobs_too(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    large = pool.submit("large", 200 * MIB)
    pool.end("large")
    assert large.result(MAX_WAIT_S) == "large"


def test_j5_jobs_of_a_tenant_that_compile_leave_half_of_the_threads_to_others(pools: list[Pool]) -> None:
    pool = pool_of(pools, 5)
    for number in range(4):
        pool.submit(f"compile {number}", tenant="mallory", compiles=True)
    pool.wait_for("compile 0", "compile 1")
    pool.submit("plain", tenant="mallory")
    pool.submit("compile", tenant="alice", compiles=True)
    pool.wait_for("plain", "compile")
    pool.settle()
    assert not {"compile 2", "compile 3"} & {*pool.began}
    pool.end("compile 1")
    pool.wait_for("compile 2")
    pool.end("compile 0", "compile 2")
    pool.wait_for("compile 3")


def test_j5_a_single_thread_compiles_too(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    compiled = pool.submit("compile", compiles=True)
    pool.end("compile")
    assert compiled.result(MAX_WAIT_S) == "compile"


def test_a_cancelled_job_is_not_run_is_forgotten_and_delays_no_other(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    pool.submit("busy")
    pool.wait_for("busy")
    image = Held()
    gone = weakref.ref(image)
    unwanted = pool.workers.submit(Job(lambda image=image: image, 0.0))
    del image
    wanted = pool.submit("wanted")
    assert unwanted.cancel()
    assert gone() is None
    pool.end("busy", "wanted")
    assert wanted.result(MAX_WAIT_S) == "wanted"


def test_cancelling_a_job_that_waits_for_memory_lets_the_next_one_start(pools: list[Pool]) -> None:
    pool = pool_of(pools, 3, 100)
    pool.submit("running", 60)
    pool.wait_for("running")
    large = pool.submit("large", 70)
    pool.submit("next", 40)
    pool.settle()
    assert pool.began == ["running"]
    large.cancel()
    pool.wait_for("next")


def test_j4_closing_cancels_what_has_not_begun_and_waits_for_the_rest(pools: list[Pool]) -> None:
    pool = pool_of(pools, 1)
    running = pool.submit("running")
    pool.wait_for("running")
    waiting = pool.submit("waiting")
    given_up = threading.Event()
    waiting.add_done_callback(lambda _: given_up.set())
    closing = threading.Thread(target=pool.workers.close, args=(MAX_WAIT_S,))
    closing.start()
    assert given_up.wait(MAX_WAIT_S)
    assert waiting.cancelled()
    assert pool.workers.is_closing
    assert not running.done()
    pool.end("running")
    closing.join(MAX_WAIT_S)
    assert running.result(0) == "running"
    with pytest.raises(RuntimeError):
        pool.submit("too late")


def test_j4_a_job_that_does_not_end_fails_and_is_left_behind(pools: list[Pool]) -> None:
    pool = pool_of(pools, 2)
    stuck = pool.submit("stuck")
    pool.wait_for("stuck")
    pool.workers.close(wait_limit_s=0.01)
    assert isinstance(stuck.exception(MAX_WAIT_S), Interrupted)
    pool.end("stuck")  # its late result goes nowhere


STUCK = """
import threading
from kestrel_runtime.fairness.image_budget import MemoryBudget
from kestrel_runtime.engine.workers import Job, Workers

began = threading.Event()
workers = Workers(1, "test", MemoryBudget(1))
workers.submit(Job(lambda: (began.set(), threading.Event().wait()), 0.0))
began.wait()
workers.close(wait_limit_s=0.01)
"""


def test_j4_a_job_that_does_not_end_does_not_keep_the_process() -> None:
    process = subprocess.run([sys.executable, "-c", STUCK], timeout=MAX_WAIT_S, check=True, capture_output=True)
    assert process.returncode == 0


def test_without_a_thread_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(2, "test", MemoryBudget(1))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="thread"):
        workers.submit(Job(lambda: None, 0.0))
    monkeypatch.undo()
    assert result_of(workers, lambda: 7) == 7
    workers.close()


def test_many_threads_and_callers_lose_nothing(pools: list[Pool]) -> None:
    pool = pool_of(pools, 4, 1000)
    kept: list[Held] = []
    lock = threading.Lock()

    def work(num_bytes: int) -> int:
        held = Held()
        pool.budget.hold("", held, num_bytes // 2)
        with lock:
            kept.append(held)
            if len(kept) > 3:
                kept.clear()
        return num_bytes

    def submit_many(seed: int) -> list[Future[int]]:
        return [
            pool.workers.submit(
                Job(lambda size=(seed * 37 + number * 61) % 300: work(size), float(number), num_bytes=300)
            )
            for number in range(100)
        ]

    results: list[Future[int]] = []
    callers = [threading.Thread(target=lambda seed=seed: results.extend(submit_many(seed))) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(MAX_WAIT_S)
    for number, future in enumerate(results):
        if number % 7 == 0:
            future.cancel()
    assert len([future for future in results if future.cancelled() or future.result(MAX_WAIT_S) >= 0]) == 400
    kept.clear()
    gc.collect()
    assert pool.budget.used_bytes == 0
