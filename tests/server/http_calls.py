"""HTTP/1.1 spoken by hand to a true server over a fake engine: whole requests, pieces of them, and responses."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from tests.fakes import FakeEngine
from tests.over_sockets import as_chosen

IMAGE_BYTES = b"an encoded image"
IMAGE_URL = "data:image/png;base64," + base64.b64encode(IMAGE_BYTES).decode()


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event: JSON, or the text where it is none."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [json.loads(line) if line.startswith("{") else line for line in lines]


class Connection:
    """One connection. `reader` and `writer` are for what is no proper request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self, path: str, body: Any = None, *, verb: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """A whole request; a body that is not bytes is sent as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Host": "localhost", **(headers or {})}
        if body is not None:
            given = {"Content-Type": "application/json", "Content-Length": str(len(data)), **given}
        lines = [f"{verb or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in given.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split()[1]), {name.lower(): value for name, value in headers}

    async def response(self) -> Response:
        """The next response as a whole."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            pieces: list[bytes] = []
            while piece := await self.chunk():
                pieces.append(piece)
            return Response(status, headers, b"".join(pieces))
        return Response(status, headers, await self.reader.readexactly(int(headers.get("content-length", 0))))

    async def chunk(self) -> bytes:
        """The next chunk of a response; empty at its end."""
        length = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(length + 2))[:-2]

    async def ended(self) -> None:
        """Wait until the server has closed the connection, whatever it sends before."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


@dataclass(frozen=True)
class HttpServing:
    server: Server
    engine: FakeEngine

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        assert self.server.http_port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.http_port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()

    async def ask(self, path: str, body: Any = None, **options: Any) -> Response:
        """One request on a connection of its own."""
        async with self.connect() as connection:
            await connection.send(path, body, **options)
            return await connection.response()


@asynccontextmanager
async def serving_http(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[HttpServing]:
    engine = engine or FakeEngine()
    config = ServerConfig(port=0, http_port=0, **options)
    async with as_chosen(engine) as asked, Server(asked, config) as server:
        yield HttpServing(server, engine)
