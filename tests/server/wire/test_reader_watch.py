"""How long a reader may leave a write waiting."""

from __future__ import annotations

import asyncio

import pytest

from kestrel_grpc.wire.reader_watch import ReaderWatch, StreamIdle

LIMIT_S = 0.02


async def nothing() -> None:
    """A write that the buffers take."""


async def longer_than_the_limit() -> None:
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(3 * LIMIT_S, passed.set)
    await passed.wait()


async def test_a_write_that_the_client_does_not_read_is_abandoned():
    async def write() -> None:
        async with ReaderWatch(LIMIT_S) as reader:
            await reader.wait_for(nothing())
            await reader.wait_for(asyncio.Event().wait())

    with pytest.raises(StreamIdle) as caught:
        await write()
    assert caught.value.limit_s == LIMIT_S


async def test_a_stream_may_have_nothing_to_say_for_any_time():
    async with ReaderWatch(LIMIT_S) as reader:
        for _ in range(3):
            await longer_than_the_limit()
            await reader.wait_for(nothing())
        await longer_than_the_limit()


async def test_a_cancelled_call_does_not_count_as_idle():
    writing = asyncio.Event()

    async def write() -> None:
        async with ReaderWatch(3600.0) as reader:
            writing.set()
            await reader.wait_for(asyncio.Event().wait())

    task = asyncio.ensure_future(write())
    await writing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_goes_wrong_between_the_writes_is_told_as_it_is():
    with pytest.raises(TimeoutError, match="of something else"):
        async with ReaderWatch(3600.0):
            raise TimeoutError("of something else")
