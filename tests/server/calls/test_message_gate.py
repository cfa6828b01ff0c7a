"""The gate alone: who gets a permit, who waits, and what ends a message that does not come."""

import asyncio
import time
from typing import Any

import pytest

from kestrel_grpc.calls import message_gate
from kestrel_grpc.calls.message_gate import (
    GateLimits,
    MessageGate,
    MessagePermit,
    MessageTimeout,
    StreamEvicted,
    StreamGate,
    TooManyCalls,
)
from kestrel_runtime.api.errors import EngineUnavailable

FOREVER_S = 3600.0
AT_ONCE_S = 0.0


def new_gate(permits: int = 1, short_permits: int = 1, **limits: float) -> MessageGate:
    defaults = {"timeout_s": FOREVER_S, "wait_limit_s": FOREVER_S, "short_timeout_s": FOREVER_S}
    return MessageGate(GateLimits(permits, short_permits, **{**defaults, **limits}))


class Sender:
    """A peer whose message comes when it is told to, or never."""

    def __init__(self) -> None:
        self.is_being_read = asyncio.Event()
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        self.is_being_read.set()
        return await self.message


def peer() -> str:
    return "a connection"


async def ready() -> bytes:
    """A message that has arrived."""
    return b"ready"


async def stalled(gate: MessageGate, tenant: str = "") -> asyncio.Task[tuple[Any, MessagePermit]]:
    """A call that has a permit, and whose message does not come."""
    sender = Sender()
    task = asyncio.create_task(gate.receive(sender.read, tenant, peer))
    await sender.is_being_read.wait()
    return task


async def waiting(gate: MessageGate, tenant: str = "") -> asyncio.Task[tuple[Any, MessagePermit]]:
    """A call that waits for a permit, with a message that has arrived."""
    task = asyncio.create_task(gate.receive(ready, tenant, peer))
    await asyncio.sleep(0)  # one turn takes it as far as it gets
    return task


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_message_takes_up_a_place_until_it_is_released():
    gate = new_gate()
    message, permit = await gate.receive(ready, "", peer)
    assert message == b"ready"
    second = await waiting(gate)
    assert not second.done()
    permit.release()
    permit.release()
    _, permit = await second
    third = await waiting(gate)
    assert not third.done()
    permit.release()
    await third


async def test_places_go_to_those_that_have_waited_longest():
    gate = new_gate()
    _, permit = await gate.receive(ready, "", peer)
    first, second = await waiting(gate), await waiting(gate)
    assert gate.num_waiting == 2
    permit.release()
    _, permit = await first
    assert not second.done()
    permit.release()
    await second


async def test_a_tenant_leaves_a_place_for_others():
    gate = new_gate(permits=2)
    greedy = await stalled(gate, "greedy")
    more = await waiting(gate, "greedy")
    assert not more.done()
    await gate.receive(ready, "modest", peer)
    await ended(greedy, more)


async def test_a_message_that_does_not_come_ends_its_call_and_frees_its_place():
    gate = new_gate(timeout_s=0.01)
    with pytest.raises(MessageTimeout):
        await gate.receive(Sender().read, "", peer)
    _, permit = await gate.receive(ready, "", peer)
    permit.release()


async def test_messages_that_do_not_come_are_ended_each_in_its_time():
    gate = new_gate(permits=3, timeout_s=0.02)
    tasks = [await stalled(gate) for _ in range(3)]
    for task in tasks:
        with pytest.raises(MessageTimeout):
            await task


async def test_a_caller_that_hangs_up_while_it_sends_frees_its_place():
    gate = new_gate()
    await ended(await stalled(gate))
    await gate.receive(ready, "", peer)


async def test_a_caller_that_hangs_up_while_it_waits_is_forgotten():
    gate = new_gate()
    first = await stalled(gate)
    second = await waiting(gate)
    await ended(second)
    assert gate.num_waiting == 0
    await ended(first)
    await gate.receive(ready, "", peer)


