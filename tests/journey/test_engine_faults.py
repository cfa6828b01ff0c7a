"""The engine thread ends or hangs in a serving process: health says so, callers are told, the process ends."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.journey.faulty_serving import SEED
from tests.server.serving import EOF, reason_of

pytestmark = pytest.mark.usefixtures("warm_starts")

MAX_WAIT_S = 120.0


def question(seed: int) -> wire.QueryRequest:
    """Its answer has 3,000 tokens, whatever is drawn: the token that ends it cannot be."""
    no_end = [{"token_id": 0, "bias": -100.0}]
    sampling = {"temperature": 5.0, "top_p": 1.0, "max_tokens": 3000, "seed": seed, "logit_bias": no_end}
    return wire.QueryRequest(question="hello", sampling=sampling)


async def end_of(stream: Any) -> tuple[grpc.StatusCode, str]:
    try:
        while await stream.read() is not EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), reason_of(error)
    return grpc.StatusCode.OK, ""


@asynccontextmanager
async def serving(fault: str, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """A server in a process of its own, and a channel to it. Killed where it has not ended by itself."""
    command = (sys.executable, "-m", "tests.journey.faulty_serving", fault, "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            line = (await process.stdout.readline()).decode()
            assert " on " in line, "the server did not start"
            # No retries: the fate of each call is to be seen.
            options_of_channel = (("grpc.enable_retries", 0),)
            async with grpc.aio.insecure_channel(line.split(" on ")[1].split()[0], options_of_channel) as channel:
                yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    "fault",
    [
        "hang",
        "SystemExit",
        "KeyboardInterrupt",
        pytest.param(
            "hang on the device", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
async def test_a_dead_or_hung_engine_thread_ends_the_process_and_every_call(fault: str):
    async with serving(fault, "--step-timeout", "3") as (process, channel):
        vision: Any = VisionServiceStub(channel)
        health: Any = HealthStub(channel)
        watch = health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        bystander = vision.Query(question(1))
        assert (await bystander.read()).HasField("started")
        poison = vision.Query(question(SEED))
        for stream in (poison, bystander):
            assert await end_of(stream) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        _, logged = await process.communicate()
        assert process.returncode == 1
    text = logged.decode()
    hangs = fault.startswith("hang")
    assert ("no progress for 3 s (engine thread" in text) == hangs
    assert "thread kestrel-engine" in text if hangs else fault in text
    assert "hello" not in text


async def test_sigterm_while_a_step_hangs_ends_the_process_in_time():
    async with serving("hang", "--withdrawal-delay", "0", "--drain-timeout", "0.5") as (process, channel):
        poison = VisionServiceStub(channel).Query(question(SEED))
        assert (await poison.read()).HasField("started")
        started = time.monotonic()
        process.terminate()
        assert (await end_of(poison))[0] is grpc.StatusCode.UNAVAILABLE
        await process.communicate()
        # Half a second for running requests, five for the engine thread, two for what is being sent.
        assert time.monotonic() - started < 20.0
        assert process.returncode == 0
