"""Probes and balancers, over the wire."""

from __future__ import annotations

import threading
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.health import Health
from kestrel_runtime.engine import EngineStatus
from tests.fakes import FakeEngine
from tests.server.serving import EOF, serving

NAMES = ["", "kestrel.v1.VisionService", "kestrel.v1.EngineService"]
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("name", NAMES)
async def test_check_follows_the_engine(name: str) -> None:
    async with serving() as house:
        assert (await house.health.Check(HealthCheckRequest(service=name))).status == SERVING
        watch = house.health.Watch(HealthCheckRequest(service=name))
        assert (await watch.read()).status == SERVING
        house.engine.die()
        assert (await watch.read()).status == NOT_SERVING
        assert (await house.health.Check(HealthCheckRequest(service=name))).status == NOT_SERVING


async def test_change_may_come_from_any_thread() -> None:
    async with serving() as house:
        watch = house.health.Watch(HealthCheckRequest())
        await watch.read()
        thread = threading.Thread(target=house.engine.become, args=(EngineStatus.DRAINING,))
        thread.start()
        assert (await watch.read()).status == NOT_SERVING
        thread.join()


async def test_all_watchers_hear_a_change() -> None:
    async with serving() as house:
        watches = [house.health.Watch(HealthCheckRequest()) for _ in range(10)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 10
        house.engine.die()
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 10


async def test_check_of_an_unknown_service_is_not_found() -> None:
    async with serving() as house:
        call = house.health.Check(HealthCheckRequest(service="kestrel.v1.FlightService"))
        assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_of_an_unknown_service_says_so_and_stays_open() -> None:
    async with serving() as house:
        watch = house.health.Watch(HealthCheckRequest(service="kestrel.v1.FlightService"))
        assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        assert not watch.done()


async def test_stop_ends_open_watches_with_a_last_word() -> None:
    async with serving() as house:
        watch = house.health.Watch(HealthCheckRequest())
        await watch.read()
        await house.server.stop()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is EOF
        assert await watch.code() is grpc.StatusCode.OK


async def test_watch_has_its_last_word_even_where_the_word_before_is_still_being_sent() -> None:
    health, nobody = Health(FakeEngine(), []), cast("Any", None)
    watch = health.Watch(HealthCheckRequest(), nobody)
    assert (await anext(watch)).status == SERVING
    health.close()
    assert [answer.status async for answer in watch] == [NOT_SERVING]


async def test_engine_that_is_dead_from_the_start_is_not_serving() -> None:
    engine = FakeEngine()
    engine.die()
    async with serving(engine) as house:
        assert (await house.health.Check(HealthCheckRequest())).status == NOT_SERVING


async def test_an_engine_that_recovers_does_not_call_back_a_server_that_has_withdrawn() -> None:
    engine = FakeEngine()
    engine.become(EngineStatus.RECOVERING)
    async with serving(engine) as house:
        house.server.withdraw()
        engine.become(EngineStatus.SERVING)
        watch = house.health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        await house.vision.CompleteQuery(wire.CompleteQueryRequest(question="?"))
        assert (await house.health.Check(HealthCheckRequest())).status == NOT_SERVING


async def test_health_answers_while_the_queue_is_full() -> None:
    async with serving(FakeEngine(max_queued_requests=0)) as house:
        assert (await house.health.Check(HealthCheckRequest())).status == SERVING
