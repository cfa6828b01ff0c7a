"""Messages arrive whole, in order and from any thread, and nobody waits for an end that does not read."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from kestrel_grpc.multiprocess.engine_channel import connection as connection_module
from kestrel_grpc.multiprocess.engine_channel.connection import Connection

MEBIBYTE = 2**20


class End:
    """One end, and what it has received."""

    def __init__(self, stream: socket.socket) -> None:
        self.received: list[tuple[bytes, bytes]] = []
        self.has_ended = asyncio.Event()
        self._has_news = asyncio.Event()
        self.connection = Connection(stream, self._take, self.has_ended.set)

    async def until(self, num_messages: int) -> list[tuple[bytes, bytes]]:
        """What has been received once there are so many messages."""
        while len(self.received) < num_messages:
            self._has_news.clear()
            await self._has_news.wait()
        return self.received

    def _take(self, data: bytes, attachment: bytes) -> None:
        self.received.append((data, attachment))
        self._has_news.set()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    one, other = map(End, socket.socketpair())
    yield one, other
    one.connection.close()
    other.connection.close()


async def test_messages_of_any_length_arrive_whole_and_in_order(ends: tuple[End, End]) -> None:
    sent = [(bytes([length % 251]) * length, b"") for length in (0, 1, 7, 8, 9, 262_143, 262_144, 262_145, 0, 3)]
    sent += [(b"pixels", bytes(range(256)) * 20_000), (b"", b"x"), (b"end", b"")]
    for end, other in (ends, reversed(ends)):
        for message in sent:
            assert end.connection.send(*message)
        assert await other.until(len(sent)) == sent
        other.received.clear()


async def test_a_burst_of_many_messages_leaves_none_behind(ends: tuple[End, End]) -> None:
    sent = [(b"%d" % number, b"") for number in range(5_000)]
    for message in sent:
        ends[0].connection.send(*message)
    assert await ends[1].until(len(sent)) == sent


async def test_each_threads_messages_arrive_in_its_order(ends: tuple[End, End]) -> None:
    def send(name: bytes) -> None:
        for number in range(500):
            ends[0].connection.send(b"%b %d" % (name, number), name * 300)

    threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    received = await ends[1].until(1_500)
    for thread in threads:
        thread.join()
    for name in (b"a", b"b", b"c"):
        own = [message for message in received if message[0].startswith(name)]
        assert own == [(b"%b %d" % (name, number), name * 300) for number in range(500)]


async def test_an_end_that_does_not_read_is_told_of_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", MEBIBYTE)
    near, far = socket.socketpair()
    end = End(near)
    assert end.connection.send(b"asked for", bytes(8 * MEBIBYTE))
    num_taken = 0
    while end.connection.send(bytes(MEBIBYTE // 4)):
        num_taken += 1
    assert 4 <= num_taken <= 5  # the attachment is not counted
    end.connection.close()
    far.close()


async def test_the_other_end_is_told_of_a_close_after_what_was_sent(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.send(b"pixels", bytes(8 * MEBIBYTE))
    one.connection.send(b"last")
    await one.connection.sent()
    one.connection.close()
    await other.has_ended.wait()
    assert [data for data, _ in other.received] == [b"pixels", b"last"]
    assert other.connection.send(b"nobody reads this")


async def test_nobody_waits_to_send_to_an_end_that_is_gone(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.send(b"pixels", bytes(8 * MEBIBYTE))
    sending = asyncio.ensure_future(one.connection.sent())
    await asyncio.sleep(0)
    other.connection.close()
    await sending
    await one.has_ended.wait()
    assert other.received == []
