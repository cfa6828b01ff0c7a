"""Divides a stream of bytes into frames, on every socket between the processes of a server.

A frame is the length of its data in four bytes, a byte that says whether a file follows, and the data. The file is
a descriptor that the socket carries next to the bytes (SCM_RIGHTS).
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("<I?")
_HEAD_BYTES = _HEAD.size
_BUFFER_BYTES = 256 * 2**10


Frame = tuple[bytes, bool]
"""The data of a frame, and True if a file was sent with it."""


def framed(data: bytes, *, has_file: bool = False) -> bytes:
    """Returns the bytes of a frame."""
    return _HEAD.pack(len(data), has_file) + data


def receive_frame(connection: socket.socket) -> bytes:
    """Returns the data of the next frame. Blocks. Raises `EOFError` if the other end is gone."""
    length, _ = _HEAD.unpack(_received(connection, _HEAD_BYTES))
    return _received(connection, length)


class FrameTooLong(Exception):
    """Raised for a frame that is longer than the receiver allows."""


class ReceivedFrames:
    """Collects the bytes that a socket receives, and takes the frames out of them.

    Receive into `room()`, call `add` with the number of bytes, and then `next` until it returns None. `max_bytes`
    is the length of the longest frame that is received.
    """

    def __init__(self, max_bytes: int = 2**32) -> None:
        self._max_bytes = max_bytes
        # The bytes that were received and not taken: `_buffer[_start:_end]`.
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that were received and not taken."""
        return self._end - self._start

    def room(self) -> memoryview:
        """Returns the memory for the next bytes: at least one, and all of a frame that has begun."""
        return memoryview(self._buffer)[self._end :]

    def add(self, num_bytes: int) -> None:
        """Count the bytes that were received into `room()`."""
        self._end += num_bytes

    def next(self) -> Frame | None:
        """Returns the next complete frame. If there is none, makes room for it and returns None.

        Raises `FrameTooLong`.
        """
        start, num_needed = self._start, _HEAD_BYTES
        num_here = self._end - start
        if num_here >= _HEAD_BYTES:
            num_data, has_file = _HEAD.unpack_from(self._buffer, start)
            num_needed += num_data
            if num_here >= num_needed:
                self._start = start + num_needed
                return bytes(memoryview(self._buffer)[start + _HEAD_BYTES : self._start]), has_file
            if num_data > self._max_bytes:
                raise FrameTooLong
        self._make_room(num_needed)
        return None

    def _make_room(self, num_needed: int) -> None:
        """Make the buffer hold at least `num_needed` bytes from `_start` on."""
        size = max(num_needed, _BUFFER_BYTES)
        if self._start == self._end and len(self._buffer) == size:
            self._start = self._end = 0
        elif len(self._buffer) - self._start < num_needed or len(self._buffer) > size:
            # A new buffer: the event loop may still hold a view of the former one.
            kept = self._buffer[self._start : self._end]
            self._buffer = bytearray(size)
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return data
