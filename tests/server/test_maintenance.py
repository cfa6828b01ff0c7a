"""When work is done that can wait."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.calls.call_context import OK, CallContext
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.maintenance import Maintenance
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import Load
from tests.fakes import FakeEngine
from tests.server.serving import IMAGE, Serving, open_channel

NEVER_S = 3600.0
SHORT_S = 0.02
CALL = CallContext((), None, "kestrel.v1.VisionService/Point")


class Workshop(FakeEngine):
    """An engine that has as much to do as it is told."""

    num_running = 0

    def load(self) -> Load:
        return Load(self.num_running, 0, 0, 0, 0, 0.0)


class Turns:
    """The work: when it was done, and by which thread."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.threads: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Semaphore(0)

    def __call__(self) -> None:
        self.times.append(self._loop.time())
        self.threads.append(threading.current_thread().name)
        self._loop.call_soon_threadsafe(self._done.release)

    async def next(self) -> None:
        async with asyncio.timeout(60):
            await self._done.acquire()


def maintenance(
    engine: Workshop, work: Callable[[], object], *, interval_s: float = 0.0, max_interval_s: float = NEVER_S
) -> Maintenance:
    return Maintenance(engine, work, rest_s=SHORT_S, interval_s=interval_s, max_interval_s=max_interval_s)


async def after(delay_s: float) -> None:
    """The loop, so much later: what was due before has been done."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(delay_s, passed.set)
    await passed.wait()


async def test_work_is_done_beside_the_loop_when_the_last_call_is_some_time_ago():
    turns = Turns()
    ended = asyncio.get_running_loop().time()
    maintenance(Workshop(), turns).note(CALL, OK)
    await turns.next()
    assert turns.times[0] - ended >= SHORT_S
    assert turns.threads == ["kestrel-maintenance"]


async def test_an_engine_at_work_is_left_alone_until_its_calls_have_ended():
    turns, engine = Turns(), Workshop()
    upkeep = maintenance(engine, turns)
    engine.num_running = 1
    upkeep.note(CALL, OK)
    await after(3 * SHORT_S)
    assert turns.times == []
    engine.num_running = 0
    upkeep.note(CALL, OK)
    await turns.next()


async def test_a_server_that_never_rests_is_not_spared_for_ever():
    turns, engine = Turns(), Workshop()
    engine.num_running = 1
    maintenance(engine, turns, max_interval_s=SHORT_S).note(CALL, OK)
    await turns.next()


async def test_so_much_time_lies_between_two_turns():
    turns = Turns()
    began = asyncio.get_running_loop().time()
    upkeep = maintenance(Workshop(), turns, interval_s=4 * SHORT_S)
    for _ in range(3):
        upkeep.note(CALL, OK)
        await turns.next()
    assert turns.times[2] - began >= SHORT_S + 2 * 4 * SHORT_S


async def test_without_any_call_there_is_nothing_to_do():
    turns = Turns()
    upkeep = maintenance(Workshop(), turns)
    await after(3 * SHORT_S)
    upkeep.note(CALL, OK)
    await turns.next()
    await after(3 * SHORT_S)
    assert len(turns.times) == 1


async def test_what_goes_wrong_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture):
    turns = Turns()

    def work() -> None:
        turns()
        raise OSError("no such heap")

    upkeep = maintenance(Workshop(), work)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            upkeep.note(CALL, OK)
            await turns.next()
    assert "maintenance failed" in caplog.text


async def test_a_closed_one_starts_nothing():
    turns = Turns()
    upkeep = maintenance(Workshop(), turns)
    upkeep.note(CALL, OK)
    upkeep.close()
    await after(3 * SHORT_S)
    assert turns.times == []


async def test_a_server_does_it_after_its_calls():
    turns, engine = Turns(), Workshop()
    config = ServerConfig(port=0)
    async with Server(engine, config, at_rest=turns) as server, open_channel(server) as channel:
        await Serving(server, engine, channel).vision.Point(wire.PointRequest(object="bird", image=IMAGE))
        await turns.next()
