"""J1 to J4 are the rules in the docstring of `kestrel_runtime.engine.workers`."""

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
from kestrel_runtime.memory.image_budget import MemoryBudget

MAX_WAIT_S = 30
MIB = 2**20


class Held:
    """What a job leaves behind, which takes memory."""


class House:
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
        self, name: str, num_bytes: int = 0, *, tenant: str = "", priority: Priority = Priority.NORMAL
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
        return self.workers.submit(Job(work, submitted, priority, tenant, num_bytes))

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
def houses() -> Iterator[list[House]]:
    houses: list[House] = []
    yield houses
    for house in houses:
        house.close()


def house_of(houses: list[House], num_threads: int, limit_bytes: int = 1000 * MIB) -> House:
    houses.append(House(num_threads, limit_bytes))
    return houses[-1]


def result_of(workers: Workers, work: Any) -> Any:
    return workers.submit(Job(work, 0.0)).result(MAX_WAIT_S)


def test_a_result_or_an_error_comes_back(houses: list[House]) -> None:
    workers = house_of(houses, 1).workers
    assert result_of(workers, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        result_of(workers, lambda: 1 / 0)


def test_nothing_of_a_job_waits_for_the_garbage_collector(houses: list[House]) -> None:
    workers = house_of(houses, 1).workers
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


def test_j1_the_most_urgent_goes_first_and_of_equals_who_came_first(houses: list[House]) -> None:
    house = house_of(houses, 1)
    house.submit("busy")
    house.wait_for("busy")
    futures = [
        house.submit("late", priority=Priority.BATCH),
        house.submit("soon"),
        house.submit("later", priority=Priority.BATCH),
        house.submit("now", priority=Priority.INTERACTIVE),
    ]
    house.end("busy", "late", "soon", "later", "now")
    for future in futures:
        future.result(MAX_WAIT_S)
    assert house.began == ["busy", "now", "soon", "late", "later"]


def test_j1_tenants_take_turns_by_the_bytes_that_they_need(houses: list[House]) -> None:
    house = house_of(houses, 1)
    house.submit("busy")
    house.wait_for("busy")
    flood = [house.submit(f"flood {number}", 100 * MIB, tenant="flood") for number in range(4)]
    modest = [house.submit(f"modest {number}", 50 * MIB, tenant="modest") for number in range(4)]
    house.end("busy", *(f"{name} {number}" for name in ("flood", "modest") for number in range(4)))
    for future in (*flood, *modest):
        future.result(MAX_WAIT_S)
    assert [name.split()[0] for name in house.began[1:7]].count("modest") == 4


def test_j2_jobs_wait_for_the_memory_that_others_have_taken(houses: list[House]) -> None:
    house = house_of(houses, 3, 100)
    house.submit("first", 60)
    second = house.submit("second", 60)
    house.wait_for("first")
    house.settle()
    assert house.began == ["first"]
    assert house.budget.used_bytes == 60
    house.end("first", "second")
    assert second.result(MAX_WAIT_S) == "second"


def test_j2_jobs_wait_for_the_memory_of_what_earlier_ones_left_behind(houses: list[House]) -> None:
    house = house_of(houses, 2, 100)
    kept: list[Held] = []

    def leave_much() -> None:
        kept.append(Held())
        house.budget.hold("", kept[0], 80)

    house.workers.submit(Job(leave_much, 0.0, num_bytes=90)).result(MAX_WAIT_S)
    waiting = house.submit("waiting", 30)
    house.settle()
    assert house.began == []
    kept.clear()
    house.end("waiting")
    assert waiting.result(MAX_WAIT_S) == "waiting"


def test_j2_a_small_job_passes_one_that_waits_for_memory_and_leaves_it_its_room(houses: list[House]) -> None:
    house = house_of(houses, 5, 100)
    house.submit("running", 60)
    house.wait_for("running")
    house.submit("large", 70)
    house.submit("too much", 40)  # fits beside what runs, and not beside the one that waits
    house.submit("small", 20)
    house.submit("smaller", 15)  # neither, now that the small one is there
    house.submit("text")
    house.wait_for("small", "text")
    house.settle()
    assert sorted(house.began) == ["running", "small", "text"]
    house.end("running")
    house.wait_for("large")
    house.settle()
    assert sorted(house.began) == ["large", "running", "small", "text"]
    house.end("large")
    house.wait_for("too much", "smaller")


def test_j2_a_run_of_small_jobs_does_not_starve_a_large_one(houses: list[House]) -> None:
    house = house_of(houses, 3, 100)
    house.submit("small 0", 40)
    house.wait_for("small 0")
    large = house.submit("large", 80)
    for number in range(1, 20):
        house.submit(f"small {number}", 40)
    house.end(*(f"small {number}" for number in range(20)), "large")
    assert large.result(MAX_WAIT_S) == "large"
    assert house.began[:2] == ["small 0", "large"]


def test_j2_a_tenant_at_its_share_holds_up_nobody_else(houses: list[House]) -> None:
    house = house_of(houses, 4, 100)
    kept = Held()
    house.budget.hold("flood", kept, 55)
    house.submit("flood", 40, tenant="flood", priority=Priority.INTERACTIVE)
    modest = house.submit("modest", 40, tenant="modest")
    house.end("modest")
    modest.result(MAX_WAIT_S)
    assert house.began == ["modest"]
    del kept
    house.wait_for("flood")


def test_j3_large_jobs_leave_a_thread_to_small_ones(houses: list[House]) -> None:
    house = house_of(houses, 3)
    for number in range(3):
        house.submit(f"large {number}", 200 * MIB)
    house.wait_for("large 0", "large 1")
    small = house.submit("small", 10 * MIB)
    house.end("small")
    assert small.result(MAX_WAIT_S) == "small"
    assert "large 2" not in house.began
    house.end("large 0")
    house.wait_for("large 2")


def test_j3_a_single_thread_does_large_jobs_too(houses: list[House]) -> None:
    house = house_of(houses, 1)
    large = house.submit("large", 200 * MIB)
    house.end("large")
    assert large.result(MAX_WAIT_S) == "large"


def test_what_was_cancelled_is_not_done_is_forgotten_and_holds_up_nobody(houses: list[House]) -> None:
    house = house_of(houses, 1)
    house.submit("busy")
    house.wait_for("busy")
    image = Held()
    gone = weakref.ref(image)
    unwanted = house.workers.submit(Job(lambda image=image: image, 0.0))
    del image
    wanted = house.submit("wanted")
    assert unwanted.cancel()
    assert gone() is None
    house.end("busy", "wanted")
    assert wanted.result(MAX_WAIT_S) == "wanted"


def test_cancelling_whoever_waits_for_memory_lets_the_next_one_start(houses: list[House]) -> None:
    house = house_of(houses, 3, 100)
    house.submit("running", 60)
    house.wait_for("running")
    large = house.submit("large", 70)
    house.submit("next", 40)
    house.settle()
    assert house.began == ["running"]
    large.cancel()
    house.wait_for("next")


def test_j4_closing_cancels_what_has_not_begun_and_waits_for_the_rest(houses: list[House]) -> None:
    house = house_of(houses, 1)
    running = house.submit("running")
    house.wait_for("running")
    waiting = house.submit("waiting")
    given_up = threading.Event()
    waiting.add_done_callback(lambda _: given_up.set())
    closing = threading.Thread(target=house.workers.close, args=(MAX_WAIT_S,))
    closing.start()
    assert given_up.wait(MAX_WAIT_S)
    assert waiting.cancelled()
    assert house.workers.is_closing
    assert not running.done()
    house.end("running")
    closing.join(MAX_WAIT_S)
    assert running.result(0) == "running"
    with pytest.raises(RuntimeError):
        house.submit("too late")


def test_j4_a_job_that_does_not_end_fails_and_is_left_behind(houses: list[House]) -> None:
    house = house_of(houses, 2)
    stuck = house.submit("stuck")
    house.wait_for("stuck")
    house.workers.close(wait_limit_s=0.01)
    assert isinstance(stuck.exception(MAX_WAIT_S), Interrupted)
    house.end("stuck")  # its late result goes nowhere


STUCK = """
import threading
from kestrel_runtime.memory.image_budget import MemoryBudget
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


def test_many_threads_and_callers_lose_nothing(houses: list[House]) -> None:
    house = house_of(houses, 4, 1000)
    kept: list[Held] = []
    lock = threading.Lock()

    def work(num_bytes: int) -> int:
        held = Held()
        house.budget.hold("", held, num_bytes // 2)
        with lock:
            kept.append(held)
            if len(kept) > 3:
                kept.clear()
        return num_bytes

    def submit_many(seed: int) -> list[Future[int]]:
        return [
            house.workers.submit(
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
    assert house.budget.used_bytes == 0
