"""Connections that misbehave: vanished, stuck, slow, mute, or too many. None holds a page or holds up others."""

import asyncio
import itertools
import logging
import resource
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpc
import h2.events
import pytest
from google.protobuf.message import Message

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_runtime.api.events import TextChannel, TextDelta
from kestrel_runtime.api.requests import Query
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from tests.fakes import HOLD, FakeEngine, answers
from tests.journey.conftest import LiveServer
from tests.journey.http2 import COMPLETE_QUERY, QUERY, Http2Client, messages_in
from tests.journey.serving_process import ServingProcess, serving_process
from tests.journey.test_cancellation import endless
from tests.server.serving import serving

pytestmark = pytest.mark.usefixtures("warm_starts")

MIB = 2**20
NUM_IDLE = 1_000
NUM_DESCRIPTORS_LEFT = 60
MAX_WAIT_S = 60.0
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
QUICK = wire.CompleteQueryRequest(question="hi", sampling={"max_tokens": 2})


class Outcomes(logging.Handler):
    """How calls end, from the log, as soon as it says so."""

    def __init__(self) -> None:
        super().__init__()
        self._names: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._names.put_nowait(record.getMessage().split("outcome=")[1].split()[0])

    async def next(self) -> str:
        return await self._names.get()


@pytest.fixture
def outcomes() -> Iterator[Outcomes]:
    handler, log = Outcomes(), logging.getLogger("kestrel_grpc.calls")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers wait for the sign of life of a peer, in a hundredth of the time."""
    make_server: Callable[..., Any] = grpc.aio.server
    waits = ("grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms")

    def hastened(*, options: tuple[tuple[str, int], ...]) -> Any:
        assert set(waits) <= {name for name, _ in options}
        return make_server(options=[(name, value // 100 if name in waits else value) for name, value in options])

    monkeypatch.setattr(grpc.aio, "server", hastened)


class Wire:
    """A proxy between a client and a server; `cut` it, and neither side hears of the other, nor of the cut."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._listener.sockets[0].getsockname()
        yield f"{host}:{port}"
        self._listener.close()
        self.cut()
        for writer in self._writers:
            writer.transport.abort()

    def cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = writer, reader
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers += [to_server, server_writer]
        self._pumps += [
            asyncio.create_task(self._pump(from_server, server_writer)),
            asyncio.create_task(self._pump(server_reader, to_server)),
        ]

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)


