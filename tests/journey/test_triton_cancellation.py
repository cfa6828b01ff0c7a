"""Clients of Triton who leave. None of their requests leaves a page behind."""

import asyncio
import random
from typing import Any

from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD3_SMALL
from tests.server.triton_calls import TritonStub, infer

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
LONG: dict[str, Any] = {"TEMPERATURE": 50.0, "TOP_P": 1.0, "MAX_TOKENS": 3000}


def request_of(number: int) -> Any:
    if number % 4:
        return infer(f"{number}", SKILL="query", QUESTION="hello", STREAM=bool(number % 2), **LONG)
    return infer(f"{number}", SKILL="caption", IMAGE=IMAGE, STREAM=True, **LONG)


async def test_streams_that_are_cancelled_midway_leave_no_page_behind(live_server: LiveServer):
    chance = random.Random(3)
    triton = TritonStub(live_server.channel)

    async def leave_midway(number: int) -> None:
        call = triton.ModelStreamInfer()
        for index in range(4):
            await call.write(request_of(number + index))
        for _ in range(chance.randrange(5)):  # 0: before the server has said anything
            await call.read()
        call.cancel()

    for batch in range(8):
        await asyncio.gather(*(leave_midway(5 * batch + number) for number in range(5)))
    await live_server.assert_empty()


async def test_single_requests_that_are_cancelled_leave_no_page_behind(live_server: LiveServer):
    triton = TritonStub(live_server.channel)
    calls = [triton.ModelInfer(infer(SKILL="query", QUESTION="hello", **LONG)) for _ in range(20)]
    await TritonStub(live_server.channel).ModelInfer(infer(SKILL="query", QUESTION="hello", MAX_TOKENS=2))
    for call in calls:
        call.cancel()
    await live_server.assert_empty()
