"""What health checks report, and when; what waits for the death of an engine."""

import asyncio

from kestrel_grpc.calls.readiness import Readiness, death_of
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine


async def test_readiness_follows_the_engine():
    engine = FakeEngine()
    readiness = Readiness(engine)
    assert readiness.is_ready
    for status in (EngineStatus.RECOVERING, EngineStatus.SERVING, EngineStatus.DEAD):
        changed = readiness.changed
        engine.become(status)
        await changed.wait()
        assert readiness.is_ready is (status is EngineStatus.SERVING)


async def test_a_server_that_refuses_stays_unready():
    engine = FakeEngine()
    engine.become(EngineStatus.RECOVERING)
    readiness = Readiness(engine)
    readiness.refuse()
    changed = readiness.changed
    engine.become(EngineStatus.SERVING)
    await changed.wait()
    assert not readiness.is_ready
    assert not readiness.is_closed


async def test_closing_wakes_those_who_wait_for_a_change():
    readiness = Readiness(FakeEngine())
    changed = readiness.changed
    readiness.close()
    assert changed.is_set()
    assert (readiness.is_ready, readiness.is_closed) == (False, True)


async def test_the_death_of_an_engine_is_noticed_before_and_after_one_waits_for_it():
    engine = FakeEngine()
    died = death_of(engine)
    engine.become(EngineStatus.RECOVERING)
    engine.become(EngineStatus.DEAD)
    await died
    await death_of(engine)


def test_an_engine_may_die_after_the_event_loop_that_waits_for_it():
    async def wait(engine: FakeEngine) -> asyncio.Future[None]:
        return death_of(engine)

    engine = FakeEngine()
    died = asyncio.run(wait(engine))
    engine.become(EngineStatus.DEAD)
    assert not died.done()
