"""What a client can do to its connection, and what the server then does."""

import asyncio
from inspect import signature
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kestrel_grpc.frontends.http import connection as connection_module
from kestrel_grpc.frontends.http import exchange
from tests.fakes import HOLD, FakeEngine, answers, much_text
from tests.server.http_calls import serving_http

POST = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
QUERY = b'{"question": "?"}'


def holds(request: Any) -> list[object]:
    return [*answers(request)[:1], HOLD, *answers(request)[1:]]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + b"Content-Length: 17\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 17\r\n\r\n", 400),
        (POST + b"Content-Length: 17\r\nContent-Length: 18\r\n\r\n", 400),
        (POST + b"Content-Length: +17\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n11\r\n", 501),
        (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n", 501),
        (POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n11\r\n", 501),
        (POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n11\r\n", 400),
        (POST + b"Content-Length: 17, 17\r\n\r\n", 400),
        (POST.replace(b"\r\n", b"\n") + b"Content-Length: 17\n\n", 400),
        (POST + b"X-A: b\r\n c\r\nContent-Length: 17\r\n\r\n", 400),
        (POST.replace(b"1.1", b"2.0") + b"Content-Length: 17\r\n\r\n", 505),
        (b"GET /healthz\r\n\r\n", 505),
        (b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (POST + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (POST + b"".join(b"X-%d: 1\r\n" % number for number in range(20_000)) + b"\r\n", 431),
    ],
    ids=range(21),
)
async def test_what_is_no_request_is_refused_and_the_connection_closed(sent: bytes, status: int):
    async with serving_http() as rig:
        async with rig.connect() as connection:
            connection.writer.write(sent)
            assert (await connection.head())[0] == status
            await connection.ended()
        assert rig.engine.requests == []
        assert (await rig.ask("/v1/query", {"question": "?"})).status == 200


async def test_a_client_that_still_sends_gets_the_refusal_of_its_headers():
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: gzip\r\n\r\n")
        assert (await connection.head())[0] == 501
        # Reading ends here for the client, and the server drops what it sends.
        assert b"chunked" in await connection.reader.read()
        for _ in range(3):
            connection.writer.write(bytes(100_000))
            await connection.writer.drain()


OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
    b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n",
)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(QUERY), QUERY)


@pytest.mark.parametrize("offer", OFFERS, ids=range(len(OFFERS)))
@pytest.mark.parametrize("framed", [b"Content-Length: 17\r\n\r\n" + QUERY, CHUNKED + b"\r\n"], ids=["17", "chunks"])
async def test_an_offer_of_another_protocol_is_ignored_in_any_packets(offer: bytes, framed: bytes):
    request = POST + offer + framed
    head = request.index(b"\r\n\r\n") + 4
    async with serving_http() as rig:
        for pieces in (
            (request,),
            (request[:head], request[head:]),
            (request[: head - 1], request[head - 1 :]),
            (request[: head + 5], request[head + 5 :]),
            tuple(request[at : at + 1] for at in range(len(request))),
        ):
            async with rig.connect() as connection:
                for piece in pieces:
                    connection.writer.write(piece)
                    await connection.writer.drain()
                    await asyncio.sleep(0)
                response = await connection.response()
                assert (response.status, response.json["answer"]) == (200, "a kestrel")
                # The connection goes on as any other.
                await connection.send("/healthz", headers={"Connection": "Upgrade", "Upgrade": "h2c"})
                assert (await connection.response()).status == 200
                await connection.send("/v1/query", {"question": "?"})
                assert (await connection.response()).status == 200


async def test_a_request_that_offers_another_protocol_may_end_its_connection():
    async with serving_http() as rig:
        for version, options in ((b"1.1", b"close, Upgrade"), (b"1.0", b"Upgrade")):
            async with rig.connect() as connection:
                connection.writer.write(POST.replace(b"1.1", version) + b"Content-Length: 17\r\n")
                connection.writer.write(b"Connection: %b\r\nUpgrade: h2c\r\n\r\n" % options + QUERY)
                response = await connection.response()
                assert (response.status, response.headers["connection"]) == (200, "close")
                await connection.ended()


async def test_what_follows_a_request_with_an_offer_is_a_second_request():
    request = POST + OFFERS[0] + b"Content-Length: 17\r\n\r\n" + QUERY
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        connection.writer.write(request + request)
        await rig.engine.num_submitted.acquire()
        rig.engine.release()
        response = await connection.response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        await connection.ended()
        assert len(rig.engine.requests) == 1


@pytest.mark.parametrize(
    "trailer",
    [
        b"Host: evil.example",
        b"Origin: https://evil.example",
        b"Authorization: Bearer x",
        b"X-Request-Id: trailer",
        b"X-Request-Timeout: soon",
        b"Content-Encoding: gzip",
        b"Content-Type: text/plain",
        b"Expect: 100-continue",
        b"Connection: Upgrade\r\nUpgrade: h2c",
    ],
)
async def test_fields_behind_a_body_are_no_headers(trailer: bytes):
    async with serving_http() as rig, rig.connect() as connection:
        for _ in range(2):
            connection.writer.write(POST + CHUNKED + trailer + b"\r\n\r\n")
            response = await connection.response()
            assert response.status == 200
            assert response.headers["x-request-id"] != "trailer"


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"10\r\n" + QUERY + b"\r\n0\r\n\r\n",
        b"11\n" + QUERY + b"\n0\n\n",
        b"11;a\n" + QUERY + b"\r\n0\r\n\r\n",
        b"11 \r\n" + QUERY + b"\r\n0\r\n\r\n",
        b"11\r\n" + QUERY + b"\r\n0\r\nContent-Length: 3\r\n\r\n",
        b"11\r\n" + QUERY + b"\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"11\r\n" + QUERY + b"\r\n0\r\n" + b"X-Trailer: 1\r\n" * 20_000,
    ],
    ids=range(8),
)
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_body_whose_end_is_not_clear_is_refused(body: bytes, is_late: bool):
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        if is_late:
            await connection.writer.drain()
            await asyncio.sleep(0)
        connection.writer.write(body)
        response = await connection.response()
        assert (response.status, response.json["error"]["code"]) == (400, "INVALID_REQUEST")
        assert response.headers["connection"] == "close"
        await connection.ended()
        assert rig.engine.requests == []
        failed = (await rig.ask("/metrics")).body.decode()
        assert 'kestrel_requests_failed_total{reason="INVALID_REQUEST",rpc_method="rest/query"} 1' in failed


