"""A client that speaks HTTP/2 by hand, and reads as little as it likes."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
from google.protobuf.message import Message

QUERY = "/kestrel.v1.VisionService/Query"
COMPLETE_QUERY = "/kestrel.v1.VisionService/CompleteQuery"


def framed(message: Message) -> bytes:
    """A message with gRPC's prefix: not compressed, and its length."""
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


class Http2Client:
    """One connection. Lives on one event loop; nothing is read unless a method says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # What we read was written by the server; whether it is good HTTP/2 is still checked.
        self._http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._events: list[h2.events.Event] = []

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, *, window_bytes: int | None = None) -> AsyncIterator[Self]:
        """A connection on which each stream may send `window_bytes` before we read; None: the usual 65,535."""
        host, port = address.rsplit(":", 1)
        client = cls(*await asyncio.open_connection(host, int(port)))
        client._http2.initiate_connection()
        if window_bytes is not None:
            client._http2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        try:
            await client._flush()
            yield client
        finally:
            client.drop()

    def drop(self) -> None:
        """Close the socket without a word."""
        self._writer.transport.abort()

    async def ask(self, method: str, message: Message, **headers: str) -> int:
        """Send a whole call; returns its stream. `grpc_timeout="2S"` is the header grpc-timeout."""
        stream = await self.begin(method, **headers)
        await self.send(stream, framed(message), ends=True)
        return stream

    async def begin(self, method: str, **headers: str) -> int:
        """Send the headers of a call; returns its stream."""
        stream = self._http2.get_next_available_stream_id()
        usual = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "test", "te": "trailers"}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        self._http2.send_headers(stream, [*usual.items(), ("content-type", "application/grpc"), *more.items()])
        await self._flush()
        return stream

    async def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        """Send bytes of a call's messages, which must fit into the windows as far as they are known."""
        size = self._http2.max_outbound_frame_size
        for start in range(0, len(data), size):
            self._http2.send_data(stream, data[start : start + size])
        if ends:
            self._http2.end_stream(stream)
        await self._flush()

    def window_bytes(self, stream: int) -> int:
        """What may be sent now of a call's messages, as far as the server's announcements have been read."""
        return self._http2.local_flow_control_window(stream)

    async def reset(self, stream: int) -> None:
        """Cancel a call."""
        self._http2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        await self._flush()

    async def greeted(self) -> None:
        """Wait until the server's settings are known."""
        async for event in self.events():
            if isinstance(event, h2.events.RemoteSettingsChanged):
                return
        raise ConnectionError("the server closed the connection")

    @property
    def max_concurrent_streams(self) -> int:
        """What the server allows, as far as its settings have been read."""
        return self._http2.remote_settings.max_concurrent_streams

    async def ping(self, times: int = 1) -> None:
        """Ask for a sign of life, so many times in one write, without waiting for it."""
        for _ in range(times):
            self._http2.ping(b"kestrel?")
        await self._flush()

    async def events(self) -> AsyncIterator[h2.events.Event]:
        """What the server says, until it closes the connection; its windows are left as they are."""
        while True:
            while self._events:
                yield self._events.pop(0)
            data = await self._reader.read(65_536)
            if not data:
                return
            self._events += self._http2.receive_data(data)
            with contextlib.suppress(ConnectionError):  # what the server has said before it closed is still told
                await self._flush()

    async def next_data(self) -> h2.events.DataReceived:
        """The next piece of any message. Raises `ConnectionError` where there is none."""
        async for event in self.events():
            if isinstance(event, h2.events.DataReceived):
                return event
        raise ConnectionError("the server closed the connection")

    async def acknowledge(self, event: h2.events.DataReceived) -> None:
        """Let the server send as much again as this was."""
        assert event.stream_id is not None
        self._http2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        await self._flush()

    async def read(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """Everything that is left of a call: the bytes of its messages, and its trailers."""
        body = b""
        async for event in self.events():
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream:
                body += event.data or b""
                await self.acknowledge(event)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                fields = dict(event.headers or ())
                if event.stream_id == stream and "grpc-status" in fields:
                    return body, {str(name): str(value) for name, value in fields.items()}
        raise ConnectionError("the server closed the connection")

    async def _flush(self) -> None:
        self._writer.write(self._http2.data_to_send())
        await self._writer.drain()


def messages_in(body: bytes) -> list[bytes]:
    """The messages in the bytes of a call."""
    found: list[bytes] = []
    while body:
        compressed, length = struct.unpack_from(">BI", body)
        assert compressed == 0
        assert len(body) >= 5 + length
        found.append(body[5 : 5 + length])
        body = body[5 + length :]
    return found
