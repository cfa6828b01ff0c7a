"""Both ways to have a line of a batch answered give what the HTTP port gives."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kestrel_client.connection import ClientTls
from kestrel_grpc.cli.batch.callers import EngineCaller, RunEnded, ServerAddress, ServerCaller, Unreachable
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import NoRemoteImages
from kestrel_runtime.api.errors import ContextLengthExceeded, Overloaded
from tests.fakes import FakeEngine, answers, fails
from tests.server.http_calls import IMAGE_URL, HttpServing, serving_http

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "seed": 1}
CALLS: list[tuple[str, Any]] = [
    ("/v1/query", {"question": "?", "image_url": IMAGE_URL, "reasoning": True}),
    ("/v1/query", {"question": "?", "hue": 1, "settings": {"temperature": "warm"}}),
    ("/v1/caption", {"image_url": IMAGE_URL, "length": "short", "format": "kestrel"}),
    ("/v1/caption", {"image_url": "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()}),
    ("/v1/point", {"image_url": IMAGE_URL, "object": "kite"}),
    ("/v1/detect", {"image_url": IMAGE_URL, "object": "kite", "settings": {"max_objects": 0}}),
    ("/v1/segment", {"image_url": IMAGE_URL, "object": "kite"}),
    ("/v1/gaze", {"image_url": IMAGE_URL, "eye": [0.5, 0.5]}),
    ("/v1/query", {"question": "?", "image_url": "https://example.com/a.png"}),
    ("/v1/query", {"question": "?", "model": "other"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": [{}]}),
    ("/v1/completions", {"model": "fake", "prompt": "?"}),
    ("/v1/embed", {"image_url": IMAGE_URL}),
    ("/v1/embeddings", {"input": "?"}),
    ("/v1/embeddings", {"model": "fake", "input": [IMAGE_URL]}),
    ("/v1/nothing", {}),
]


@asynccontextmanager
async def calling(
    serving: HttpServing, token: str | None = None, timeout_s: float = 30.0
) -> AsyncIterator[ServerCaller]:
    address = ServerAddress.parse(f"http://127.0.0.1:{serving.server.http_port}", None)
    caller = ServerCaller(address, token, timeout_s=timeout_s, num_connections=2)
    try:
        yield caller
    finally:
        caller.close()


def steady(document: Any) -> Any:
    """Without the time, by which the answers of two calls may differ."""
    return {name: value for name, value in document.items() if name != "created"}


async def test_every_answer_and_refusal_is_that_of_the_http_port():
    async with serving_http(max_stored_image_bytes=0) as serving, calling(serving) as remote:
        own = EngineCaller(serving.engine, ServerConfig(), NoRemoteImages())
        for path, body in CALLS:
            asked = await serving.ask(path, body, headers={"x-request-id": "batch-1"})
            for caller in (own, remote):
                reply = await caller.post(path, json.dumps(body).encode(), "batch-1")
                assert (reply.status, steady(reply.document)) == (asked.status, steady(asked.json)), (path, body)


@pytest.mark.parametrize("error", [ContextLengthExceeded("image", 5000, 4096), Overloaded(4, retry_after_s=1.5)])
async def test_what_the_engine_refuses_is_told_as_on_the_http_port(error: Exception):
    async with serving_http(FakeEngine(fails(error))) as serving, calling(serving) as remote:
        own = EngineCaller(serving.engine, ServerConfig(), NoRemoteImages())
        body = {"question": "?", "image_url": IMAGE_URL}
        asked = await serving.ask("/v1/query", body, headers={"x-request-id": "batch-1"})
        for caller in (own, remote):
            reply = await caller.post("/v1/query", json.dumps(body).encode(), "batch-1")
            assert (reply.status, reply.document) == (asked.status, asked.json)
            assert reply.retry_after_s == (1.5 if isinstance(error, Overloaded) else None)


async def test_a_bug_is_an_internal_error_without_its_text(caplog):
    engine = FakeEngine()
    setattr(engine, "submit_samples", None)  # noqa: B010 — it is no attribute that may be None
    own = EngineCaller(engine, ServerConfig(), NoRemoteImages())
    reply = await own.post("/v1/query", b'{"question": "?"}', "batch-1")
    assert (reply.status, reply.document["error"]["message"]) == (500, "internal error")
    assert "request batch-1 failed" in caplog.text


async def test_a_connection_that_the_server_has_closed_is_opened_again():
    async with serving_http() as serving, calling(serving) as caller:
        await caller.check()
        frontend: Any = serving.server._http
        for connection in list(frontend._listener._state.connections):
            connection.transport.close()
            await connection.closed
        for _ in range(3):
            assert (await caller.post("/v1/query", b'{"question": "?"}', "batch-1")).status == 200


async def test_no_server_is_told_with_the_reason():
    async with serving_http() as serving:
        port = serving.server.http_port
    caller = ServerCaller(ServerAddress.parse(f"localhost:{port}", None), None, timeout_s=60.0, num_connections=1)
    with pytest.raises(Unreachable, match="Connection refused"):
        await caller.check()
    caller.close()


async def test_a_token_that_is_wrong_ends_the_run(tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'alice = {{ sha256 = "{"ab" * 32}", scopes = ["infer"] }}\n')
    async with serving_http(tokens=str(tokens)) as serving, calling(serving, "wrong") as caller:
        with pytest.raises(RunEnded, match="--token or KESTREL_GRPC_TOKEN"):
            await caller.check()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>",
        b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\x10\0\0",  # the settings with which a gRPC port begins
    ],
    ids=("html", "http2"),
)
async def test_the_port_of_another_protocol_ends_the_run(said: bytes):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    caller = ServerCaller(ServerAddress.parse(f"127.0.0.1:{port}", None), None, timeout_s=60.0, num_connections=1)
    with pytest.raises(RunEnded, match="is not that of the HTTP port"):
        await caller.check()
    caller.close()
    server.close()


async def test_the_time_limit_of_a_line_is_its_deadline():
    engine = FakeEngine(answers)
    async with serving_http(engine) as serving, calling(serving, timeout_s=7.0) as remote:
        own = EngineCaller(engine, ServerConfig(), NoRemoteImages(), timeout_s=7.0)
        for caller in (own, remote):
            await caller.post("/v1/query", b'{"question": "?"}', "batch-1")
    assert [round(deadline_s or 0) for deadline_s in engine.deadlines_s] == [7, 7]


@pytest.mark.parametrize(
    ("text", "host", "port", "prefix", "is_encrypted"),
    [
        ("localhost:8000", "localhost", 8000, "", False),
        ("http://[::1]:8000/", "::1", 8000, "", False),
        ("https://example.com/kestrel/v1", "example.com", 443, "/kestrel", True),
    ],
)
def test_an_address_is_that_of_the_http_port(text, host, port, prefix, is_encrypted):
    address = ServerAddress.parse(text, None)
    assert (address.host, address.port, address.prefix) == (host, port, prefix)
    assert (address.tls is not None) is is_encrypted


@pytest.mark.parametrize("text", ["ftp://localhost", "http://", "http://a:b@host", "http://host?x=1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="must be the address of the HTTP port"):
        ServerAddress.parse(text, None)


def test_an_address_without_a_scheme_is_encrypted_where_certificates_are_named():
    assert ServerAddress.parse("localhost:8000", ClientTls()).tls is not None
    with pytest.raises(ValueError, match="asks for no encryption"):
        ServerAddress.parse("http://localhost:8000", ClientTls())
