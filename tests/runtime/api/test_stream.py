import asyncio
import threading

import pytest

from kestrel_runtime.api.errors import DeadlineExceeded, EngineUnavailable
from kestrel_runtime.api.events import (
    CaptionOutput,
    Finished,
    FinishReason,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    TokenLogprob,
    Usage,
)
from kestrel_runtime.api.stream import Outbox, Stream

USAGE = Usage(735, 729, 2)
STARTED = Started(USAGE)
DELTAS = [TextDelta("a", TextChannel.REASONING, 0, 1), TextDelta("b", TextChannel.ANSWER, 0, 1)]
FINISHED = Finished(CaptionOutput("ab"), FinishReason.STOP, USAGE, Timing(0.0, 0.0, 0.0, 0.0, 0.0))


async def collected(stream):
    return [event async for event in stream]


async def begun(awaitable):
    """A task that has run up to its first wait."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    return task


# Order


async def test_events_come_in_the_order_they_were_delivered():
    stream = Stream()
    stream.deliver([STARTED, DELTAS[0]])
    stream.deliver([DELTAS[1], FINISHED])
    assert await collected(stream) == [STARTED, *DELTAS, FINISHED]


async def test_a_waiting_reader_is_woken_by_each_delivery():
    stream = Stream()
    for event in (STARTED, *DELTAS, FINISHED):
        waiting = await begun(anext(stream))
        assert not waiting.done()
        stream.deliver([event])
        assert await waiting == event
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_empty_delivery_brings_nothing():
    stream = Stream()
    waiting = await begun(anext(stream))
    stream.deliver([])
    stream.deliver([STARTED])
    assert await waiting == STARTED


async def test_a_caller_that_gives_up_waiting_loses_no_event():
    stream = Stream()
    waiting = await begun(anext(stream))
    waiting.cancel()
    stream.deliver([STARTED])
    stream.deliver([FINISHED])
    assert await collected(stream) == [STARTED, FINISHED]


async def test_a_stream_is_over_with_its_last_event_even_without_a_reader():
    stream = Stream()
    stream.deliver([STARTED])
    assert not stream.over.done()
    stream.deliver([FINISHED])
    assert stream.over.done()
    assert not stream.is_cancelled


async def test_nothing_comes_after_the_end():
    stream = Stream()
    stream.deliver([FINISHED])
    stream.deliver([DELTAS[0]], EngineUnavailable("too late"))
    assert await collected(stream) == [FINISHED]


# Text


def pieces(text, channel=TextChannel.ANSWER, first=0):
    return [TextDelta(part, channel, first + place, 1) for place, part in enumerate(text)]


async def test_a_caller_who_comes_late_takes_the_text_that_waits_as_one_piece():
    stream = Stream()
    stream.deliver([STARTED])
    for piece in pieces("abc"):
        stream.deliver([piece])
    stream.deliver([FINISHED])
    assert await collected(stream) == [STARTED, TextDelta("abc", TextChannel.ANSWER, 0, 3), FINISHED]


async def test_a_caller_who_keeps_up_takes_each_piece_by_itself():
    stream, taken = Stream(), []
    for piece in pieces("abc"):
        stream.deliver([piece])
        taken.append(await anext(stream))
    assert taken == pieces("abc")


async def test_text_of_different_channels_is_not_joined():
    thought, answer = pieces("ab", TextChannel.REASONING), pieces("cd")
    stream = Stream()
    stream.deliver([*thought, *answer, FINISHED])
    assert await collected(stream) == [
        TextDelta("ab", TextChannel.REASONING, 0, 2),
        TextDelta("cd", TextChannel.ANSWER, 0, 2),
        FINISHED,
    ]


async def test_a_joined_piece_counts_on_from_the_pieces_before_it():
    stream = Stream()
    stream.deliver([TextDelta("a", TextChannel.ANSWER, 0, 2)])
    first = await anext(stream)
    stream.deliver([TextDelta("b", TextChannel.ANSWER, 2, 1), TextDelta("c", TextChannel.ANSWER, 3, 4)])
    assert [first, await anext(stream)] == [
        TextDelta("a", TextChannel.ANSWER, 0, 2),
        TextDelta("bc", TextChannel.ANSWER, 2, 5),
    ]


async def test_pieces_with_many_logprobs_are_not_joined_to_one():
    token = TokenLogprob(1, "a", b"a", -0.5, ())
    stream = Stream()
    stream.deliver([TextDelta("a", TextChannel.ANSWER, index, 1, (token,)) for index in range(1000)])
    stream.deliver([FINISHED])
    *deltas, finished = await collected(stream)
    assert finished == FINISHED
    assert max(len(delta.logprobs) for delta in deltas) <= 64
    assert sum(len(delta.logprobs) for delta in deltas) == 1000
    assert "".join(delta.text for delta in deltas) == "a" * 1000


async def test_text_that_waits_comes_before_the_error_that_ended_it():
    stream = Stream()
    stream.deliver([*pieces("ab")])
    stream.deliver([], DeadlineExceeded("late"))
    assert await anext(stream) == TextDelta("ab", TextChannel.ANSWER, 0, 2)
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


# The result


async def test_the_result_is_the_last_event():
    stream = Stream()
    waiting = await begun(stream.result())
    stream.deliver([STARTED, *DELTAS])
    stream.deliver([FINISHED])
    assert await waiting == FINISHED


async def test_the_result_of_a_failed_stream_is_its_error():
    stream = Stream()
    stream.deliver([STARTED], DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        await stream.result()


async def test_a_cancelled_stream_has_no_result():
    stream = Stream()
    waiting = await begun(stream.result())
    stream.cancel()
    with pytest.raises(asyncio.CancelledError, match="before its end"):
        await waiting


# Errors


async def test_an_error_comes_after_the_events_before_it():
    stream = Stream()
    stream.deliver([STARTED, DELTAS[0]])
    stream.deliver([DELTAS[1]], DeadlineExceeded("late"))
    assert stream.over.done()
    assert [await anext(stream) for _ in range(3)] == [STARTED, *DELTAS]
    with pytest.raises(DeadlineExceeded, match="late"):
        await anext(stream)


async def test_an_error_wakes_the_waiting_reader():
    stream = Stream()
    waiting = await begun(anext(stream))
    stream.deliver([], DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        await waiting


async def test_any_thread_may_fail_a_stream():
    stream = Stream()
    waiting = await begun(anext(stream))
    thread = threading.Thread(target=stream.fail, args=(EngineUnavailable("stopped"),))
    thread.start()
    with pytest.raises(EngineUnavailable, match="stopped"):
        await waiting
    thread.join()


async def test_only_the_first_error_counts():
    stream = Stream()
    stream.deliver([], DeadlineExceeded("first"))
    stream.deliver([], EngineUnavailable("second"))
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


# Cancelling


async def test_cancelling_tells_the_engine_once():
    stream, told = Stream(), []
    stream.on_cancel(lambda: told.append(stream.is_cancelled))
    stream.cancel()
    stream.cancel()
    assert told == [True]
    assert stream.over.done()


async def test_cancelling_needs_no_callback():
    stream = Stream()
    stream.cancel()
    assert stream.is_cancelled


async def test_cancelling_wakes_the_waiting_reader():
    stream = Stream()
    waiting = await begun(collected(stream))
    stream.cancel()
    assert await waiting == []


async def test_what_is_delivered_after_cancelling_is_ignored():
    stream = Stream()
    stream.cancel()
    stream.deliver([STARTED, FINISHED])
    stream.deliver([], DeadlineExceeded("late"))
    assert await collected(stream) == []


async def test_a_stream_that_is_over_is_not_cancelled():
    stream, told = Stream(), []
    stream.on_cancel(lambda: told.append(True))
    stream.deliver([FINISHED])
    stream.cancel()
    assert not stream.is_cancelled
    assert told == []
    assert await collected(stream) == [FINISHED]


# The outbox


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts how often it is woken from outside."""

    num_wakes = 0

    def call_soon_threadsafe(self, *args, **options):
        self.num_wakes += 1
        return super().call_soon_threadsafe(*args, **options)


