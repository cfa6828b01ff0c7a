"""A connection between a front end and an engine core: messages over a Unix stream socket.

Any thread sends, without waiting and without a detour through the event loop; what the socket does not take at once
the event loop sends later. The event loop alone reads. On the wire a message is the lengths of its data and of its
attachment in four bytes each, and then both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

MAX_UNSENT_BYTES = 64 * 2**20
"""Data that waits to be sent; with more the other end does not read. Attachments, for which it has asked, are not
counted."""
_LENGTHS = struct.Struct("<II")
_READ_BYTES = 256 * 2**10
_MAX_AT_ONCE = 32
"""Messages that are handled, and reads of a long one; then other callbacks of the event loop have their turn."""


class Connection:
    """One end. It belongs to the event loop that runs when it is made.

    `on_message` is called with the data and the attachment of each message, and `on_end` once when the other end
    has closed the connection. Neither is called after `close`.
    """

    def __init__(
        self, stream: socket.socket, on_message: Callable[[bytes, bytes], None], on_end: Callable[[], None]
    ) -> None:
        stream.setblocking(False)
        self._socket = stream
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Of what is sent."""
        self._unsent: deque[tuple[memoryview, bool]] = deque()
        """Each with whether it is counted."""
        self._num_unsent_bytes = 0
        """Of data."""
        self._sent: asyncio.Future[None] | None = None
        self._is_closed = False
        # What was received and not handled: `_buffer[_start:_end]`.
        self._buffer = bytearray(_READ_BYTES)
        self._start = self._end = 0
        self._is_behind = False
        self._loop.add_reader(stream.fileno(), self._read)

    def send(self, data: bytes, attachment: bytes = b"") -> bool:
        """From any thread: send, without waiting. False if too much waits already, because the other end does not
        read. If it is gone, nothing happens."""
        with self._lock:
            if self._is_closed:
                return True
            if self._num_unsent_bytes > MAX_UNSENT_BYTES:
                return False
            is_waiting = bool(self._unsent)
            head = memoryview(_LENGTHS.pack(len(data), len(attachment)) + data)
            rest = head if is_waiting else head[self._write(head) :]
            if rest:
                self._put(rest, is_counted=True)
            whole = memoryview(attachment)
            for at in range(0, len(whole), _READ_BYTES):
                self._put(whole[at : at + _READ_BYTES], is_counted=False)
            must_watch = bool(self._unsent) and not is_waiting
        if must_watch:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._watch)
        return True

    async def sent(self) -> None:
        """Wait until nothing waits to be sent, or the other end is gone."""
        with self._lock:
            if self._is_closed or not self._unsent:
                return
            self._sent = self._loop.create_future()
        await self._sent

    def close(self) -> None:
        """End the connection. What waits to be sent is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._unsent.clear()
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._tell_sent()

    def _put(self, data: memoryview, *, is_counted: bool) -> None:
        self._unsent.append((data, is_counted))
        self._num_unsent_bytes += len(data) * is_counted

    def _write(self, data: memoryview) -> int:
        """How many bytes the socket took."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the other end is gone, as the reader is about to see
            return len(data)

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            for _ in range(_MAX_AT_ONCE):
                if not self._unsent:
                    break
                first, is_counted = self._unsent.popleft()
                num_written = self._write(first)
                self._num_unsent_bytes -= num_written * is_counted
                if num_written < len(first):
                    self._unsent.appendleft((first[num_written:], is_counted))
                    break
            if self._unsent:
                return
            if not self._is_closed:
                self._loop.remove_writer(self._socket.fileno())
        self._tell_sent()

    def _tell_sent(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def _read(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if self._is_closed or self._is_behind:
                return
            with memoryview(self._buffer) as view:
                try:
                    num_read = self._socket.recv_into(view[self._end :])
                except BlockingIOError:
                    return
                except OSError:
                    num_read = 0
            if not num_read:
                self.close()
                self._on_end()
                return
            self._end += num_read
            self._handle()
            if self._start == self._end:  # most often all that has come was read
                return

    def _handle(self) -> None:
        """Handle the messages that have come, and make room for what is to come."""
        self._is_behind = False
        for _ in range(_MAX_AT_ONCE):
            if self._is_closed:
                return
            num_here, num_needed = self._end - self._start, _LENGTHS.size
            if num_here >= num_needed:
                num_data, num_attached = _LENGTHS.unpack_from(self._buffer, self._start)
                num_needed += num_data + num_attached
                if num_here >= num_needed:
                    begin, self._start = self._start + _LENGTHS.size, self._start + num_needed
                    with memoryview(self._buffer) as view:
                        data = bytes(view[begin : begin + num_data])
                        attachment = bytes(view[begin + num_data : self._start])
                    self._on_message(data, attachment)
                    continue
            self._make_room(num_needed)
            return
        self._is_behind = True
        self._loop.call_soon(self._handle)

    def _make_room(self, num_needed: int) -> None:
        """Have the buffer hold at least so many bytes behind `_start`."""
        size = max(num_needed, _READ_BYTES)
        if self._start == self._end and len(self._buffer) == size:
            self._start = self._end = 0
        elif len(self._buffer) - self._start < num_needed or len(self._buffer) > size:
            kept = self._buffer[self._start : self._end]
            self._buffer = bytearray(size)
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
