"""What the channel arguments do, seen by peers that speak HTTP/2 by hand. A key that gRPC ignores fails a test."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import h2.errors
import h2.events
import pytest

from kestrel_client.v1 import image_service_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.frontends.grpc.ports import MAX_CONCURRENT_STREAMS, MAX_PING_STRIKES, UNREAD_BYTES, server_options
from tests.fakes import HOLD, FakeEngine, answers
from tests.journey.http2 import COMPLETE_QUERY, Http2Client
from tests.server.serving import Serving, reason_of, serving
from tests.server.triton_calls import TritonStub, infer

MIB = 2**20
NUM_RESETS = 3000
NO_RETRIES = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
QUICK = wire.CompleteQueryRequest(question="?")
LONG = wire.CompleteQueryRequest(question="What is it? " * 100)


def waits(request: Any) -> list[object]:
    """A script that says nothing until it is released."""
    return [HOLD, *answers(request)]


@asynccontextmanager
async def connected(rig: Serving) -> AsyncIterator[Http2Client]:
    """A connection on which the server's settings have been read."""
    async with Http2Client.connected(rig.address) as client:
        await client.greeted()
        yield client


def test_every_argument_is_set_once_and_known_to_grpc():
    (compiled,) = Path(grpc.__file__).parent.rglob("cygrpc*.so")
    library = compiled.read_bytes()
    names = [name for name, _ in server_options(MIB)]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.encode() not in library] == []


async def test_a_connection_is_told_how_many_calls_it_may_have_open():
    async with serving() as rig, connected(rig) as client:
        assert client.max_concurrent_streams == MAX_CONCURRENT_STREAMS


async def test_calls_beyond_that_number_wait_in_the_client_and_are_answered():
    async with serving() as rig:
        calls = [rig.vision.CompleteQuery(QUICK) for _ in range(2 * MAX_CONCURRENT_STREAMS)]
        assert all([(await call).result.answer == "a kestrel" for call in calls])


async def test_calls_that_are_reset_as_soon_as_they_are_made_disturb_no_other_connection():
    async with serving() as rig, connected(rig) as client:
        for _ in range(20):
            for _ in range(MAX_CONCURRENT_STREAMS):
                await client.reset(await client.ask(COMPLETE_QUERY, QUICK))
            assert (await rig.vision.CompleteQuery(QUICK)).result.answer == "a kestrel"


async def test_a_flood_of_resets_costs_no_call_of_another_connection():
    async with serving() as rig, connected(rig) as client:
        for _ in range(NUM_RESETS):
            await client.reset(await client.begin(COMPLETE_QUERY))
        calls = [rig.vision.CompleteQuery(QUICK) for _ in range(20)]
        assert all([(await call).result.answer == "a kestrel" for call in calls])


