"""Servers in processes of their own that are told to go: nothing accepted is lost, and no caller sees a gap."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kestrel_client import AsyncClient
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.journey.serving_process import FEW_PAGES

pytestmark = pytest.mark.usefixtures("warm_starts")

EOF: Any = vars(grpc.aio)["EOF"]
"""What `read` returns at the end of a stream; the type stubs do not list it."""
COMMAND = (sys.executable, "-m", "kestrel_grpc", "serve", "--log-format", "json", *FEW_PAGES)


class Replica:
    """A server in a process of its own, followed through what it logs."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.address = address
        self.outcomes: Counter[str] = Counter()
        """How calls have ended, by the reason that the server logged."""
        self._process = process
        self._has_answered = asyncio.Event()
        self._following = asyncio.ensure_future(self._follow())

    @classmethod
    @asynccontextmanager
    async def start(cls, *options: str, port: str = "0") -> AsyncIterator[Replica]:
        """Serve the built-in model; killed at the end of the block where it has not ended by itself."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--port", port, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            assert " on " in line, "the server did not start"
            replica = cls(process, line.split(" on ")[1].split()[0])
            yield replica
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    @property
    def port(self) -> str:
        return self.address.split(":")[1]

    def tell_to_go(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        """Its exit status, once it has ended."""
        await self._following
        return await self._process.wait()

    async def has_answered(self) -> None:
        """Returns once it has answered a call."""
        await self._has_answered.wait()

    async def _follow(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            outcome = json.loads(line).get("outcome")
            if outcome is not None:
                self.outcomes[outcome] += 1
            if outcome == "OK":
                self._has_answered.set()


def long_question(seed: int, max_tokens: int) -> wire.QueryRequest:
    """The answer goes on until it has that many tokens."""
    no_end = [{"token_id": 0, "bias": -100.0}]
    sampling = {"temperature": 5.0, "top_p": 1.0, "max_tokens": max_tokens, "seed": seed, "logit_bias": no_end}
    return wire.QueryRequest(question="hello", sampling=sampling)


async def told(stream: Any, on_begin: Callable[[], None] = lambda: None) -> tuple[list[str], grpc.StatusCode]:
    """The kinds of a stream's messages, and how it ends; a status waits behind the messages before it."""
    kinds: list[str] = []
    try:
        while (message := await stream.read()) is not EOF:
            kinds.append(message.WhichOneof("event"))
            if len(kinds) == 1:
                on_begin()
    except grpc.aio.AioRpcError as error:
        return kinds, error.code()
    return kinds, grpc.StatusCode.OK


async def ask_until_refused(stub: Any, seed: int, on_begin: Callable[[], None]) -> int:
    """One stream after the other; how many were answered. Those that begin must be."""
    for number in itertools.count():
        kinds, code = await told(stub.Query(long_question(seed, max_tokens=16)), on_begin)
        if code is not grpc.StatusCode.OK:
            assert (kinds, code) == ([], grpc.StatusCode.UNAVAILABLE)
            return number
        assert kinds[-1] == "completed"
    raise AssertionError("counting has an end")


async def test_sigterm_under_load_loses_nothing_that_was_accepted():
    num_callers = 8
    begun = asyncio.Semaphore(0)
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(
            Replica.start("--withdrawal-delay", "0.5", "--max-batch-size", "4", "--drain-timeout", "60")
        )
        # No retries and no balancing: each call meets this server, and its own fate.
        options = (("grpc.enable_retries", 0),)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(replica.address, options))
        stub: Any = VisionServiceStub(channel)
        callers = [
            asyncio.ensure_future(ask_until_refused(stub, seed, begun.release)) for seed in range(num_callers)
        ]
        for _ in range(num_callers + 4):  # all callers have begun, and the load goes on
            await begun.acquire()
        replica.tell_to_go()
        num_answered = sum(await asyncio.gather(*callers))
        assert await replica.end() == 0
    assert num_answered >= num_callers
    assert replica.outcomes["OK"] == num_answered
    assert set(replica.outcomes) <= {"OK", "DRAINING"}


