"""The awaiting client, against a canned server."""

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.rpc import code_pb2

from kestrel_client import (
    AsyncClient,
    AsyncSegmentStream,
    AsyncTextStream,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Point,
    SegmentStream,
    TextChannel,
    TextStream,
    Unavailable,
)
from tests.client import canned
from tests.client.canned import CannedVision

PICTURE = b"picture"


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


async def _was_cancelled(vision: CannedVision) -> bool:
    return await asyncio.to_thread(vision.cancelled.wait, canned.MAX_WAIT_S)


async def test_every_skill_returns_what_the_blocking_client_returns(
    async_client: AsyncClient, client: Client, tmp_path: Path
):
    stream = async_client.query(PICTURE, "q", reasoning=True)
    assert [piece async for piece in stream] == list(canned.ANSWER_PIECES)
    assert await stream.result() == client.complete_query(PICTURE, "q", reasoning=True)
    assert await async_client.complete_query(None, "q") == client.complete_query(None, "q")
    assert await async_client.caption(PICTURE).result() == client.complete_caption(PICTURE)
    assert await async_client.complete_caption(PICTURE) == client.complete_caption(PICTURE)
    assert await async_client.point(PICTURE, "kite") == client.point(PICTURE, "kite")
    assert await async_client.detect(PICTURE, "kite") == client.detect(PICTURE, "kite")
    assert await async_client.segment(PICTURE, "kite") == client.segment(PICTURE, "kite")
    outline = async_client.stream_segment(PICTURE, "kite")
    assert [segment async for segment in outline] == list(client.stream_segment(PICTURE, "kite"))
    assert await outline.result() == await async_client.segment(PICTURE, "kite")
    assert await async_client.gaze(PICTURE, Point(0.25, 0.5)) == client.gaze(PICTURE, Point(0.25, 0.5))
    assert await async_client.embed(PICTURE) == client.embed(PICTURE)
    assert await async_client.embed(PICTURE, patches=True) == client.embed(PICTURE, patches=True)
    assert await async_client.server_info() == client.server_info()
    assert await async_client.list_models() == client.list_models()
    assert await async_client.load() == client.load()
    assert await async_client.usage() == client.usage()
    assert await async_client.clear_cache(token="alice") == client.clear_cache(token="alice")
    assert await async_client.cancel_requests(token="alice") == client.cancel_requests(token="alice")
    assert await async_client.list_adapters() == client.list_adapters()
    assert await async_client.load_adapter("a") == client.load_adapter("a")
    assert await async_client.unload_adapter("a") == client.unload_adapter("a")
    assert await async_client.delete_adapter("a") == client.delete_adapter("a")
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(bytes(range(251)) * 8_400)
    assert await async_client.upload_adapter("a", weights) == client.upload_adapter("a", weights)


async def test_deltas_tell_reasoning_from_answer(async_client: AsyncClient):
    deltas = [delta async for delta in async_client.query(PICTURE, "q", reasoning=True).deltas()]
    assert [delta.channel for delta in deltas] == [TextChannel.REASONING] + [TextChannel.ANSWER] * 3


async def test_a_path_is_read_and_sent(async_client: AsyncClient, vision: CannedVision, tmp_path: Path):
    path = tmp_path / "kite.jpg"
    path.write_bytes(PICTURE)
    await async_client.point(path, "kite", request_id="mine")
    assert vision.requests[0].image.data == PICTURE
    assert vision.metadata[0]["x-request-id"] == "mine"


async def test_every_call_has_a_deadline(async_client: AsyncClient, vision: CannedVision):
    await async_client.point(PICTURE, "kite")
    assert 6 < vision.time_left_s[0] < 121
    vision.endless = True
    with pytest.raises(DeadlineExceeded):
        await async_client.query(PICTURE, "q", timeout_s=0.2).result()


async def test_a_dropped_stream_cancels_its_call(async_client: AsyncClient, vision: CannedVision):
    vision.endless = True
    async for _ in async_client.query(PICTURE, "q"):
        break
    assert await _was_cancelled(vision)


async def test_leaving_the_block_of_a_stream_cancels_its_call(async_client: AsyncClient, vision: CannedVision):
    vision.endless = True
    async with async_client.query(PICTURE, "q") as stream:
        await anext(stream)
    assert await _was_cancelled(vision)
    with pytest.raises(Cancelled):
        await stream.result()


async def test_an_outline_cancelled_midway_ends_its_call(async_client: AsyncClient, vision: CannedVision):
    vision.endless = True
    async with async_client.stream_segment(PICTURE, "kite") as stream:
        assert (await anext(stream)).svg_path == ""
    assert await _was_cancelled(vision)
    with pytest.raises(Cancelled):
        await anext(stream)


async def test_a_stream_cancelled_before_its_start_never_starts(async_client: AsyncClient, vision: CannedVision):
    stream = async_client.query(PICTURE, "q")
    stream.cancel()
    with pytest.raises(Cancelled):
        await stream.result()
    assert vision.requests == []


async def test_a_reader_learns_that_another_task_cancelled_the_stream(
    async_client: AsyncClient, vision: CannedVision
):
    vision.endless = True
    stream = async_client.query(PICTURE, "q")
    await anext(stream)
    reader = asyncio.create_task(stream.result())
    await asyncio.to_thread(lambda: None)  # lets the reader reach its wait
    stream.cancel()
    with pytest.raises(Cancelled):
        await reader


async def test_a_cancelled_task_cancels_its_stream_and_stays_cancelled(
    async_client: AsyncClient, vision: CannedVision
):
    vision.endless = True
    stream = async_client.query(PICTURE, "q")
    await anext(stream)
    reader = asyncio.create_task(stream.result())
    await asyncio.to_thread(lambda: None)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await _was_cancelled(vision)


async def test_cancelling_a_finished_stream_does_nothing(async_client: AsyncClient):
    stream = async_client.query(PICTURE, "q")
    result = await stream.result()
    stream.cancel()
    assert await stream.result() == result


async def test_failures_of_streams_and_of_single_answers_are_the_same_errors(
    async_client: AsyncClient, vision: CannedVision
):
    refused = canned.status(code_pb2.INVALID_ARGUMENT, "no", canned.error_info("INVALID_REQUEST"))
    vision.failures = [refused, refused]
    with pytest.raises(InvalidRequest):
        await async_client.query(PICTURE, "q").result()
    with pytest.raises(InvalidRequest):
        await async_client.point(PICTURE, "kite")


async def test_without_a_server_calls_fail_soon():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{unused.getsockname()[1]}") as client:
            with pytest.raises(Unavailable):
                await client.load()


@pytest.mark.parametrize(
    ("blocking", "awaiting"),
    [(Client, AsyncClient), (TextStream, AsyncTextStream), (SegmentStream, AsyncSegmentStream)],
)
def test_both_clients_offer_the_same_calls_with_the_same_arguments(blocking: type, awaiting: type):
    def arguments(kind: type) -> dict[str, list[tuple[str, object, object, str]]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: [
                (p.name, p.kind, p.default, str(p.annotation).replace(" | AsyncIterable[ImageInput]", ""))
                for p in inspect.signature(method).parameters.values()
            ]
            for name, method in methods
            if not name.startswith("_")
        }

    assert arguments(blocking) == arguments(awaiting)