@pytest.mark.parametrize(
    ("num_connections", "calls_each", "are_cancelled"),
    [(1, 1000, False), (1, 1000, True), (64, 16, False), (8, 125, True)],
    ids=["one", "one that cancels half", "many", "many that cancel half"],
)
async def test_ordinary_clients_are_refused_nowhere(num_connections: int, calls_each: int, are_cancelled: bool):
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_often(address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=NO_RETRIES) as channel:
            stub: Any = VisionServiceStub(channel)
            numbers = iter(range(calls_each))

            async def call() -> None:
                for number in numbers:
                    asked = stub.CompleteQuery(QUICK)
                    if are_cancelled and number % 2:
                        await asyncio.sleep(0)
                        asked.cancel()
                    codes[await asked.code()] += 1

            await asyncio.gather(*(call() for _ in range(MAX_CONCURRENT_STREAMS)))

    async with serving() as rig:
        await asyncio.gather(*(call_often(rig.address) for _ in range(num_connections)))
    assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
    num_calls = num_connections * calls_each
    assert codes[grpc.StatusCode.OK] >= (num_calls // 2 if are_cancelled else num_calls)


@pytest.mark.parametrize("level", [1, 6, 9])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_message_is_refused_and_not_decompressed(encoding: str, level: int):
    content = LONG.SerializeToString() if level == 9 else bytes(8 * MIB)
    body = gzip.compress(content, level) if encoding == "gzip" else zlib.compress(content, level)
    async with serving(metrics_port=0) as rig, connected(rig) as client:
        stream = await client.begin(COMPLETE_QUERY, grpc_encoding=encoding)
        await client.send(stream, struct.pack(">BI", 1, len(body)) + body, ends=True)
        _, trailers = await client.read(stream)
        metrics = rig.server.metrics_text().decode()
    assert int(trailers["grpc-status"]) == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert rig.engine.requests == []
    assert f'kestrel_requests_failed_total{{reason="UNSUPPORTED",rpc_method="{COMPLETE_QUERY[1:]}"}} 1.0' in metrics


async def test_a_client_that_asks_for_compression_is_told_so():
    async with serving() as rig:
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.vision.CompleteQuery(LONG, compression=compression)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert reason_of(caught.value) == "UNSUPPORTED"
        # Too small to be compressed: the encoding is announced, and not used.
        await rig.vision.CompleteQuery(QUICK, compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("service", ["vision", "triton", "images"])
async def test_a_message_above_the_limit_is_refused_with_the_reason(service: str):
    limits = {"max_message_bytes": 300_000, "max_receiving_bytes": 3_000_000}
    async with serving(metrics_port=0, **limits) as rig:

        async def ask(num_bytes: int) -> grpc.aio.AioRpcError | None:
            data = bytes(num_bytes)
            try:
                if service == "vision":
                    await rig.vision.CompleteQuery(wire.CompleteQueryRequest(question="?", image={"data": data}))
                elif service == "triton":
                    request = infer(SKILL="query", QUESTION="?")
                    request.raw_input_contents.append(data)
                    await TritonStub(rig.channel).ModelInfer(request)
                else:
                    await rig.images.PutImage(image_service_pb2.PutImageRequest(data=data))
            except grpc.aio.AioRpcError as error:
                return error
            return None

        error = await ask(300_001)
        assert error is not None
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(error) == "MESSAGE_TOO_LARGE"
        assert 'reason="MESSAGE_TOO_LARGE"' in rig.server.metrics_text().decode()
        # Far above it gRPC refuses what would take too much memory.
        error = await ask(500_000)
        assert error is not None
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 'reason="INVALID_REQUEST"' not in rig.server.metrics_text().decode()


async def test_a_caller_that_hangs_up_before_its_message_has_come_has_cancelled_the_call():
    async with serving(metrics_port=0) as rig, connected(rig) as client:
        stream = await client.begin(COMPLETE_QUERY)
        await client.send(stream, struct.pack(">BI", 0, 1000) + b"a part")
        await client.read(await client.ask(COMPLETE_QUERY, QUICK))  # so the first one has begun
        call = next(iter(rig.server._groups.inference.open_calls))
        await client.reset(stream)
        await asyncio.wait((call,))
        metrics = rig.server.metrics_text().decode()
    assert f'kestrel_requests_failed_total{{reason="CANCELLED",rpc_method="{COMPLETE_QUERY[1:]}"}} 1.0' in metrics


async def test_what_comes_before_it_is_read_is_bounded():
    async with serving() as rig, connected(rig) as client:
        assert client.window_bytes(await client.begin(COMPLETE_QUERY)) == UNREAD_BYTES


class Tap:
    """A proxy in front of a server that counts the pings of the client's connection."""

    def __init__(self, server_address: str) -> None:
        self._server_address = server_address
        self._pings = asyncio.Semaphore(0)
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, server_address: str) -> AsyncIterator[Tap]:
        tap = cls(server_address)
        listener = await asyncio.start_server(tap._accept, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        tap.address = f"{host}:{port}"
        try:
            yield tap
        finally:
            listener.close()
            for task in tap._tasks:
                task.cancel()
            await asyncio.gather(*tap._tasks, return_exceptions=True)

    async def has_seen_pings(self, count: int) -> None:
        for _ in range(count):
            await self._pings.acquire()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._server_address.rsplit(":", 1)
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        for pump in (self._pump_frames(reader, server_writer), self._pump(server_reader, writer)):
            self._tasks.add(asyncio.create_task(pump))

    async def _pump_frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing_writer(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
            while True:
                head = await reader.readexactly(9)
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
                kind, flags = head[3], head[4]
                if kind == 6 and not flags & 1:  # a ping, and no answer to one
                    self._pings.release()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing_writer(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)


@contextmanager
def closing_writer(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.transport.abort()


async def closing(client: Http2Client) -> h2.events.ConnectionTerminated:
    """How the server closes a connection."""
    async for event in client.events():
        if isinstance(event, h2.events.ConnectionTerminated):
            return event
    raise ConnectionError("the connection was closed without a word")


async def test_a_flood_of_pings_closes_its_connection():
    async with serving() as rig, connected(rig) as client:
        # In one write: if the server closes before the last of several, what it says may be lost.
        await client.ping(MAX_PING_STRIKES + 10)
        assert (await closing(client)).error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM


@pytest.fixture
def fast_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings may come after a ten thousandth of the time, and not one of them earlier."""
    make_server: Callable[..., Any] = grpc.aio.server
    replaced = {"grpc.http2.min_ping_interval_without_data_ms": 1, "grpc.http2.max_ping_strikes": 1}

    def hastened(*, options: tuple[tuple[str, int], ...]) -> Any:
        assert replaced.keys() <= {name for name, _ in options}
        return make_server(options=[(name, replaced.get(name, value)) for name, value in options])

    monkeypatch.setattr(grpc.aio, "server", hastened)


@pytest.mark.usefixtures("fast_pings")
async def test_a_client_that_pings_at_the_allowed_interval_gets_its_answer_after_a_long_wait():
    pings = (("grpc.keepalive_time_ms", 10), ("grpc.keepalive_timeout_ms", 60_000))
    unlimited = (("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1))
    async with (
        serving(FakeEngine(waits)) as rig,
        Tap.open(rig.address) as tap,
        grpc.aio.insecure_channel(tap.address, options=(*pings, *unlimited)) as channel,
    ):
        call = VisionServiceStub(channel).CompleteQuery(QUICK)
        await rig.engine.num_submitted.acquire()
        await tap.has_seen_pings(4)  # the client sends one a second at most
        rig.engine.release()
        assert (await call).result.answer == "a kestrel"