async def test_a_target_with_a_host_is_taken_apart():
    async with serving_http() as rig, rig.connect() as connection:
        for target, host, status in (
            (b"http://localhost/v1/models?a=b", b"localhost", 200),
            (b"http://127.0.0.1:1/v1/models", b"evil.example", 200),
            (b"http://evil.example/v1/models", b"localhost", 403),
            (b"http://localhost", b"localhost", 200),
            (b"http://localhost?a", b"localhost", 200),
        ):
            connection.writer.write(b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, host))
            assert (await connection.response()).status == status, target


async def test_headers_that_do_not_come_end_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.05)
    for sent in (b"", b"\r\n", POST, POST[:30]):
        async with serving_http() as rig, rig.connect() as connection:
            connection.writer.write(sent)
            assert (await connection.head())[0] == 408
            await connection.ended()


async def test_the_second_request_of_a_connection_has_the_same_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.05)
    async with serving_http() as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?"})
        assert (await connection.response()).status == 200
        connection.writer.write(POST)
        assert (await connection.head())[0] == 408
        await connection.ended()


async def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "IDLE_TIMEOUT_S", 0)
    async with serving_http() as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?"})
        assert (await connection.response()).status == 200
        await connection.ended()


async def test_a_body_that_does_not_come_ends_the_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "_DISCARD_S", 0.05)
    async with serving_http(receive_timeout=0.05) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Content-Length: 17\r\n\r\n{")
        response = await connection.response()
        assert (response.status, response.json["error"]["code"]) == (408, "MESSAGE_TIMEOUT")
        await connection.ended()


async def test_a_second_request_before_the_answer_is_not_served():
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        request = POST + b"Content-Length: 17\r\n\r\n" + QUERY
        connection.writer.write(request * 2000)
        await rig.engine.num_submitted.acquire()
        rig.engine.release()
        response = await connection.response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        await connection.ended()
        assert len(rig.engine.requests) == 1


async def test_garbage_behind_a_request_does_not_harm_its_answer():
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Content-Length: 17\r\n\r\n" + QUERY)
        await rig.engine.num_submitted.acquire()
        connection.writer.write(b"\0garbage\r\n\r\n")
        rig.engine.release()
        assert (await connection.response()).status == 200
        await connection.ended()


async def test_the_framing_of_a_body_is_bounded():
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.writer.write(b"1;" + b"a" * 1000 + b"\r\n{\r\n" + b"1;aaaaaaaaaaaa\r\n \r\n" * 10_000)
        await connection.ended()
        assert (await rig.ask("/v1/query", {"question": "?"})).status == 200


async def test_trailers_are_bounded():
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + QUERY + b"\r\n0\r\n")
        connection.writer.write(b"X-Trailer: 1\r\n" * 20_000)
        await connection.ended()


async def test_a_chunked_body_is_read():
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in (QUERY[:5], QUERY[5:]):
            connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.writer.drain()
        connection.writer.write(b"0\r\n\r\n")
        assert (await connection.response()).json["answer"] == "a kestrel"


