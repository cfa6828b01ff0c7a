"""Callers who leave: by cancelling, by deadline, or by vanishing. None of them leaves a page behind."""

import asyncio
import random
import signal
import subprocess
import sys

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD3_SMALL

pytestmark = pytest.mark.usefixtures("warm_starts")

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()


def endless(seed: int) -> wire.QueryRequest:
    """A question whose answer has 3,000 tokens, whatever is drawn: the token that ends it cannot be."""
    no_end = [{"token_id": 0, "bias": -100.0}]
    sampling = {"temperature": 5.0, "top_p": 1.0, "max_tokens": 3000, "seed": seed, "logit_bias": no_end}
    return wire.QueryRequest(question="hello", sampling=sampling)


async def test_two_hundred_cancelled_requests_leave_no_page_behind(live_server: LiveServer):
    chance = random.Random(3)
    background = [live_server.stub.Query(endless(seed)) for seed in range(3)]

    async def leave_midway(number: int) -> None:
        if number % 5:
            call = live_server.stub.Query(endless(number))
        else:
            call = live_server.stub.Caption(wire.CaptionRequest(image={"data": IMAGE}))
        for _ in range(chance.randrange(5)):  # 0: before the server has said anything
            await call.read()
        call.cancel()

    for batch in range(20):
        await asyncio.gather(*(leave_midway(10 * batch + number) for number in range(10)))
    for call in background:
        call.cancel()
    await live_server.assert_empty()


async def test_outlines_cancelled_early_and_late_leave_no_page_behind(live_server: LiveServer):
    request = wire.StreamSegmentRequest(object="hello", image={"data": IMAGE}, sampling={"temperature": 50.0})

    async def leave(num_messages: int) -> None:
        call = live_server.stub.StreamSegment(request)
        for _ in range(num_messages):
            await call.read()
        call.cancel()

    await asyncio.gather(*(leave(number % 2) for number in range(24)))
    await live_server.assert_empty()


async def test_deadlines_at_every_stage_leave_no_page_behind(live_server: LiveServer):
    async def wait_until_too_late(number: int) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in live_server.stub.Query(endless(number), timeout=0.002 * number + 0.001):
                pass
        # Or turned away at once, where half are in and the others can tell that they would come too late.
        is_hopeless = "longer than this request may wait" in (caught.value.details() or "")
        assert is_hopeless or caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    await asyncio.gather(*(wait_until_too_late(number) for number in range(60)))
    await live_server.assert_empty()


async def test_a_client_that_closes_its_channel_leaves_no_page_behind(live_server: LiveServer):
    for number in range(5):
        channel = live_server.new_channel()
        calls = [live_server.stub.Query(endless(number)) for _ in range(3)]
        await asyncio.gather(*(call.read() for call in calls))
        await channel.close()
        for call in calls:
            call.cancel()
    await live_server.assert_empty()


async def test_a_client_that_is_killed_leaves_no_page_behind(live_server: LiveServer):
    program = (
        "import sys\n"
        "from kestrel_client import Client\n"
        "client = Client(sys.argv[1])\n"
        "stream = client.query(None, 'hello', temperature=5.0, max_tokens=3000, logit_bias={0: -100.0})\n"
        "for piece in stream:\n"
        "    print(len(piece), flush=True)\n"
    )
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, live_server.address, stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    assert await client.stdout.readline()  # it is in the middle of its answer
    assert live_server.engine.load().num_used_pages > 0
    client.send_signal(signal.SIGKILL)
    await client.communicate()
    await live_server.assert_empty()
