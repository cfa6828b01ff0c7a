"""What health checks report, and when."""

from __future__ import annotations

from kestrel_grpc.wire.readiness import Readiness
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine


async def test_readiness_follows_the_engine() -> None:
    engine = FakeEngine()
    readiness = Readiness(engine)
    assert readiness.is_ready
    for status in (EngineStatus.RECOVERING, EngineStatus.SERVING, EngineStatus.DEAD):
        changed = readiness.changed
        engine.become(status)
        await changed.wait()
        assert readiness.is_ready is (status is EngineStatus.SERVING)


async def test_a_server_that_refuses_stays_unready() -> None:
    engine = FakeEngine()
    engine.become(EngineStatus.RECOVERING)
    readiness = Readiness(engine)
    readiness.refuse()
    changed = readiness.changed
    engine.become(EngineStatus.SERVING)
    await changed.wait()
    assert not readiness.is_ready
    assert not readiness.is_closed


async def test_closing_wakes_those_who_wait_for_a_change() -> None:
    readiness = Readiness(FakeEngine())
    changed = readiness.changed
    readiness.close()
    assert changed.is_set()
    assert (readiness.is_ready, readiness.is_closed) == (False, True)