async def test_a_caller_that_hangs_up_as_it_gets_a_place_passes_it_on():
    gate = new_gate()
    _, permit = await gate.receive(ready, "", peer)
    second = await waiting(gate)
    permit.release()  # its permit is granted; it has not noticed
    await ended(second)
    await gate.receive(ready, "", peer)


async def test_a_call_without_a_place_in_time_is_refused():
    gate = new_gate(short_permits=0, timeout_s=0.05)
    _, permit = await gate.receive(ready, "", peer)
    with pytest.raises(TooManyCalls):
        await gate.receive(ready, "", peer)
    permit.release()
    await gate.receive(ready, "", peer)


async def test_where_senders_stall_a_message_that_has_arrived_is_read_all_the_same():
    gate = new_gate(permits=3, wait_limit_s=0.01)
    tasks = [await stalled(gate) for _ in range(3)]
    message, permit = await gate.receive(ready, "", peer)
    assert (message, permit.is_short) == (b"ready", True)
    permit.release()
    await ended(*tasks)


async def test_a_message_that_has_waited_and_still_has_not_arrived_is_refused():
    gate = new_gate(wait_limit_s=0.01, short_timeout_s=0.01)
    first = await stalled(gate)
    with pytest.raises(TooManyCalls):
        await gate.receive(Sender().read, "", peer)
    _, permit = await gate.receive(ready, "", peer)  # the short permit is free again
    assert permit.is_short
    permit.release()
    await ended(first)


async def test_a_new_call_does_not_wait_for_all_that_stall():
    gate = new_gate(wait_limit_s=AT_ONCE_S, short_timeout_s=0.01)
    first = await stalled(gate)
    stalling = [asyncio.create_task(gate.receive(Sender().read, "", peer)) for _ in range(50)]
    await asyncio.sleep(0)
    message, permit = await gate.receive(ready, "", peer)
    assert message == b"ready"
    assert sum(task.done() for task in stalling) <= 3
    permit.release()
    await ended(first, *stalling)


async def test_a_loop_that_stands_still_ends_no_short_message():
    gate = new_gate(wait_limit_s=AT_ONCE_S, short_timeout_s=0.05)
    first = await stalled(gate)
    sender = Sender()
    loop = asyncio.get_running_loop()

    async def read() -> bytes:
        # By the next turn of the loop the limit has passed, and the message has come.
        loop.call_soon(lambda: (busy_for(0.1), sender.message.set_result(b"late")))
        return await sender.message

    message, _ = await gate.receive(read, "", peer)
    assert message == b"late"
    await ended(first)


def busy_for(duration_s: float) -> None:
    until = time.monotonic() + duration_s
    while time.monotonic() < until:
        pass


async def test_a_gate_that_closes_ends_those_who_send_and_those_who_wait():
    gate = new_gate(permits=1)
    sends, waits = await stalled(gate), await waiting(gate)
    gate.close()
    for task in (sends, waits):
        with pytest.raises(EngineUnavailable):
            await task
    with pytest.raises(EngineUnavailable):
        await gate.receive(ready, "", peer)


async def test_a_caller_that_hangs_up_as_the_gate_closes_has_hung_up():
    gate = new_gate(permits=1)
    sends, waits = await stalled(gate), await waiting(gate)
    gate.close()
    for task in (sends, waits):
        task.cancel()
        with pytest.raises((asyncio.CancelledError, EngineUnavailable)):
            await task
    assert sends.cancelled()


async def test_a_sender_of_an_unfinished_message_is_admitted_after_all_others():
    gate = new_gate(permits=1, short_permits=1, wait_limit_s=AT_ONCE_S, short_timeout_s=0.01)
    first = await stalled(gate)
    with pytest.raises(TooManyCalls):
        await gate.receive(Sender().read, "", lambda: "slow")
    short = asyncio.create_task(gate.receive(ready, "", peer))
    _, permit = await short
    slow_sender = asyncio.create_task(gate.receive(ready, "", lambda: "slow"))
    await asyncio.sleep(0)
    clean = asyncio.create_task(gate.receive(ready, "", lambda: "quick"))
    await asyncio.sleep(0)
    first.cancel()  # its permit goes to the later one, which is no slow_sender
    _, other_place = await clean
    assert not slow_sender.done()
    permit.release()
    await slow_sender
    other_place.release()


