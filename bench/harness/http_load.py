"""Load over HTTP/1.1 that costs little, and a bare server that sends the same answers as ours."""

import asyncio
import base64
import binascii
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kestrel_grpc.cli.batch.callers import ServerAddress
from kestrel_grpc.cli.bench.http import HttpConnection
from kestrel_grpc.frontends.openai.rendering import ChatRenderer
from kestrel_grpc.frontends.openai.requests import Style
from kestrel_grpc.frontends.rest.rendering import Renderer
from kestrel_runtime.api.events import Event, Finished

_REQUEST_ID = "0123456789abcdef0123456789abcdef"
_CHAT, _POINT, _QUERY = "/v1/chat/completions", "/v1/point", "/v1/query"


@dataclass(frozen=True)
class HttpLoad:
    """A kind of load: one request, sent again and again by `num_in_flight` clients."""

    name: str
    path: str
    body: bytes
    num_in_flight: int
    is_streaming: bool


def _loads(api: str, stream: HttpLoad, images: Callable[[str], tuple[str, bytes]]) -> tuple[HttpLoad, ...]:
    def with_image(size: str, num_bytes: int) -> HttpLoad:
        path, body = images("data:image/png;base64," + base64.b64encode(os.urandom(num_bytes)).decode())
        return HttpLoad(f"{api}, requests with a {size} image", path, body, 16, False)

    return (stream, with_image("100 KB", 100_000), with_image("1 MB", 1_000_000))


def http_loads() -> tuple[HttpLoad, ...]:
    """The loads of each API."""
    chat = {"model": "empty", "messages": [{"role": "user", "content": "?"}], "stream": True}

    def seen(url: str) -> tuple[str, bytes]:
        parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
        return _CHAT, json.dumps({"model": "empty", "messages": [{"role": "user", "content": parts}]}).encode()

    def point(url: str) -> tuple[str, bytes]:
        return _POINT, json.dumps({"object": "?", "image_url": url}).encode()

    query = json.dumps({"question": "?", "stream": True}).encode()
    return (
        HttpLoad("REST, small requests", _POINT, b'{"object": "?", "image_url": "QUJD"}', 64, False),
        *_loads("REST", HttpLoad("REST, streamed chunks", _QUERY, query, 64, True), point),
        *_loads("OpenAI", HttpLoad("OpenAI, streamed chunks", _CHAT, json.dumps(chat).encode(), 64, True), seen),
    )


async def drive(address: str, load: HttpLoad, duration_s: float) -> int:
    """Keep `num_in_flight` requests running for a while; how many answers, or chunks of streams, came."""
    place = ServerAddress.parse(address, None)
    head = f"POST {load.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(load.body)}\r\n\r\n".encode() + load.body
    until = time.perf_counter() + duration_s
    count = 0

    def take(data: bytes) -> None:
        nonlocal count
        if load.is_streaming:
            count += data.count(b"data: ")

    async def ask() -> None:
        nonlocal count
        connection = await HttpConnection.connect(place)
        is_over = False
        while not is_over:
            status = await connection.exchange(request, take)
            assert status == 200, f"{load.name}: {status}"
            count += not load.is_streaming
            is_over = time.perf_counter() >= until
        connection.close()

    await asyncio.gather(*(ask() for _ in range(load.num_in_flight)))
    return count


@asynccontextmanager
async def bare_http_server(events: Mapping[str, Sequence[Event]]) -> AsyncIterator[int]:
    """The port of uvicorn with an application that reads the JSON, decodes the image and sends the same answers,
    the chunks of a stream one by one.

    `events` are those of each path.
    """
    config = Config(_bare_app(events), ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: HttpToolsProtocol(config, state, {}), "127.0.0.1", 0
    )
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


def _bare_app(events: Mapping[str, Sequence[Event]]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message["body"]
            is_whole = not message["more_body"]
        request = json.loads(body)
        _decode_image(request)
        renderer: Any = (
            ChatRenderer(_REQUEST_ID, "empty", 0, Style())
            if scope["path"] == _CHAT
            else Renderer(_REQUEST_ID, "empty", "moondream")
        )
        found = events[scope["path"]]
        if request.get("stream"):
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for event in found:
                if told := renderer.events(event, 0):
                    await send({"type": "http.response.body", "body": told, "more_body": True})
                # Each token comes in a turn of its own, so that no two chunks are one write to the socket.
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
            return
        last = found[-1]
        assert isinstance(last, Finished)
        answer = renderer.answer(last)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def _decode_image(request: Mapping[str, Any]) -> None:
    url = request.get("image_url")
    with contextlib.suppress(KeyError, TypeError, IndexError):
        url = url or request["messages"][0]["content"][1]["image_url"]["url"]
    if url:
        binascii.a2b_base64(url.partition(",")[2])
