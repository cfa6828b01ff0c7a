"""Open streams end when the engine ends, and closed streams are not kept."""

import asyncio
import gc
import weakref

import pytest

from kestrel_runtime.api.engine import ClearedCache
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.events import Started, Usage
from kestrel_runtime.api.stream import Outbox, Stream
from kestrel_runtime.engine.open_streams import CacheClearings, OpenStreams

STARTED = Started(Usage(1, 0))


async def test_closing_ends_every_open_stream_behind_what_was_posted_before() -> None:
    streams = OpenStreams()
    waiting, begun = Stream(), Stream()
    streams.add(waiting)
    streams.add(begun)
    outbox = Outbox()
    outbox.put(begun, [STARTED])
    outbox.post()
    await asyncio.to_thread(streams.close)
    assert await anext(begun) == STARTED
    for stream in (waiting, begun):
        with pytest.raises(EngineUnavailable):
            await anext(stream)


async def test_after_the_end_none_is_taken() -> None:
    streams = OpenStreams()
    streams.close()
    with pytest.raises(EngineUnavailable):
        streams.add(Stream())


async def test_a_stream_that_is_over_is_forgotten() -> None:
    streams = OpenStreams()
    over, left = Stream(), Stream()
    for stream in (over, left):
        streams.add(stream)
    assert set(streams.of(over.loop)) == {over, left}
    over.fail(EngineUnavailable("for the test"))
    left.cancel()
    await asyncio.wait((over.over,))
    await asyncio.sleep(0)
    assert streams.of(over.loop) == []


async def test_streams_of_an_event_loop_that_is_gone_are_not_kept() -> None:
    streams = OpenStreams()
    asked: list[weakref.ref[Stream]] = []

    async def ask() -> None:
        stream = Stream()
        asked.append(weakref.ref(stream))
        streams.add(stream)

    for _ in range(20):
        await asyncio.to_thread(asyncio.run, ask())
    streams.add(Stream())
    gc.collect()
    assert sum(stream() is not None for stream in asked) < 5
    streams.close()


def test_removals_are_carried_out_in_the_order_in_which_they_were_asked_for():
    clearings, asked = CacheClearings(), []
    futures = [clearings.add("a", None), clearings.add(None, None), clearings.add("b", b"digest")]

    def forget(namespace: str | None, image: bytes | None) -> ClearedCache:
        asked.append((namespace, image))
        return ClearedCache(len(asked), 0)

    clearings.carry_out(forget)
    assert asked == [("a", None), (None, None), ("b", b"digest")]
    assert [future.result(0).num_pages for future in futures] == [1, 2, 3]


def test_a_removal_whose_caller_has_left_hinders_no_other():
    clearings = CacheClearings()
    first, second = clearings.add(None, None), clearings.add(None, None)
    first.cancel()
    clearings.carry_out(lambda *_: ClearedCache(0, 0))
    assert second.done()


def test_after_the_end_removals_are_refused_before_and_after():
    clearings = CacheClearings()
    before = clearings.add(None, None)
    clearings.close()
    for future in (before, clearings.add(None, None)):
        assert isinstance(future.exception(0), EngineUnavailable)


def test_a_removal_that_fails_is_answered_at_the_end():
    clearings = CacheClearings()
    future = clearings.add(None, None)
    with pytest.raises(ZeroDivisionError):
        clearings.carry_out(lambda *_: ClearedCache(1 // 0, 0))
    clearings.close()
    assert isinstance(future.exception(0), EngineUnavailable)
