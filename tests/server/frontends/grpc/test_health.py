"""Probes and balancers, over the wire."""

import asyncio
import struct
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.readiness import Readiness
from kestrel_grpc.frontends.grpc.health import Health
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine
from tests.journey.http2 import Http2Client
from tests.server.serving import EOF, reason_of, serving

NAMES = ["", "kestrel.v1.VisionService", "kestrel.v1.ImageService", "kestrel.v1.EngineService"]
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("name", NAMES)
async def test_check_follows_the_engine(name: str):
    async with serving() as rig:
        assert (await rig.health.Check(HealthCheckRequest(service=name))).status == SERVING
        watch = rig.health.Watch(HealthCheckRequest(service=name))
        assert (await watch.read()).status == SERVING
        rig.engine.die()
        assert (await watch.read()).status == NOT_SERVING
        assert (await rig.health.Check(HealthCheckRequest(service=name))).status == NOT_SERVING


async def test_change_may_come_from_any_thread():
    async with serving() as rig:
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        thread = threading.Thread(target=rig.engine.become, args=(EngineStatus.DRAINING,))
        thread.start()
        assert (await watch.read()).status == NOT_SERVING
        thread.join()


async def test_all_watchers_hear_a_change():
    async with serving() as rig:
        watches = [rig.health.Watch(HealthCheckRequest()) for _ in range(10)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 10
        rig.engine.die()
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 10


async def test_check_of_an_unknown_service_is_not_found():
    async with serving() as rig:
        call = rig.health.Check(HealthCheckRequest(service="kestrel.v1.FlightService"))
        assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_of_an_unknown_service_says_so_and_stays_open():
    async with serving() as rig:
        watch = rig.health.Watch(HealthCheckRequest(service="kestrel.v1.FlightService"))
        assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        assert not watch.done()


async def test_stop_ends_open_watches_with_a_last_word():
    async with serving() as rig:
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        await rig.server.stop()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is EOF
        assert await watch.code() is grpc.StatusCode.OK


async def test_watch_has_its_last_word_even_where_the_word_before_is_still_being_sent():
    readiness = Readiness(FakeEngine())
    health, call = Health(readiness, []), CallContext((), None, "grpc.health.v1.Health/Watch")
    watch = health.Watch(HealthCheckRequest(), call)
    assert (await anext(watch)).status == SERVING
    readiness.close()
    assert [answer.status async for answer in watch] == [NOT_SERVING]


async def test_engine_that_is_dead_from_the_start_is_not_serving():
    engine = FakeEngine()
    engine.die()
    async with serving(engine) as rig:
        assert (await rig.health.Check(HealthCheckRequest())).status == NOT_SERVING


async def test_an_engine_that_recovers_does_not_call_back_a_server_that_has_withdrawn():
    engine = FakeEngine()
    engine.become(EngineStatus.RECOVERING)
    async with serving(engine) as rig:
        rig.server.withdraw()
        engine.become(EngineStatus.SERVING)
        watch = rig.health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        await rig.vision.CompleteQuery(wire.CompleteQueryRequest(question="?"))
        assert (await rig.health.Check(HealthCheckRequest())).status == NOT_SERVING


async def test_health_answers_while_the_queue_is_full():
    async with serving(FakeEngine(max_queued_requests=0)) as rig:
        assert (await rig.health.Check(HealthCheckRequest())).status == SERVING


MALFORMED = b"\xff\xff\xff"


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str, caplog: pytest.LogCaptureFixture):
    async with serving() as rig:
        kind = rig.channel.unary_unary if method == "Check" else rig.channel.unary_stream
        call: Any = kind(f"/grpc.health.v1.Health/{method}")(MALFORMED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if method == "Check" else call.read())
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert caplog.records == []


async def test_health_is_told_although_others_stall_in_the_middle_of_their_question():
    async with serving() as rig, Http2Client.connected(rig.address) as client:
        for _ in range(50):
            stream = await client.begin("/grpc.health.v1.Health/Check")
            await client.send(stream, struct.pack(">BI", 0, 2**20) + MALFORMED)
        async with asyncio.timeout(60):
            assert (await rig.health.Check(HealthCheckRequest())).status == SERVING


async def test_a_question_of_health_that_does_not_come_ends_its_call():
    async with serving(receive_timeout=0.05) as rig, Http2Client.connected(rig.address) as client:
        _, trailers = await client.read(await client.begin("/grpc.health.v1.Health/Check"))
    assert int(trailers["grpc-status"]) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
