"""A request that ends the process of its engine, among others: it alone is refused, and nothing is left behind."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from PIL import Image

from bench.harness.poison import SEED, VARIABLE, WAYS
from kestrel_client import AsyncClient
from kestrel_client.errors import KestrelClientError
from kestrel_client.results import Load
from tests.server.multiprocess.supervision.host_process import MAX_WAIT_S, host_process

pytestmark = pytest.mark.usefixtures("warm_starts")

NUM_OTHERS, NUM_CLIENTS, NUM_PAGES = 63, 8, 600
REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_REFUSED")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (60 * number, 255 - 60 * number, 99)).save(file, "PNG")
    return file.getvalue()


PICTURES = [picture(number) for number in range(3)]


def is_streamed(number: int) -> bool:
    """Whether the answer comes as a stream, which may break off."""
    return number % 3 == 0


async def ask(client: AsyncClient, number: int) -> str:
    """One of 63 questions; every fourth is about a picture."""
    image = None if number % 4 else PICTURES[number % 3]
    question = f"What is {number}?"
    if not is_streamed(number):
        return (await client.complete_query(image, question, **GREEDY)).answer
    return "".join([piece async for piece in client.query(image, question, **GREEDY)])


@asynccontextmanager
async def clients(address: str) -> AsyncIterator[list[AsyncClient]]:
    """Whose calls wait until a core serves: for a while there is none."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(AsyncClient(address, timeout_s=MAX_WAIT_S, wait_for_ready=True))
            for _ in range(NUM_CLIENTS)
        ]


async def take_poison(client: AsyncClient) -> tuple[grpc.StatusCode, str]:
    """How a request ends that ends every core that runs it."""
    with pytest.raises(KestrelClientError) as caught:
        await client.complete_query(None, "Who are you?", temperature=0.0, max_tokens=4, seed=SEED)
    return caught.value.code, caught.value.reason


async def ask_others(asked: list[AsyncClient]) -> list[Any]:
    """The answers to all questions, or their errors."""
    calls = (ask(asked[number % NUM_CLIENTS], number) for number in range(NUM_OTHERS))
    return await asyncio.gather(*calls, return_exceptions=True)


async def load_without_calls(client: AsyncClient) -> Load:
    """The load of all cores, once it is nothing; else as it is after 200 more requests."""
    load = await client.load()
    for _ in range(200):  # each takes whole steps of an engine
        if not (load.running_request_count or load.waiting_request_count or load.used_page_count):
            break
        await client.complete_query(None, "hi", max_tokens=1)
        load = await client.load()
    return load


async def test_a_request_that_ends_its_engine_is_refused_and_the_others_are_answered() -> None:
    program = (
        "import os\n"
        "from bench.harness.poison import poison_cores\n"
        f"os.environ[{VARIABLE!r}] = {WAYS[0]!r}\n"
        "poison_cores()"
    )
    options = ("--frontends", "2", "--devices", "cpu,cpu", "--kv-pages", str(NUM_PAGES))
    with host_process(*options, program=program) as host:
        async with clients(await asyncio.to_thread(lambda: host.address)) as asked:
            known = await ask_others(asked)
            assert all(isinstance(answer, str) for answer in known), known
            ends, poison = await asyncio.gather(ask_others(asked), take_poison(asked[-1]))
            assert poison == REFUSED
            for number, (answer, end) in enumerate(zip(known, ends, strict=True)):
                has_broken_off = isinstance(end, KestrelClientError) and end.code is grpc.StatusCode.UNAVAILABLE
                assert end == answer or (is_streamed(number) and has_broken_off), (number, end)
            for index in (0, 1):
                await asyncio.to_thread(host.wait_for, f"core-{index}.2 is ready")
            load = await load_without_calls(asked[0])
            assert (load.running_request_count, load.waiting_request_count, load.used_page_count) == (0, 0, 0)
            assert load.page_count == 2 * NUM_PAGES
            assert [await take_poison(client) for client in asked] == [REFUSED] * NUM_CLIENTS
        assert len([line for line in host.lines if "is started again" in line["message"]]) == 2
        assert await asyncio.to_thread(host.end) == 0
