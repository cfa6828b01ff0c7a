"""The server's life: bind, serve, drain, stop; and what bad callers cannot do to it."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.process.free_ports import PortUnavailable
from kestrel_grpc.process.resources import lower_grpc_threads
from kestrel_grpc.server import Server
from kestrel_runtime.api.events import Started, TextChannel, TextDelta, Usage
from tests.fakes import HOLD, FakeEngine, answers, much_text
from tests.journey.http2 import COMPLETE_QUERY as COMPLETE_QUERY_METHOD
from tests.journey.http2 import Http2Client
from tests.server.serving import EOF, IMAGE, Serving, open_channel, reason_of, serving

QUERY = wire.QueryRequest(question="?")
COMPLETE_QUERY = wire.CompleteQueryRequest(question="?")


def pauses(request: Any) -> list[object]:
    """A script that waits before its last event."""
    *head, last = answers(request)
    return [*head, HOLD, last]


async def rest(stream: Any) -> list[Any]:
    """What a stream has still to say."""
    messages = []
    while (message := await stream.read()) is not EOF:
        messages.append(message)
    return messages


async def ending(stream: Any) -> grpc.StatusCode:
    """How a stream fails; a status waits behind the messages before it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(stream)
    return caught.value.code()


def says_much(request: Any) -> list[object]:
    """More than the buffers between server and caller hold."""
    started, *_, last = answers(request)
    return [started, *much_text(), last]


def never_ends(request: Any) -> list[object]:
    return [Started(Usage(1, 0)), TextDelta("a", TextChannel.ANSWER, 0, 1), HOLD]


@asynccontextmanager
async def serving_until_signal(
    engine: FakeEngine, **options: Any
) -> AsyncIterator[tuple[Serving, asyncio.Task[bool]]]:
    """A server that runs `serve`, as the command does."""
    started = asyncio.Event()

    class TellingServer(Server):
        async def start(self) -> None:
            await super().start()
            started.set()

    settings: dict[str, Any] = {"withdrawal_delay": 0.0, **options}
    server = TellingServer(engine, ServerConfig(port=0, **settings))
    serve = asyncio.ensure_future(server.serve())
    opened = asyncio.ensure_future(started.wait())
    await asyncio.wait({serve, opened}, return_when=asyncio.FIRST_COMPLETED)
    assert opened.done(), "the server has ended before it began"
    async with open_channel(server) as channel:
        yield Serving(server, engine, channel), serve


async def test_port_zero_takes_a_free_one_and_prints_it(capsys: pytest.CaptureFixture[str]):
    async with serving() as rig:
        assert rig.server.port
        assert f"fake on 127.0.0.1:{rig.server.port} (cpu, float32)\n" in capsys.readouterr().out


async def test_port_in_use_is_one_clear_error():
    async with serving() as rig:
        assert rig.server.port is not None
        other = Server(FakeEngine(), ServerConfig(port=rig.server.port))
        with pytest.raises(PortUnavailable, match=rf"127\.0\.0\.1:{rig.server.port}: Address already in use"):
            await other.start()
        await rig.vision.CompleteQuery(COMPLETE_QUERY)


async def test_address_that_is_not_ours_is_one_clear_error():
    with pytest.raises(PortUnavailable, match=r"192\.0\.2\.1"):
        await Server(FakeEngine(), ServerConfig(host="192.0.2.1", port=0)).start()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_addresses_of_version_six_are_fine():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with (
        Server(FakeEngine(), ServerConfig(host="::1", port=0)) as server,
        grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel,
    ):
        await channel.channel_ready()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
async def test_the_threads_of_grpc_get_a_lower_priority_and_no_others(monkeypatch: pytest.MonkeyPatch):
    lowered: dict[int, int] = {}
    monkeypatch.setattr(os, "setpriority", lambda _, thread, niceness: lowered.update({thread: niceness}))
    async with serving():
        lower_grpc_threads()
    assert lowered
    assert set(lowered.values()) == {os.getpriority(os.PRIO_PROCESS, 0) + 10}
    assert not set(lowered) & {thread.native_id for thread in threading.enumerate()}