async def test_a_second_sigterm_ends_the_process_now():
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(
            Replica.start("--withdrawal-delay", "3600", "--drain-timeout", "3600")
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(replica.address))
        stub: Any = VisionServiceStub(channel)
        streams = [stub.Query(long_question(seed, max_tokens=3000)) for seed in range(8)]
        for stream in streams:
            assert (await stream.read()).HasField("started")
        health: Any = HealthStub(channel)
        watch = health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        replica.tell_to_go()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        replica.tell_to_go()
        assert await replica.end() == 0
        for stream in streams:
            assert (await told(stream))[1] is grpc.StatusCode.UNAVAILABLE


class Caller:
    """Asks for streamed and whole answers in turn until it is told to stop. Any failure is raised by `asking`."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.is_over = False
        self.num_answers = 0
        self.may_ask = asyncio.Event()
        """Cleared while nothing can happen to a call, which would only take time from the start of a server."""
        self.may_ask.set()
        self._has_answered = asyncio.Event()
        self.asking = asyncio.ensure_future(self._ask(client, seed))

    async def has_two_more(self) -> None:
        """Returns once two more calls were answered."""
        wanted = self.num_answers + 2
        while self.num_answers < wanted:
            self._has_answered.clear()
            await self._has_answered.wait()

    async def _ask(self, client: AsyncClient, seed: int) -> None:
        drawn: dict[str, Any] = {"temperature": 50.0, "top_p": 1.0, "seed": seed}
        while not self.is_over:
            await self.may_ask.wait()
            if self.num_answers % 2:
                await client.complete_query(None, "hello", max_tokens=8, **drawn)
            else:
                await client.query(None, "hello", max_tokens=16, **drawn).result()
            self.num_answers += 1
            self._has_answered.set()


async def test_a_rolling_restart_of_two_replicas_fails_no_call():
    options = ("--withdrawal-delay", "1")
    async with AsyncExitStack() as stack:

        async def start(port: str = "0") -> Replica:
            return await stack.enter_async_context(Replica.start(*options, port=port))

        replicas: list[Replica] = list(await asyncio.gather(start(), start()))
        addresses = "ipv4:" + ",".join(replica.address for replica in replicas)
        client = await stack.enter_async_context(AsyncClient(addresses))
        callers = [Caller(client, seed) for seed in range(2)]
        asking = [caller.asking for caller in callers]
        for replica in replicas:
            await unless_failed(asking, replica.has_answered())
        for replica in list(replicas):
            replica.tell_to_go()
            assert await unless_failed(asking, replica.end()) == 0
            for caller in callers:  # by the other one alone
                await unless_failed(asking, caller.has_two_more())
                caller.may_ask.clear()
            successor = await unless_failed(asking, start(replica.port))
            for caller in callers:
                caller.may_ask.set()
            await unless_failed(asking, successor.has_answered())
            replicas.append(successor)
        for caller in callers:
            caller.is_over = True
        await asyncio.gather(*asking)
    assert all(replica.outcomes["OK"] for replica in replicas)


async def unless_failed(callers: Sequence[asyncio.Future[None]], step: Awaitable[Any]) -> Any:
    """The step's result. A caller that fails meanwhile fails the test at once."""
    doing = asyncio.ensure_future(step)
    await asyncio.wait((doing, *callers), return_when=asyncio.FIRST_COMPLETED)
    for caller in callers:
        if caller.done():
            caller.result()
    return await doing


NEVER_LETS_GO = """
import asyncio, grpc.aio, sys
from kestrel_grpc.__main__ import main

make_server = grpc.aio.server

def holding(**options):
    server = make_server(**options)
    server.stop = lambda grace: asyncio.Event().wait()
    return server

grpc.aio.server = holding
sys.exit(main(["serve", "--port", "0", "--withdrawal-delay", "0"]))
"""
"""A server whose connections gRPC never lets go of."""


def test_a_server_whose_connections_do_not_end_ends_with_success():
    with subprocess.Popen(
        [sys.executable, "-c", NEVER_LETS_GO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert " on " in process.stdout.readline(), "the server did not start"
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log


async def test_a_server_that_does_not_serve_yet_goes_at_once():
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--port", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert b"loaded moondream-nano" in await process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    printed, logged = await process.communicate()
    assert (process.returncode, printed) == (0, b"")
    assert {json.loads(line)["level"] for line in logged.splitlines()} <= {"info"}
