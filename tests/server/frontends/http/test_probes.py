"""The port for machines, asked over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import suppress

import pytest

from kestrel_grpc.calls.readiness import Readiness
from kestrel_grpc.frontends.http import connection as connection_module
from kestrel_grpc.frontends.http.probes import MAX_CONNECTIONS, ProbePort, Probes
from kestrel_grpc.process.free_ports import PortUnavailable
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import FakeEngine

MAX_WAIT_S = 60.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def new_port(engine: FakeEngine, hosts: Collection[str] = ()) -> ProbePort:
    readiness = Readiness(engine)

    async def scrape() -> bytes:
        return b"answer 42.0\n"

    return ProbePort(
        Probes(lambda: engine.status is not EngineStatus.DEAD, lambda: readiness.is_ready, scrape), hosts
    )


@pytest.fixture
async def port(engine) -> AsyncIterator[int]:
    probes = new_port(engine)
    await probes.start("127.0.0.1", 0)
    assert probes.port is not None
    yield probes.port
    await probes.close()
    await probes.close()


async def get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), MAX_WAIT_S)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_metrics_are_the_text_that_is_given(port):
    assert await get(port, "/metrics") == (200, "answer 42.0\n")
    assert (await get(port, "/"))[0] == 404


async def ask(port: int | None, head: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nconnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), MAX_WAIT_S)
    writer.close()
    return int(answer.split()[1])


METRICS = "GET /metrics HTTP/1.1\r\nhost: "


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (METRICS + "127.0.0.1:9464", 200),
        (METRICS + "localhost:9464", 200),
        (METRICS + "[::1]:9464", 200),
        (METRICS + "kestrel.lan:9464", 200),
        ("GET /metrics HTTP/1.0", 200),
        ("HEAD /metrics HTTP/1.1\r\nhost: localhost", 200),
        (METRICS + "evil.example:9464", 403),
        (METRICS + "localhost.evil.example", 403),
        (METRICS + "localhost\r\norigin: http://localhost", 403),
        (METRICS + "localhost\r\norigin: null", 403),
        (METRICS + "localhost\r\nhost: localhost", 400),
        ("GET /metrics HTTP/1.1", 400),
        ("GET /readyz HTTP/1.1\r\nhost: evil.example\r\norigin: http://evil.example", 200),
    ],
)
async def test_pages_of_other_sites_read_no_metrics_of_this_machine(engine, head, status):
    probes = new_port(engine, hosts=("kestrel.lan",))
    await probes.start("127.0.0.1", 0)
    assert await ask(probes.port, head) == status
    await probes.close()


async def test_prometheus_calls_a_port_that_others_reach_by_any_name(engine):
    probes = new_port(engine)
    await probes.start("0.0.0.0", 0)
    assert await ask(probes.port, METRICS + "kestrel:9464") == 200
    assert await ask(probes.port, METRICS + "kestrel:9464\r\norigin: http://kestrel:9464") == 403
    await probes.close()


async def test_readiness_and_life_follow_the_engine(port, engine):
    async def statuses() -> list[int]:
        await asyncio.sleep(0)  # the news comes through the event loop
        return [(await get(port, path))[0] for path in ("/readyz", "/healthz", "/livez")]

    assert await statuses() == [200, 200, 200]
    engine.become(EngineStatus.RECOVERING)
    assert await statuses() == [503, 200, 200]
    engine.become(EngineStatus.DEAD)
    assert await statuses() == [503, 503, 503]


async def test_beyond_a_number_of_connections_the_oldest_are_closed(port):
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 8)]
    assert (await get(port, "/readyz"))[0] == 200
    for reader, _ in connections[:8]:
        assert await asyncio.wait_for(reader.read(1), MAX_WAIT_S) == b""
    for _, writer in connections:
        writer.close()


async def test_a_client_that_sends_a_byte_at_a_time_has_no_more_time(port, monkeypatch):
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.ensure_future(reader.read())
    writer.write(b"GET /readyz HTTP/1.1\r\nx: ")
    while not answer.done():
        writer.write(b"y")
        with suppress(ConnectionError):
            await writer.drain()
        await asyncio.wait((answer,), timeout=0.02)
    with suppress(ConnectionResetError):  # closing with unread bytes is a reset
        assert b"408" in await answer
    writer.close()


async def test_a_port_in_use_is_an_error(port, engine):
    with pytest.raises(PortUnavailable, match="in use"):
        await new_port(engine).start("127.0.0.1", port)


async def test_a_closed_port_answers_no_more(engine):
    probes = new_port(engine)
    await probes.start("127.0.0.1", 0)
    assert probes.port is not None
    await probes.close()
    with pytest.raises(ConnectionRefusedError):
        await get(probes.port, "/readyz")