async def test_those_who_did_not_finish_share_half_of_the_places():
    gate = new_gate(permits=4, short_permits=0, timeout_s=0.02)
    for _ in range(2):
        with pytest.raises(MessageTimeout):
            await gate.receive(Sender().read, "", lambda: "slow")
    tasks = [asyncio.create_task(gate.receive(Sender().read, "", lambda: "slow")) for _ in range(4)]
    await asyncio.sleep(0)
    assert gate.num_waiting == 2
    await gate.receive(ready, "", peer)
    await ended(*tasks)


async def test_suspicion_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(message_gate, "_SLOW_SENDER_S", -1.0)
    gate = new_gate(permits=2, timeout_s=0.02)
    with pytest.raises(MessageTimeout):
        await gate.receive(Sender().read, "", peer)
    tasks = [asyncio.create_task(gate.receive(Sender().read, "", peer)) for _ in range(2)]
    await asyncio.sleep(0)
    assert gate.num_waiting == 0
    await ended(*tasks)


async def test_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(message_gate, "_MAX_SLOW_SENDERS", 3)
    gate = new_gate(timeout_s=0.001)
    for number in range(5):
        with pytest.raises(MessageTimeout):
            await gate.receive(Sender().read, "", lambda: str(number))  # noqa: B023 called before the next turn
    assert len(gate._slow_senders) == 3


async def resting(gate: StreamGate, tenant: str = "") -> asyncio.Task[tuple[Any, Any]]:
    """A stream whose next message does not come."""
    sender = Sender()
    task = asyncio.create_task(gate.receive(sender.read, tenant, peer))
    await sender.is_being_read.wait()
    return task


async def test_a_stream_that_has_rested_ends_where_another_needs_its_place():
    gate = StreamGate(2, rest_s=AT_ONCE_S)
    first, second = await resting(gate), await resting(gate)
    assert (await gate.receive(ready, "", peer))[0] == b"ready"
    await asyncio.gather(first, return_exceptions=True)
    assert isinstance(first.exception(), StreamEvicted)
    assert not second.done()
    second.cancel()


async def test_a_stream_that_has_not_rested_keeps_its_place_until_its_message_comes():
    gate = StreamGate(1, rest_s=FOREVER_S)
    sender = Sender()
    first = asyncio.create_task(gate.receive(sender.read, "", peer))
    await sender.is_being_read.wait()
    assert gate.is_crowded
    late = asyncio.create_task(gate.receive(ready, "", peer))
    await asyncio.sleep(0)
    assert not late.done()
    sender.message.set_result(b"first")
    assert [(await task)[0] for task in (first, late)] == [b"first", b"ready"]


async def test_the_tenant_with_the_most_waiting_streams_loses_one():
    gate = StreamGate(3, rest_s=AT_ONCE_S)
    alone, first, second = await resting(gate, "alice"), await resting(gate, "bob"), await resting(gate, "bob")
    newest = await resting(gate, "carol")
    await asyncio.gather(first, return_exceptions=True)
    assert isinstance(first.exception(), StreamEvicted)
    assert not any(task.done() for task in (alone, second, newest))
    gate.close()
    for task in (alone, second, newest):
        with pytest.raises(EngineUnavailable):
            await task
    with pytest.raises(EngineUnavailable):
        await gate.receive(ready, "", peer)


async def test_a_stream_without_a_place_ends_with_the_gate():
    gate = StreamGate(1, rest_s=FOREVER_S)
    first = await resting(gate)
    late = asyncio.create_task(gate.receive(ready, "", peer))
    await asyncio.sleep(0)
    gate.close()
    for task in (first, late):
        with pytest.raises(EngineUnavailable):
            await task


async def test_a_stream_that_its_caller_cancels_is_cancelled():
    gate = StreamGate(1)
    task = await resting(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (await resting(gate)).cancelled()
