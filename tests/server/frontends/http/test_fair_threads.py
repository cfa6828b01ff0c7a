"""Work in threads, one piece at a time for each tenant."""

from __future__ import annotations

import asyncio
import threading

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


async def test_a_tenant_waits_for_its_own_work_and_not_for_that_of_others() -> None:
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
async def test_whoever_leaves_keeps_its_turn_until_the_thread_ends(fails: bool) -> None:
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


async def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await FairThreads(1).run("", lambda: 1 // 0)