async def test_further_connections_replace_idle_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 2)
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as busy, rig.connect() as idle:
        await busy.send("/v1/query", {"question": "?"})
        await rig.engine.num_submitted.acquire()
        await idle.send("/healthz")
        assert (await idle.response()).status == 200
        async with rig.connect() as third:
            await third.send("/v1/query", {"question": "?"})
            await rig.engine.num_submitted.acquire()
            await idle.ended()
            async with rig.connect() as fourth:  # none is idle any more
                await fourth.ended()
            rig.engine.release()
            assert (await third.response()).status == 200
        assert (await busy.response()).status == 200


async def test_a_connection_whose_request_is_refused_is_replaced_before_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 2)
    async with serving_http() as rig, rig.connect() as idle, rig.connect() as refused:
        await idle.send("/healthz")
        assert (await idle.response()).status == 200
        withheld = {"Content-Type": "text/plain", "Content-Length": "10"}
        await refused.send("/v1/query", verb="POST", headers=withheld)
        assert (await refused.response()).status == 415
        async with rig.connect() as third:
            await third.send("/healthz")
            assert (await third.response()).status == 200
            await refused.ended()
        await idle.send("/healthz")
        assert (await idle.response()).status == 200


async def test_connections_beyond_the_rate_of_replacements_are_closed_and_replace_none(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connection_module, "MAX_REPLACED_PER_S", 0)
    async with serving_http() as rig, rig.connect() as idle:
        await idle.send("/healthz")
        assert (await idle.response()).status == 200
        async with rig.connect() as late:
            await late.ended()
        await idle.send("/healthz")
        assert (await idle.response()).status == 200


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_above_the_limit_is_refused_while_it_is_read(has_length: bool):
    async with serving_http(max_message_bytes=100_000, max_receiving_bytes=10_000_000) as rig:
        async with rig.connect() as connection:
            if has_length:
                connection.writer.write(POST + b"Content-Length: 100001\r\n\r\n")
            else:
                connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
                connection.writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                connection.writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            response = await connection.response()
        assert (response.status, response.json["error"]["code"]) == (413, "MESSAGE_TOO_LARGE")
        assert response.headers["connection"] == "close"


async def test_a_refusal_reaches_a_client_that_still_sends():
    async with serving_http() as rig, rig.connect() as connection:
        length = 30_000_000
        connection.writer.write(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length)
        connection.writer.write(bytes(length))
        await connection.writer.drain()
        assert (await connection.response()).status == 404
        await connection.ended()


async def test_the_rest_of_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "_DISCARD_S", 0.05)
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert (await connection.response()).status == 404
        await connection.ended()


async def test_a_reader_that_takes_nothing_loses_its_stream():
    def says_much(request: Any) -> list[object]:
        started, *_, last = answers(request)
        return [started, *much_text(), last]

    async with serving_http(FakeEngine(says_much), stream_idle_timeout=0.2) as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?", "stream": True})
        transport: Any = connection.writer.transport
        transport.pause_reading()
        await rig.engine.num_submitted.acquire()
        await rig.server.drain()  # waits for the end of the call
        transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await connection.response()


# Parts of uvicorn's class that `Connection` overrides, and those that it uses.
OVERRIDDEN = {
    *("__init__", "connection_made", "connection_lost", "data_received", "on_message_begin", "on_header"),
    *("on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
}
ATTRIBUTES = {
    *("cycle", "flow", "headers", "loop", "parser", "scope", "server_state", "timeout_keep_alive_task"),
    *("shutdown", "transport", "url"),
}
CYCLE_ATTRIBUTES = {"disconnected", "keep_alive", "message_event", "more_body", "response_complete"}


async def test_uvicorn_has_the_parts_that_connections_use(monkeypatch: pytest.MonkeyPatch):
    """uvicorn does not document its protocol class. Raise the bound in pyproject.toml when this file passes."""
    own, base = vars(connection_module.Connection), vars(HttpToolsProtocol)
    assert {name for name in own if name in base and callable(own[name])} == OVERRIDDEN
    for name in OVERRIDDEN - {"__init__"}:
        assert list(signature(own[name]).parameters) == list(signature(base[name]).parameters), name
    open_connections: list[Any] = []

    def keep(connection: Any, task: Any) -> None:
        open_connections.append(connection)

    monkeypatch.setattr(connection_module.Connection, "serve_by", keep)
    async with serving_http() as rig:
        assert (await rig.ask("/v1/query", {"question": "?"})).status == 200
    connection = open_connections[0]
    assert {name for name in ATTRIBUTES if not hasattr(connection, name)} == set()
    assert {name for name in CYCLE_ATTRIBUTES if not hasattr(connection.cycle, name)} == set()
