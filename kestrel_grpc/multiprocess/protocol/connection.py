"""Carries frames over a Unix stream socket that any thread writes, without waiting.

A send takes no detour through the event loop, which later sends the bytes that the socket does not take at once.
The event loop alone reads. A frame may have a file (a descriptor): both processes share its memory, so that the
pixels of an image are not copied through the socket.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import BinaryIO

from kestrel_grpc.multiprocess.protocol.framing import ReceivedFrames, framed

MAX_UNSENT_BYTES = 64 * 2**20
"""The most unsent data; if there is more, the other end does not read."""
_DESCRIPTOR_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
"""Room for one descriptor: no read continues past the bytes that a descriptor was sent with."""
_MAX_AT_ONCE = 32
"""The most frames, or reads of a long frame, in one turn of the event loop."""


def shared_file(parts: Iterable[memoryview]) -> BinaryIO:
    """Returns a file in memory that holds the parts and has no name. Raises OSError if there is no memory."""
    file = os.fdopen(os.memfd_create("kestrel-shared"), "r+b", buffering=0)
    try:
        for part in parts:
            rest = part.cast("B")
            while rest:
                rest = rest[file.write(rest) :]
    except BaseException:
        file.close()
        raise
    return file


class Connection:
    """One end of the connection. It belongs to the event loop that runs when it is created.

    `on_frame` gets the data of each frame and the file that was sent with it, which it must close. The file is
    None if none was sent, or if this process has no descriptor left for it. `on_end` is called once when the other
    end has closed the connection. Neither is called after `close`.
    """

    def __init__(
        self,
        stream: socket.socket,
        on_frame: Callable[[bytes, BinaryIO | None], None],
        on_end: Callable[[], None],
    ) -> None:
        stream.setblocking(False)
        self._socket = stream
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Guards the data to send, and the socket while it is written."""
        self._unsent: deque[tuple[memoryview, BinaryIO | None]] = deque()
        """Data, each with the file that goes with its first byte."""
        self._num_unsent_bytes = 0
        self._sent: asyncio.Future[None] | None = None
        self._is_closed = False
        self._received = ReceivedFrames()
        self._files: deque[BinaryIO | None] = deque()
        """The files that have arrived, in the order of their frames."""
        self._is_behind = False
        self._loop.add_reader(stream.fileno(), self._read)

    def send(self, data: bytes, file: BinaryIO | None = None) -> bool:
        """Send a frame without waiting, from any thread. The connection closes the file once it has been sent.

        Returns False if too much data waits already, because the other end does not read. If the other end is gone,
        nothing happens.
        """
        with self._lock:
            if self._is_closed or self._num_unsent_bytes > MAX_UNSENT_BYTES:
                _close(file)
                return self._is_closed
            is_waiting = bool(self._unsent)
            whole = memoryview(framed(data, has_file=file is not None))
            num_written = 0 if is_waiting else self._write(whole, file)
            if num_written < len(whole):
                self._unsent.append((whole[num_written:], None if num_written else file))
                self._num_unsent_bytes += len(whole) - num_written
            must_watch = bool(self._unsent) and not is_waiting
        if must_watch:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._watch)
        return True

    @property
    def num_unsent_bytes(self) -> int:
        """The data that waits for the other end to read; it may change at any moment."""
        return self._num_unsent_bytes

    async def sent(self) -> None:
        """Wait until all data has been sent, or the other end is gone."""
        with self._lock:
            if self._is_closed or not self._unsent:
                return
            self._sent = self._loop.create_future()
        await self._sent

    def close(self) -> None:
        """End the connection. Unsent data is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for file in (*(file for _, file in self._unsent), *self._files):
                _close(file)
            self._unsent.clear()
            self._files.clear()
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._note_sent()

    def _write(self, data: memoryview, file: BinaryIO | None) -> int:
        """Returns how many bytes the socket took; the file goes with the first of them."""
        try:
            if file is None:
                return self._socket.send(data)
            num_written = socket.send_fds(self._socket, [data], [file.fileno()])
        except BlockingIOError:
            return 0
        except OSError:  # the other end is gone, as the reader is about to see
            num_written = len(data)
        _close(file)
        return num_written

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            for _ in range(_MAX_AT_ONCE):
                if not self._unsent:
                    break
                first, file = self._unsent.popleft()
                num_written = self._write(first, file)
                self._num_unsent_bytes -= num_written
                if num_written < len(first):
                    self._unsent.appendleft((first[num_written:], None if num_written else file))
                    break
            if self._unsent:
                return
            if not self._is_closed:
                self._loop.remove_writer(self._socket.fileno())
        self._note_sent()

    def _note_sent(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def _read(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if self._is_closed or self._is_behind:
                return
            try:
                num_read, ancillary, flags, _ = self._socket.recvmsg_into([self._received.room()], _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                num_read, ancillary, flags = 0, [], 0
            for _, _, descriptor in ancillary:
                self._files.append(os.fdopen(int.from_bytes(descriptor, sys.byteorder), "rb", buffering=0))
            if flags & socket.MSG_CTRUNC:
                self._files.append(None)
            if not num_read:
                self.close()
                self._on_end()
                return
            self._received.add(num_read)
            self._handle()
            if not self._received.num_bytes:  # usually everything that has arrived was read
                return

    def _handle(self) -> None:
        """Handle the frames that have arrived."""
        self._is_behind = False
        for _ in range(_MAX_AT_ONCE):
            if self._is_closed or (frame := self._received.next()) is None:
                return
            data, has_file = frame
            self._on_frame(data, self._files.popleft() if has_file else None)
        self._is_behind = True
        self._loop.call_soon(self._handle)


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        file.close()