@pytest.fixture
def standstill(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """After ten steps the engine's thread stands still, until this is set."""
    goes_on, num_steps, launch = threading.Event(), itertools.count(), StepRunner.launch

    def held(*arguments: Any) -> StepHandle:
        if next(num_steps) >= 10:
            goes_on.wait()
        return launch(*arguments)

    monkeypatch.setattr(StepRunner, "launch", held)
    yield goes_on
    goes_on.set()


@pytest.mark.usefixtures("impatient")
async def test_a_peer_that_vanishes_without_a_word_is_noticed_and_its_pages_come_back(
    live_server: LiveServer, outcomes: Outcomes, standstill: threading.Event
):
    assert live_server.server.port is not None
    line = Wire(live_server.server.port)
    async with line.open() as address, grpc.aio.insecure_channel(address) as channel:
        call = VisionServiceStub(channel).Query(endless(1))
        await call.read()
        line.cut()
        assert await outcomes.next() == "CANCELLED"  # before its answer can be complete
        standstill.set()
    await live_server.assert_empty()


async def test_a_slow_reader_delays_no_other_call_and_gets_its_whole_answer(live_server: LiveServer):
    question = endless(7)
    question.sampling.max_tokens = 100
    expected = [event async for event in live_server.stub.Query(question)]
    async with Http2Client.connected(live_server.address, window_bytes=64) as client:
        stream = await client.ask(QUERY, question)
        first = await client.next_data()
        await live_server.assert_empty()  # the pages are back, although most of the answer waits for its reader
        await client.acknowledge(first)
        body, trailers = await client.read(stream)
    assert trailers["grpc-status"] == "0"
    events = [wire.QueryResponse.FromString(message) for message in messages_in((first.data or b"") + body)]
    assert events[-1].completed.answer == expected[-1].completed.answer
    assert len(body) > 5 * 64


async def test_pings_that_come_all_at_once_end_no_call():
    # As after a minute in which one side had stood still.
    async with (
        serving(FakeEngine(lambda request: [HOLD, *answers(request)])) as live_server,
        Http2Client.connected(live_server.address) as client,
    ):
        stream = await client.ask(COMPLETE_QUERY, QUICK)
        await live_server.engine.num_submitted.acquire()
        await client.ping(20)
        async for event in client.events():
            if isinstance(event, h2.events.PingAckReceived):
                break
        live_server.engine.release()
        _, trailers = await client.read(stream)
    assert trailers["grpc-status"] == "0"


async def test_readers_that_never_read_hold_no_page(live_server: LiveServer):
    async with AsyncExitStack() as stack:
        for seed in range(8):
            client = await stack.enter_async_context(Http2Client.connected(live_server.address, window_bytes=0))
            question = endless(seed)
            question.sampling.max_tokens = 100
            await client.ask(QUERY, question)
        await live_server.assert_empty()


async def test_a_reader_that_never_reads_and_then_hangs_up_is_no_failure_of_ours(outcomes: Outcomes):
    # Far more than gRPC takes in for a stream that does not move: the server waits in the middle of a write.
    script = [answers(Query("hello"))[0], *(TextDelta("x" * MIB, TextChannel.ANSWER, 0, 1) for _ in range(8)), HOLD]
    async with serving(FakeEngine(lambda request: script)) as live_server:
        for _ in range(5):
            async with Http2Client.connected(live_server.address, window_bytes=1_000) as client:
                await client.ask(QUERY, endless(0))
                await client.next_data()
            assert await outcomes.next() == "CANCELLED"
        await live_server.engine.is_idle.wait()


async def test_a_storm_of_disconnects_leaves_nothing_behind(live_server: LiveServer):
    num_tasks = len(asyncio.all_tasks())

    async def leave_abruptly(number: int) -> None:
        async with Http2Client.connected(live_server.address) as client:
            await client.ask(QUERY, endless(number))
            if number % 3:  # the others are gone before they have heard anything
                for _ in range(number % 5):
                    await client.acknowledge(await client.next_data())

    for _ in range(3):
        await asyncio.gather(*(leave_abruptly(number) for number in range(100)))
    await live_server.assert_empty()
    for _ in range(100):
        await live_server.stub.CompleteQuery(QUICK)
        if len(asyncio.all_tasks()) <= num_tasks + 1:
            return
    raise AssertionError(asyncio.all_tasks())


@contextmanager
def descriptor_limit(soft: int) -> Iterator[None]:
    """For this process and those that it starts."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


async def test_a_thousand_idle_connections_cost_little_and_delay_no_call():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        with descriptor_limit(NUM_IDLE // 2):  # which the server raises by itself
            server = stack.enter_context(serving_process())
        stack.enter_context(descriptor_limit(most))
        async with grpc.aio.insecure_channel(server.address) as channel:
            ask: Callable[[Message], Any] = VisionServiceStub(channel).CompleteQuery
            await ask(QUICK)
            descriptors, rss_bytes = server.num_descriptors, server.rss_bytes
            async with AsyncExitStack() as clients:
                for _ in range(NUM_IDLE // 2):
                    client = await clients.enter_async_context(Http2Client.connected(server.address))
                    await anext(client.events())  # the server has taken the connection
                    await clients.enter_async_context(mute_connection(server))
                await ask(QUICK)
                assert server.num_descriptors <= descriptors + NUM_IDLE
                assert server.rss_bytes <= rss_bytes + 100 * MIB
            while server.num_descriptors > descriptors:  # they are closed, and each turn gives it time to notice
                await ask(QUICK)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a connection has been idle")
async def test_more_idle_connections_than_descriptors_prevent_no_connection_and_end_no_call():
    with serving_process() as server:
        limit = server.num_descriptors + NUM_DESCRIPTORS_LEFT
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        async with AsyncExitStack() as stack:
            long_answer = (await new_caller(stack, server)).Query(endless(1))
            await long_answer.read()
            for number in range(2 * NUM_DESCRIPTORS_LEFT):
                client = mute_connection(server) if number % 2 else Http2Client.connected(server.address)
                await stack.enter_async_context(client)
            for _ in range(3):
                stub = await new_caller(stack, server)
                assert (await stub.CompleteQuery(QUICK, timeout=MAX_WAIT_S)).HasField("result")
            assert long_answer.cancel() or await long_answer.code() is grpc.StatusCode.OK, "it has been cut off"


async def new_caller(stack: AsyncExitStack, server: ServingProcess) -> Any:
    """A connection of its own."""
    channel = grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION)
    return VisionServiceStub(await stack.enter_async_context(channel))


@asynccontextmanager
async def mute_connection(server: ServingProcess) -> AsyncIterator[None]:
    """A connection on which nothing is ever said."""
    host, port = server.address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    yield
    writer.transport.abort()