async def test_drain_lets_running_requests_finish_and_refuses_new_ones():
    async with serving(FakeEngine(pauses)) as rig:
        stream, unary = rig.vision.Query(QUERY), rig.vision.CompleteQuery(COMPLETE_QUERY)
        assert (await stream.read()).HasField("started")
        for _ in range(2):
            await rig.engine.num_submitted.acquire()
        watch = rig.health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        drain = asyncio.ensure_future(rig.server.drain())
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(COMPLETE_QUERY)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not drain.done()
        rig.engine.release()
        await drain
        assert (await rest(stream))[-1].HasField("completed")
        assert (await unary).result.answer == "a kestrel"


async def test_drain_gives_up_after_its_timeout():
    async with serving(FakeEngine(never_ends), drain_timeout=0.01) as rig:
        stream = rig.vision.Query(QUERY)
        await stream.read()
        await rig.server.drain()
        await rig.server.stop()
        assert await ending(stream) is grpc.StatusCode.UNAVAILABLE


async def test_stop_fails_what_still_runs_rather_than_waiting_for_it():
    async with serving(FakeEngine(never_ends)) as rig:
        stream, unary = rig.vision.Query(QUERY), rig.vision.CompleteQuery(COMPLETE_QUERY)
        await stream.read()
        await rig.server.stop()
        assert await ending(stream) is grpc.StatusCode.UNAVAILABLE
        assert await unary.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("is_drained", [True, False])
async def test_no_caller_is_told_that_its_call_was_cancelled_while_the_server_ends(is_drained: bool):
    # Only UNAVAILABLE is tried again by clients.
    for _ in range(3):
        async with serving() as rig:
            codes = Counter[grpc.StatusCode]()
            callers = [asyncio.create_task(calling_on(rig.server, codes)) for _ in range(24)]
            while codes[grpc.StatusCode.OK] < 100:
                await rig.health.Check(HealthCheckRequest())
            if is_drained:
                await rig.server.drain()
            await rig.server.stop()
            await asyncio.gather(*callers)
        assert codes.keys() == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


async def calling_on(server: Server, codes: Counter[grpc.StatusCode]) -> None:
    """Call without a pause until there is no connection any more."""
    async with open_channel(server) as channel:
        complete_query: Any = channel.unary_unary("/kestrel.v1.VisionService/CompleteQuery")
        is_served = True
        while is_served:
            call = complete_query(COMPLETE_QUERY.SerializeToString())
            codes[await call.code()] += 1
            is_served = "x-request-id" in dict(await call.trailing_metadata())


async def test_connections_that_grpc_does_not_let_go_of_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    stops: list[Callable[[None], Awaitable[None]]] = []
    make_server: Callable[..., Any] = grpc.aio.server
    released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stop(grace: float | None) -> None:
        await released  # as gRPC does: who is cancelled here cancels it for all

    def holding(**options: Any) -> Any:
        server = make_server(**options)
        stops.append(server.stop)
        server.stop = stop
        return server

    monkeypatch.setattr(grpc.aio, "server", holding)
    async with serving_until_signal(FakeEngine(), drain_timeout=0.01) as (rig, serve):
        assert (await rig.vision.CompleteQuery(COMPLETE_QUERY)).result.answer
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serve
        assert not rig.server.has_closed
    assert not released.cancelled()
    released.set_result(None)
    for stop_now in stops:
        await stop_now(None)


async def test_messages_that_do_not_come_do_not_hold_up_the_end():
    async with serving(drain_timeout=3600.0) as rig, Http2Client.connected(rig.address) as client:
        stream = await client.begin(COMPLETE_QUERY_METHOD)
        await client.send(stream, b"\0\0\1\0\0")
        await rig.health.Check(HealthCheckRequest())
        await rig.server.drain()
        _, trailers = await client.read(stream)
    assert int(trailers["grpc-status"]) == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_what_the_engine_has_said_reaches_a_slow_reader_before_the_server_ends():
    async with serving(FakeEngine(says_much)) as rig:
        stream, watch = rig.vision.Query(QUERY), rig.health.Watch(HealthCheckRequest())
        await rig.engine.num_submitted.acquire()
        await rig.engine.is_idle.wait()
        drain = asyncio.ensure_future(rig.server.drain())
        while await watch.read() is not EOF:  # watchers are sent away and hold nothing up
            pass
        assert not drain.done()
        assert (await rest(stream))[-1].HasField("completed")
        await drain


