"""What a call knows of itself: its name and its time; and how others end it."""

import asyncio

import pytest

from kestrel_grpc.calls.call_context import CallContext, Interruptible, RequestCancelled, StreamIdle
from kestrel_runtime.api.deadlines import deadline_in, remaining_s

METHOD = "kestrel.v1.VisionService/Query"


def test_a_call_without_a_deadline_is_never_late():
    call = CallContext((), None, METHOD)
    assert (call.is_late, call.deadline) == (False, None)


def test_a_call_is_not_late_while_its_deadline_is_far():
    call = CallContext((), deadline_in(3600.0), METHOD)
    assert not call.is_late
    assert remaining_s(call.deadline) == pytest.approx(3600.0, abs=60.0)


@pytest.mark.parametrize(
    ("seconds_before", "is_late"),
    [(-1.0, True), (0.0, True), (0.015, True), (0.9, True), (1.1, False)],
    ids=["after", "at", "on its way", "rounded up by gRPC", "before"],
)
def test_a_call_is_late_as_soon_as_its_caller_may_find_it_so(seconds_before, is_late, monkeypatch):
    """A caller who waits 99.01 s writes that it waits 99.1 s, and hangs up when its own time is over."""
    now_s = 1000.0
    monkeypatch.setattr("kestrel_grpc.calls.call_context.time.monotonic", lambda: now_s)
    call = CallContext((), deadline_in(100.0), METHOD)
    now_s += 100.0 - seconds_before
    assert call.is_late is is_late


def test_a_late_call_has_no_time_remaining():
    call = CallContext((), deadline_in(0.0), METHOD)
    assert remaining_s(call.deadline) == 0.0


def test_a_fit_name_is_kept_and_an_unfit_one_replaced():
    assert CallContext((("x-request-id", "a.b_C-1"),), None, METHOD).request_id == "a.b_C-1"
    assert CallContext((("x-request-id", "two words"),), None, METHOD).request_id != "two words"


async def waiting(*blocks: Interruptible) -> asyncio.Task[None]:
    """A task that waits forever within these blocks, the first outermost."""
    has_begun = asyncio.Event()

    async def wait(*inner: Interruptible) -> None:
        if inner:
            with inner[0]:
                await wait(*inner[1:])
        has_begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(wait(*blocks))
    await has_begun.wait()
    return task


async def test_a_block_that_is_interrupted_ends_with_the_reason_and_its_task_is_not_cancelled():
    block = Interruptible()
    task = await waiting(block)
    assert block.interrupt(RequestCancelled())
    assert not block.interrupt(StreamIdle(1.0)), "the first reason counts"
    with pytest.raises(RequestCancelled):
        await task
    assert task.cancelling() == 0
    assert not block.interrupt(RequestCancelled()), "the block has ended"


@pytest.mark.parametrize("caller_is_first", [False, True])
async def test_a_caller_that_hangs_up_as_its_call_is_interrupted_has_hung_up(caller_is_first):
    block = Interruptible()
    task = await waiting(block)
    ends = [lambda: block.interrupt(RequestCancelled()), task.cancel]
    for end in reversed(ends) if caller_is_first else ends:
        end()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("outer_is_first", [False, True])
async def test_of_nested_blocks_the_outer_reason_ends_the_task(outer_is_first):
    outer, inner = Interruptible(), Interruptible()
    task = await waiting(outer, inner)
    ends = [lambda: inner.interrupt(StreamIdle(1.0)), lambda: outer.interrupt(RequestCancelled())]
    for end in reversed(ends) if outer_is_first else ends:
        end()
    with pytest.raises(RequestCancelled):
        await task
    assert task.cancelling() == 0


async def test_a_block_that_is_not_interrupted_passes_errors_on():
    with pytest.raises(asyncio.CancelledError), Interruptible():
        raise asyncio.CancelledError
    with pytest.raises(TimeoutError, match="of something else"), Interruptible():
        raise TimeoutError("of something else")
