"""What a client can do to its connection, and what the server then does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (POST + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (POST + b"".join(b"X-%d: 1\r\n" % number for number in range(20_000)) + b"\r\n", 431),
    ],
    ids=range(9),
)
async def test_what_is_no_request_is_refused_and_the_connection_closed(sent: bytes, status: int) -> None:
    async with serving_http() as rig:
        async with rig.connect() as connection:
            connection.writer.write(sent)
            assert (await connection.head())[0] == status
            await connection.ended()
        assert rig.engine.requests == []
        assert (await rig.ask("/v1/query", {"question": "?"})).status == 200


async def test_headers_that_do_not_come_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.05)
    for sent in (b"", b"\r\n", POST, POST[:30]):
        async with serving_http() as rig, rig.connect() as connection:
            connection.writer.write(sent)
            assert (await connection.head())[0] == 408
            await connection.ended()


async def test_the_second_request_of_a_connection_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.05)
    async with serving_http() as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?"})
        assert (await connection.response()).status == 200
        connection.writer.write(POST)
        assert (await connection.head())[0] == 408
        await connection.ended()


async def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "IDLE_TIMEOUT_S", 0)
    async with serving_http() as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?"})
        assert (await connection.response()).status == 200
        await connection.ended()


async def test_a_body_that_does_not_come_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_DISCARD_S", 0.05)
    async with serving_http(receive_timeout=0.05) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Content-Length: 17\r\n\r\n{")
        response = await connection.response()
        assert (response.status, response.json["error"]["code"]) == (408, "MESSAGE_TIMEOUT")
        await connection.ended()


async def test_a_second_request_before_the_answer_is_not_served() -> None:
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        request = POST + b"Content-Length: 17\r\n\r\n" + QUERY
        connection.writer.write(request * 2000)
        await rig.engine.num_submitted.acquire()
        rig.engine.release()
        response = await connection.response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        await connection.ended()
        assert len(rig.engine.requests) == 1


async def test_garbage_behind_a_request_does_not_harm_its_answer() -> None:
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Content-Length: 17\r\n\r\n" + QUERY)
        await rig.engine.num_submitted.acquire()
        connection.writer.write(b"\0garbage\r\n\r\n")
        rig.engine.release()
        assert (await connection.response()).status == 200
        await connection.ended()


async def test_the_framing_of_a_body_is_bounded() -> None:
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.writer.write(b"1;" + b"a" * 1000 + b"\r\n{\r\n" + b"1;aaaaaaaaaaaa\r\n \r\n" * 10_000)
        await connection.ended()
        assert (await rig.ask("/v1/query", {"question": "?"})).status == 200


async def test_trailers_are_bounded() -> None:
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + QUERY + b"\r\n0\r\n")
        connection.writer.write(b"X-Trailer: 1\r\n" * 20_000)
        await connection.ended()


async def test_a_chunked_body_is_read() -> None:
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in (QUERY[:5], QUERY[5:]):
            connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.writer.drain()
        connection.writer.write(b"0\r\n\r\n")
        assert (await connection.response()).json["answer"] == "a kestrel"


async def test_further_connections_replace_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
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
) -> None:
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
) -> None:
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
async def test_a_body_above_the_limit_is_refused_while_it_is_read(has_length: bool) -> None:
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


async def test_a_refusal_reaches_a_client_that_still_sends() -> None:
    async with serving_http() as rig, rig.connect() as connection:
        length = 30_000_000
        connection.writer.write(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length)
        connection.writer.write(bytes(length))
        await connection.writer.drain()
        assert (await connection.response()).status == 404
        await connection.ended()


async def test_the_rest_of_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_DISCARD_S", 0.05)
    async with serving_http() as rig, rig.connect() as connection:
        connection.writer.write(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert (await connection.response()).status == 404
        await connection.ended()


async def test_a_reader_that_takes_nothing_loses_its_stream() -> None:
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
