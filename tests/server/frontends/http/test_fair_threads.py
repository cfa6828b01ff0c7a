"""Work in threads, one piece at a time for each tenant."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kestrel_grpc.frontends.http.fair_threads import FairThreads

MAX_WAIT_S = 60.0


class Work:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(MAX_WAIT_S)
        return "done"


async def begun(work: Work) -> None:
    assert await asyncio.to_thread(work.has_begun.wait, MAX_WAIT_S)


async def test_a_tenant_waits_for_its_own_work_and_not_for_that_of_others():
    threads = FairThreads(2)
    first, second, other = Work(), Work(), Work()
    running = [asyncio.ensure_future(threads.run("greedy", work)) for work in (first, second)]
    await begun(first)
    other.may_end.set()
    assert await threads.run("other", other) == "done"
    assert not second.has_begun.is_set()
    first.may_end.set()
    second.may_end.set()
    assert await asyncio.gather(*running) == ["done", "done"]


@pytest.mark.parametrize("fails", [False, True])
async def test_whoever_leaves_keeps_its_turn_until_the_thread_ends(fails: bool):
    threads = FairThreads(1)
    first, second, waiting = Work(), Work(), Work()
    second.may_end.set()

    def work() -> str:
        first()
        if fails:
            raise ValueError
        return "done"

    leaving = asyncio.ensure_future(threads.run("a", work))
    left_before_its_turn = asyncio.ensure_future(threads.run("a", waiting))
    following = asyncio.ensure_future(threads.run("b", second))
    await begun(first)
    for task in (leaving, left_before_its_turn):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not second.has_begun.is_set()
    first.may_end.set()
    assert await following == "done"
    assert not waiting.has_begun.is_set()


async def test_a_tenant_has_its_turns_after_a_caller_that_leaves_as_it_gets_one():
    threads, pool = FairThreads(1), ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(pool)
    first, waiting, following = Work(), Work(), Work()
    following.may_end.set()
    running = asyncio.ensure_future(threads.run("a", first))
    leaving = asyncio.ensure_future(threads.run("a", waiting))
    await loop.run_in_executor(ThreadPoolExecutor(1), first.has_begun.wait, MAX_WAIT_S)
    first.may_end.set()
    pool.submit(lambda: None).result(MAX_WAIT_S)  # the only thread has told the loop of the end of `first`
    loop.call_soon(leaving.cancel)  # in the same turn of the loop
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await running == "done"
    assert await asyncio.wait_for(threads.run("a", following), MAX_WAIT_S) == "done"
    assert not waiting.has_begun.is_set()


async def test_a_tenant_rests_for_as_long_as_its_work_has_taken():
    readings = iter([0.0, 1e6, 0.0, 0.0, 0.0, 0.0])
    threads = FairThreads(2, lambda: next(readings))
    long, resting, other = Work(), Work(), Work()
    for work in (long, resting, other):
        work.may_end.set()
    assert await threads.run("greedy", long) == "done"
    waiting = asyncio.ensure_future(threads.run("greedy", resting))
    for _ in range(2):  # both threads are free
        assert await threads.run("other", other) == "done"
    assert not resting.has_begun.is_set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(("fails", "rest_s"), [(False, 2.0), (True, 8.0)])
async def test_a_tenant_rests_longer_after_work_that_fails(
    fails: bool, rest_s: float, monkeypatch: pytest.MonkeyPatch
):
    readings, rests = iter([0.0, 2.0]), list[float]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay_s, *rest: rests.append(delay_s))
    work = asyncio.ensure_future(FairThreads(1, lambda: next(readings)).run("a", lambda: 1 // (not fails)))
    await asyncio.wait((work,))
    assert (work.exception() is not None) == fails
    assert rests == [rest_s]


async def test_a_tenant_has_its_next_turn_after_its_rest():
    readings = iter([0.0, 1e-3, 0.0, 0.0])
    threads = FairThreads(1, lambda: next(readings))
    for _ in range(2):
        assert await asyncio.wait_for(threads.run("a", lambda: "done"), MAX_WAIT_S) == "done"


async def test_an_error_of_the_work_is_raised():
    with pytest.raises(ZeroDivisionError):
        await FairThreads(1).run("", lambda: 1 // 0)
