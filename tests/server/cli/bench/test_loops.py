"""The closed loop and the open one."""

import asyncio
import itertools
import statistics
import time

import pytest

from kestrel_grpc.cli.bench.loops import ClosedLoop, OpenLoop, Sample, Window, arrivals


class Desk:
    """Answers whom it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, asyncio.Future[str]]] = []
        self.arrived = asyncio.Event()
        self.most = 0

    async def ask(self, started: float) -> Sample:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((started, answer))
        self.most = max(self.most, len(self.waiting))
        self.arrived.set()
        error = await answer
        return Sample(started, time.perf_counter(), 1, error=error)

    async def answer(self, error: str = "") -> None:
        while not self.waiting:
            self.arrived.clear()
            await self.arrived.wait()
        _, answer = self.waiting.pop(0)
        answer.set_result(error)
        await asyncio.sleep(0)


async def test_so_many_requests_run_and_no_more():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 3)
    for _ in range(10):
        await desk.answer()
    assert desk.most == 3
    await loop.cancel()


async def test_warm_is_when_every_lane_has_been_answered():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 2)
    warm = asyncio.create_task(loop.warm_up(60.0))
    await desk.answer()
    await asyncio.sleep(0)
    assert not warm.done()
    await desk.answer()
    await warm
    await loop.cancel()


async def test_the_load_goes_on_until_the_windows_requests_have_ended():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 2)
    await asyncio.sleep(0)
    window = Window(0.0, time.perf_counter())
    outlasted = asyncio.create_task(loop.outlast(window))
    await desk.answer()
    await asyncio.sleep(0)
    assert not outlasted.done()
    assert len(desk.waiting) == 2  # the caller that was answered asks again
    await desk.answer()
    await outlasted
    assert len(loop.overlapping(window)) == 2
    await loop.cancel()


async def test_a_stopped_loop_waits_for_what_runs_and_asks_nothing_more():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 2)
    await asyncio.sleep(0)
    loop.stop()
    finished = asyncio.create_task(loop.end())
    await desk.answer()
    await asyncio.sleep(0)
    assert not finished.done()
    await desk.answer()
    await finished
    assert not desk.waiting


async def test_a_failed_request_is_kept_with_what_it_ended_in():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 1)
    await desk.answer("UNAVAILABLE")
    await desk.answer()
    await loop.cancel()
    assert [sample.error for sample in loop.overlapping(Window(0.0, time.perf_counter()))] == ["UNAVAILABLE", ""]


async def test_a_loop_with_a_number_of_requests_sends_so_many():
    desk = Desk()
    loop = ClosedLoop(desk.ask, 2, num_requests=5)
    ending = asyncio.create_task(loop.end())
    for _ in range(5):
        await desk.answer()
    await ending
    assert len(loop.samples) == 5
    assert desk.most == 2
    assert not desk.waiting


def test_the_moments_of_an_open_loop_are_those_of_its_seed():
    moments = list(itertools.islice(arrivals(10.0, 4.0, seed=3), 4000))
    assert moments == list(itertools.islice(arrivals(10.0, 4.0, seed=3), 4000))
    assert moments != list(itertools.islice(arrivals(10.0, 4.0, seed=4), 4000))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4.0, rel=0.05)
    # Of a Poisson process the deviation of the gaps is their mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 4.0, rel=0.1)


async def test_an_open_loop_sends_what_is_due_while_nothing_is_answered():
    desk = Desk()
    now = time.perf_counter()
    loop = OpenLoop(desk.ask, [now, now, now])
    while len(desk.waiting) < 3:
        desk.arrived.clear()
        await desk.arrived.wait()
    assert [started for started, _ in desk.waiting] == [now] * 3
    for _ in range(3):
        await desk.answer()
    assert len(await loop.end()) == 3


async def test_an_open_loop_that_is_stopped_waits_for_the_answers_that_run():
    desk = Desk()
    now = time.perf_counter()
    loop = OpenLoop(desk.ask, [now, now + 3600.0])
    while not desk.waiting:
        desk.arrived.clear()
        await desk.arrived.wait()
    loop.stop()
    ending = asyncio.create_task(loop.end())
    await asyncio.sleep(0)
    assert not ending.done()
    await desk.answer()
    assert [sample.started for sample in await ending] == [now]