async def test_sigterm_withdraws_before_it_refuses():
    async with serving_until_signal(FakeEngine(pauses), withdrawal_delay=3600, metrics_port=0) as (rig, serve):
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(HTTPError, match="503"):
            await asyncio.to_thread(urlopen, f"http://127.0.0.1:{rig.server.metrics_port}/readyz", timeout=60)
        late = rig.vision.Query(QUERY)
        assert (await late.read()).HasField("started")
        rig.engine.release()
        assert (await rest(late))[-1].HasField("completed")
        assert not serve.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serve


async def test_an_engine_that_dies_while_the_server_withdraws_ends_it():
    async with serving_until_signal(FakeEngine(), withdrawal_delay=3600) as (rig, serve):
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await watch.read()
        rig.engine.die()
        assert not await serve  # the signal came first, and still it is no success


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGTERM, 0.05), (signal.SIGINT, 3600)])
async def test_signal_drains_and_ends_with_success(number: signal.Signals, delay_s: float):
    # By hand nothing is withdrawn from: the long delay does not count.
    async with serving_until_signal(FakeEngine(pauses), withdrawal_delay=delay_s) as (rig, serve):
        stream = rig.vision.Query(QUERY)
        await stream.read()
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        os.kill(os.getpid(), number)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        rig.engine.release()
        assert (await rest(stream))[-1].HasField("completed")
        assert await serve


async def test_second_signal_stops_at_once():
    async with serving_until_signal(FakeEngine(never_ends), drain_timeout=3600) as (rig, serve):
        stream = rig.vision.Query(QUERY)
        await stream.read()
        watch = rig.health.Watch(HealthCheckRequest())
        await watch.read()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serve
        assert await ending(stream) is grpc.StatusCode.UNAVAILABLE


async def test_a_signal_after_the_server_has_stopped_goes_to_who_handled_it_before():
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        async with serving_until_signal(FakeEngine()) as (_, serve):
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serve
            assert received == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_dead_engine_ends_the_server_without_success():
    async with serving_until_signal(FakeEngine(never_ends)) as (rig, serve):
        stream = rig.vision.Query(QUERY)
        await stream.read()
        rig.engine.die()
        assert not await serve
        assert await ending(stream) is grpc.StatusCode.UNAVAILABLE


async def test_message_beyond_the_limit_is_refused_and_the_server_goes_on():
    async with serving(max_message_bytes=2**20) as rig:
        huge = wire.CompleteQueryRequest(question="?", image={"data": bytes(2 * 2**20)})
        call = rig.vision.CompleteQuery(huge)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rig.engine.requests == []
        assert (await rig.vision.CompleteQuery(COMPLETE_QUERY)).result.answer == "a kestrel"


async def test_image_below_the_message_limit_arrives():
    async with serving() as rig:
        data = os.urandom(20_000_000)
        await rig.vision.Caption(wire.CaptionRequest(image={"data": data})).read()
        assert rig.engine.requests[0].images == (data,)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"object": "bird", "spatial_refs": [{}] * 4_000_000}, "more than 1000 fields"),
        ({"object": "bird", "options": {"model": "m" * 2**20}}, "apart from its image"),
        ({"object": "bird" * 20_000}, "at most 65536 bytes"),
    ],
    ids=["references", "other bytes", "text"],
)
async def test_a_message_that_is_large_without_its_image_is_refused_before_it_is_worked_on(
    fields: dict[str, Any], told: str
):
    request = wire.PointRequest(image=IMAGE, **fields)
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await rig.vision.Point(request)
    assert reason_of(caught.value) == "INVALID_REQUEST"
    assert rig.engine.requests == []


async def test_bad_input_leaves_the_server_serving():
    nonsense = (
        wire.PointRequest(),
        wire.PointRequest(object="bird", image=IMAGE, max_objects=-1),
        wire.PointRequest(object="bird", image=IMAGE, sampling={"temperature": float("nan")}),
        wire.PointRequest(object="bird", image=IMAGE, sampling={"top_p": float("inf")}),
        wire.PointRequest(object="bird", image=IMAGE, sampling={"max_tokens": 2**31 - 1}),
        wire.PointRequest(object="bird", image=IMAGE, spatial_refs=[{}] * 1000),
    )
    async with serving() as rig:
        for request in nonsense:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.vision.Point(request)
            assert (caught.value.code(), reason_of(caught.value)) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
            )
        assert (await rig.vision.CompleteQuery(COMPLETE_QUERY)).result.answer == "a kestrel"