@pytest.fixture
def counted():
    with asyncio.Runner(loop_factory=CountedLoop) as runner:
        yield runner


async def made():
    return Stream()


def test_a_step_wakes_an_event_loop_once_for_all_its_streams(counted):
    async def step():
        outbox, streams = Outbox(), [Stream(), Stream()]
        outbox.put(streams[0], [STARTED])
        outbox.put(streams[1], [STARTED])
        outbox.put(streams[0], [*DELTAS])
        outbox.put(streams[1], [FINISHED])
        outbox.put(streams[0], [FINISHED])
        before = counted.get_loop().num_wakes
        outbox.post()
        wakes = counted.get_loop().num_wakes - before
        return wakes, [await collected(stream) for stream in streams]

    assert counted.run(step()) == (1, [[STARTED, *DELTAS, FINISHED], [STARTED, FINISHED]])


def test_a_step_without_events_wakes_no_reader(counted):
    async def steps():
        outbox = Outbox()
        outbox.put(Stream(), [STARTED])
        outbox.post()
        before = counted.get_loop().num_wakes
        outbox.post()
        return counted.get_loop().num_wakes - before

    assert counted.run(steps()) == 0


async def test_the_outbox_is_filled_in_another_thread_than_it_is_read():
    stream, outbox = Stream(), Outbox()

    def step():
        outbox.put(stream, [STARTED, FINISHED])
        outbox.post()

    reading = await begun(collected(stream))
    await asyncio.to_thread(step)
    assert await reading == [STARTED, FINISHED]


async def test_what_is_posted_before_a_failure_comes_before_it():
    stream, outbox = Stream(), Outbox()
    outbox.put(stream, [STARTED])
    outbox.post()
    stream.fail(DeadlineExceeded("late"))
    assert await anext(stream) == STARTED
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


def test_a_closed_event_loop_of_the_caller_raises_no_error():
    gone = asyncio.run(made())

    async def post_to_both():
        stream, outbox = Stream(), Outbox()
        outbox.put(gone, [STARTED])
        outbox.put(stream, [FINISHED])
        outbox.post()
        return await collected(stream)

    assert asyncio.run(post_to_both()) == [FINISHED]
    gone.fail(EngineUnavailable("stopped"))
    assert not gone.over.done()
