"""Messages and files arrive whole, in order and from any thread, and no end waits for one that does not read."""

import asyncio
import resource
import socket
import threading
from collections.abc import AsyncIterator
from typing import BinaryIO

import pytest

from kestrel_grpc.multiprocess.protocol import connection as connection_module
from kestrel_grpc.multiprocess.protocol.connection import Connection, shared_file

MEBIBYTE = 2**20


class End:
    """One end, and what it has received."""

    def __init__(self, stream: socket.socket) -> None:
        self.received: list[tuple[bytes, bytes | None]] = []
        """The data of each message, and what the file that came with it holds."""
        self.has_ended = asyncio.Event()
        self._has_news = asyncio.Event()
        self.connection = Connection(stream, self._take, self.has_ended.set)

    async def until(self, num_messages: int) -> list[tuple[bytes, bytes | None]]:
        """What has been received once there are so many messages."""
        while len(self.received) < num_messages:
            self._has_news.clear()
            await self._has_news.wait()
        return self.received

    def _take(self, data: bytes, file: BinaryIO | None) -> None:
        content = None
        if file is not None:
            with file:
                file.seek(0)
                content = file.read()
        self.received.append((data, content))
        self._has_news.set()


def file_of(content: bytes | None) -> BinaryIO | None:
    return None if content is None else shared_file([memoryview(content)])


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    one, other = map(End, socket.socketpair())
    yield one, other
    one.connection.close()
    other.connection.close()


async def test_messages_of_any_length_arrive_whole_and_in_order(ends: tuple[End, End]) -> None:
    lengths = (0, 1, 4, 5, 6, 262_143, 262_144, 262_145, 0, 3)
    sent: list[tuple[bytes, bytes | None]] = [(bytes([length % 251]) * length, None) for length in lengths]
    sent += [(b"pixels", bytes(range(256)) * 20_000), (b"", b"x"), (b"long" * 200_000, b"y"), (b"end", None)]
    for end, other in (ends, reversed(ends)):
        for data, content in sent:
            assert end.connection.send(data, file_of(content))
        assert await other.until(len(sent)) == sent
        other.received.clear()


async def test_a_burst_of_many_messages_leaves_none_behind(ends: tuple[End, End]) -> None:
    sent = [(b"%d" % number, b"%d" % number if number % 97 == 5 else None) for number in range(5_000)]
    for data, content in sent:
        ends[0].connection.send(data, file_of(content))
    assert await ends[1].until(len(sent)) == sent


async def test_each_threads_messages_arrive_in_its_order(ends: tuple[End, End]) -> None:
    def send(name: bytes) -> None:
        for number in range(500):
            ends[0].connection.send(b"%b %d" % (name, number) + bytes(300), file_of(name * 300))

    threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    received = await ends[1].until(1_500)
    for thread in threads:
        thread.join()
    for name in (b"a", b"b", b"c"):
        own = [message for message in received if message[0].startswith(name)]
        assert own == [(b"%b %d" % (name, number) + bytes(300), name * 300) for number in range(500)]


async def test_an_end_that_does_not_read_is_told_of_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", MEBIBYTE)
    near, far = socket.socketpair()
    end = End(near)
    num_taken = 0
    while end.connection.send(bytes(MEBIBYTE // 4)):
        num_taken += 1
    assert 4 <= num_taken <= 6
    refused = file_of(b"refused")
    assert not end.connection.send(b"with a file", refused)
    assert refused is not None
    assert refused.closed
    end.connection.close()
    far.close()


async def test_the_other_end_is_told_of_a_close_after_what_was_sent(ends: tuple[End, End]) -> None:
    one, other = ends
    long = bytes(8 * MEBIBYTE)
    one.connection.send(long)
    one.connection.send(b"last", file_of(b"pixels"))
    await one.connection.sent()
    one.connection.close()
    await other.has_ended.wait()
    assert other.received == [(long, None), (b"last", b"pixels")]
    assert other.connection.send(b"nobody reads this")


async def test_nobody_waits_to_send_to_an_end_that_is_gone(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.send(bytes(8 * MEBIBYTE))
    waiting = file_of(b"behind it")
    one.connection.send(b"pixels", waiting)
    sending = asyncio.ensure_future(one.connection.sent())
    await asyncio.sleep(0)
    other.connection.close()
    await sending
    await one.has_ended.wait()
    assert other.received == []
    assert waiting is not None
    assert waiting.closed


async def test_a_file_that_no_descriptor_is_left_for_is_missing_and_its_message_arrives(
    ends: tuple[End, End],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # It has the lowest free descriptor, and frees it when it is sent.
    file = shared_file([memoryview(b"pix"), memoryview(b"els")])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
        assert ends[0].connection.send(b"first", file)
        await ends[1].until(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ends[0].connection.send(b"second", file_of(b"more"))
    assert await ends[1].until(2) == [(b"first", None), (b"second", b"more")]
