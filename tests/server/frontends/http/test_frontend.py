"""The HTTP port as a whole: tokens, pages, deadlines, certificates, probes, draining."""

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from kestrel_grpc.access import reloaded_files
from kestrel_grpc.calls import refusals
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.process.free_ports import PortUnavailable
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import EngineStatus
from tests.fakes import HOLD, FakeEngine, answers
from tests.server.certificates import Pair
from tests.server.http_calls import Connection, HttpServing, serving_http

QUERY = {"question": "?"}
SITE = "https://good.example"


def holds(request: Any) -> list[object]:
    return [*answers(request)[:2], HOLD, *answers(request)[2:]]


def tokens_in(folder: Path, **scopes: str) -> str:
    """A file with a token for each name, which is also its secret."""
    file = folder / "tokens.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in scopes}
    file.write_text(
        "".join(f'{name} = {{ sha256 = "{digests[name]}", {rest} }}\n' for name, rest in scopes.items())
    )
    return str(file)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_call_needs_a_token_that_allows_it(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"]', root='scopes = ["admin"]')
    async with serving_http(tokens=file) as rig:
        refused = await rig.ask("/v1/query", QUERY)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json["error"]["code"] == "TOKEN_INVALID"
        assert (await rig.ask("/v1/query", QUERY, headers=bearer("root"))).status == 403
        assert (await rig.ask("/v1/query", QUERY, headers=bearer("alice"))).status == 200
        assert (await rig.ask("/v1/query", QUERY, headers={"X-Moondream-Auth": "alice"})).status == 200
        assert (await rig.ask("/v1/models", headers=bearer("root"))).status == 200
        assert (await rig.ask("/metrics", headers=bearer("alice"))).status == 403
        assert (await rig.ask("/metrics", headers=bearer("root"))).status == 200
        assert (await rig.ask("/readyz")).status == 200
        assert rig.engine.tenants == ["alice", "alice"]


async def test_a_call_with_two_tokens_is_refused(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"]', bob='scopes = ["infer"]')
    async with serving_http(tokens=file) as rig:
        for second in ("alice", "bob"):
            both = {"authorization": f"Bearer {second}", **bearer("alice")}
            refused = await rig.ask("/v1/query", QUERY, headers=both)
            assert (refused.status, refused.json["error"]["code"]) == (401, "TOKEN_INVALID")
            for both in (
                {"x-moondream-auth": second, "X-Moondream-Auth": "alice"},
                {"x-moondream-auth": second, **bearer("alice")},
            ):
                refused = await rig.ask("/v1/query", QUERY, headers=both)
                assert (refused.status, refused.json["error"]["code"]) == (401, "TOKEN_INVALID")
        assert rig.engine.requests == []


async def test_a_timeout_is_a_number_of_seconds():
    async with serving_http() as rig:
        for wrong in ("1_0", "nan", "inf", "1e999", "1e9", "-1", "0", "0x10", "1.2.3", "", "soon"):
            refused = await rig.ask("/v1/query", QUERY, headers={"X-Request-Timeout": wrong})
            assert (refused.status, refused.json["error"]["code"]) == (400, "INVALID_REQUEST"), wrong
            assert refused.json["error"]["violations"][0]["field"] == "x-request-timeout"
        for taken in ("10", "2.5", "1e1", ".5"):
            assert (await rig.ask("/v1/query", QUERY, headers={"X-Request-Timeout": taken})).status == 200


async def test_the_first_value_of_a_repeated_header_counts():
    async with serving_http() as rig:
        for values, status in ((("10", "soon"), 200), (("soon", "10"), 400)):
            headers = dict(zip(("X-Request-Timeout", "x-request-timeout"), values, strict=True))
            assert (await rig.ask("/v1/query", QUERY, headers=headers)).status == status


async def test_a_connection_that_is_refused_again_and_again_waits_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refusals, "_BURST", 3.0)
    monkeypatch.setattr(refusals, "_PER_S", 0.001)
    file = tokens_in(tmp_path, alice='scopes = ["infer"]')
    async with serving_http(tokens=file) as rig, rig.connect() as connection:
        for path in ("/nothing", "/v1/models", "/v1/query"):
            await connection.send(path)
            assert (await connection.response()).status in (401, 404, 405)
        await connection.send("/nothing")
        waiting = asyncio.create_task(connection.response())
        assert (await rig.ask("/v1/query", QUERY, headers=bearer("alice"))).status == 200
        assert (await rig.ask("/v1/query", QUERY)).status == 401
        assert not waiting.done()
        await rig.server.drain()
        assert (await waiting).status == 404


async def test_a_token_that_is_refused_again_and_again_waits_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refusals, "_TOKEN_BURST", 3.0)
    monkeypatch.setattr(refusals, "_MAX_TOKEN_DELAY_S", 1e6)
    monkeypatch.setattr(refusals, "_TOKEN_PER_S", 0.001)
    file = tokens_in(tmp_path, alice='scopes = ["infer"]', mallory='scopes = ["infer"]')
    async with serving_http(tokens=file) as rig, rig.connect() as connection:
        for _ in range(3):
            assert (await rig.ask("/v1/query", {}, headers=bearer("mallory"))).status == 400
        await connection.send("/v1/query", {}, headers=bearer("mallory"))
        waiting = asyncio.create_task(connection.response())
        assert (await rig.ask("/v1/query", {}, headers=bearer("alice"))).status == 400
        assert (await rig.ask("/v1/query", QUERY, headers=bearer("mallory"))).status == 200
        assert not waiting.done()
        await rig.server.drain()
        assert (await waiting).status == 400


async def test_a_call_is_refused_from_its_headers_before_its_body_has_come(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"]')
    async with serving_http(tokens=file) as rig, rig.connect() as connection:
        announced = {"Content-Type": "application/json", "Content-Length": "1000000"}
        await connection.send("/v1/query", verb="POST", headers=announced)
        assert (await connection.response()).status == 401


async def test_a_rate_that_is_exceeded_is_a_status_with_the_time_to_wait(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"], rate = 0.001, burst = 1')
    async with serving_http(tokens=file) as rig:
        assert (await rig.ask("/v1/query", QUERY, headers=bearer("alice"))).status == 200
        refused = await rig.ask("/v1/query", QUERY, headers=bearer("alice"))
    assert (refused.status, refused.json["error"]["code"]) == (429, "RATE_LIMITED")
    assert 900 < int(refused.headers["retry-after"]) <= 1000


async def test_a_token_that_is_revoked_ends_its_stream_with_an_error(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"]')
    async with serving_http(FakeEngine(holds), tokens=file) as rig, rig.connect() as connection:
        await connection.send("/v1/query", {**QUERY, "stream": True}, headers=bearer("alice"))
        assert (await connection.head())[0] == 200
        assert await connection.chunk()
        tokens_in(tmp_path, bob='scopes = ["infer"]')
        assert b"TOKEN_INVALID" in await connection.chunk()
        assert await connection.chunk() == b""
        await rig.engine.is_idle.wait()


async def test_pages_of_other_sites_are_refused():
    async with serving_http() as rig:
        for headers in (
            {"Origin": "https://evil.example", "Content-Type": "text/plain"},
            {"Origin": "null"},
            {"Host": "evil.example"},
        ):
            refused = await rig.ask("/v1/query", QUERY, headers=headers)
            assert (refused.status, refused.json["error"]["code"]) == (403, "SOURCE_NOT_ALLOWED")
            assert "access-control-allow-origin" not in refused.headers
        plain = await rig.ask("/v1/query", QUERY, headers={"Content-Type": "text/plain"})
        assert (plain.status, plain.json["error"]["code"]) == (415, "MEDIA_TYPE_UNSUPPORTED")
        deleted = await rig.ask("/v1/images/sha256:0", verb="DELETE", headers={"Origin": "null"})
        assert (deleted.status, deleted.json["error"]["code"]) == (403, "SOURCE_NOT_ALLOWED")
        assert rig.engine.requests == []


async def test_pages_of_listed_sites_are_answered():
    async with serving_http(http_origins=(SITE,)) as rig:
        asked = {"Origin": SITE, "Access-Control-Request-Headers": "content-type,authorization"}
        for path, verb in (("query", "POST"), ("images", "PUT"), ("images/sha256:0", "DELETE")):
            asked["Access-Control-Request-Method"] = verb
            preflight = await rig.ask(f"/v1/{path}", verb="OPTIONS", headers=asked)
            assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, SITE)
        answer = await rig.ask("/v1/query", QUERY, headers={"Origin": SITE})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, SITE)
        asked["Origin"] = "https://evil.example"
        assert (await rig.ask("/v1/query", verb="OPTIONS", headers=asked)).status == 400
        refused = await rig.ask("/v1/query", QUERY, headers={"Origin": "https://evil.example"})
        assert refused.status == 403


async def test_compressed_bodies_are_refused():
    async with serving_http() as rig:
        answer = await rig.ask("/v1/query", QUERY, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.json["error"]["code"]) == (415, "MEDIA_TYPE_UNSUPPORTED")


@pytest.mark.one_process("the time may be over when the request comes")
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_deadline_ends_the_request(is_streamed: bool):
    def waits(request: Any) -> list[object]:
        return [HOLD]

    async with serving_http(FakeEngine(waits)) as rig:
        body = {**QUERY, "stream": is_streamed}
        answer = await rig.ask("/v1/query", body, headers={"X-Request-Timeout": "0.05"})
        assert (answer.status, answer.json["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
        (deadline_s,) = rig.engine.deadlines_s
        assert deadline_s is not None
        assert 0.0 < deadline_s <= 0.05
        await rig.engine.is_idle.wait()


async def test_a_deadline_passes_while_the_body_is_awaited():
    async with serving_http() as rig, rig.connect() as connection:
        head = {"X-Request-Timeout": "0.05", "Content-Type": "application/json", "Content-Length": "10"}
        await connection.send("/v1/query", verb="POST", headers=head)
        assert (await connection.response()).json["error"]["code"] == "DEADLINE_EXCEEDED"


async def test_the_trace_and_the_id_of_a_caller_are_those_of_the_call():
    async with serving_http() as rig:
        taken = await rig.ask("/v1/query", QUERY, headers={"X-Request-Id": "my.id"})
        refused = await rig.ask("/v1/query", QUERY, headers={"X-Request-Id": "a b"})
    assert taken.headers["x-request-id"] == "my.id"
    assert refused.headers["x-request-id"] != "a b"


async def test_calls_are_counted_as_on_grpc():
    async with serving_http() as rig:
        await rig.ask("/v1/query", QUERY)
        await rig.ask("/v1/query", {})
        text = (await rig.ask("/metrics")).body.decode()
    ok = 'rpc_server_call_duration_seconds_count{rpc_method="rest/query",rpc_response_status_code="OK"} 1'
    assert ok in text
    assert 'kestrel_requests_failed_total{reason="INVALID_REQUEST",rpc_method="rest/query"} 1' in text


@pytest.mark.one_process("the test tells the engine, not the server's side of it")
async def test_probes_follow_the_engine():
    async with serving_http() as rig:
        assert [(await rig.ask(path)).status for path in ("/healthz", "/livez", "/readyz")] == [200, 200, 200]
        rig.engine.become(EngineStatus.RECOVERING)
        assert [(await rig.ask(path)).status for path in ("/healthz", "/livez", "/readyz")] == [200, 200, 503]
        rig.engine.die()
        assert [(await rig.ask(path)).status for path in ("/healthz", "/livez", "/readyz")] == [503, 503, 503]


async def test_probes_answer_whoever_asks():
    heads = (
        b"GET %b HTTP/1.1\r\nHost: balancer.example\r\n\r\n",
        b"GET %b HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\r\n",
        b"GET %b HTTP/1.1\r\n\r\n",
        b"GET %b HTTP/1.0\r\n\r\n",
        b"GET %b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    )
    async with serving_http() as rig:
        for path in (b"/healthz", b"/livez", b"/readyz"):
            for head in heads:
                async with rig.connect() as connection:
                    connection.writer.write(head % path)
                    assert (await connection.response()).body == b"ok\n"
            for version in (b"1.0", b"1.1"):
                async with rig.connect() as connection:
                    connection.writer.write(b"HEAD %b HTTP/%b\r\nConnection: close\r\n\r\n" % (path, version))
                    assert (await connection.head())[0] == 200
                    assert await connection.reader.read() == b""


async def test_head_answers_as_get_without_a_body():
    async with serving_http() as rig, rig.connect() as connection:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            await connection.send(path, verb="HEAD")
            status, headers = await connection.head()
            assert (status, int(headers["content-length"]) > 0) == (200, True)
            await connection.send(path)
            assert (await connection.response()).status == 200
        await connection.send("/v1/query", verb="HEAD")
        assert (await connection.head())[0] == 405


async def test_a_request_names_one_host():
    async with serving_http() as rig, rig.connect() as connection:
        for hosts in (b"", b"Host: localhost\r\nHost: localhost\r\n"):
            connection.writer.write(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n")
            refused = await connection.response()
            assert (refused.status, refused.json["error"]["violations"][0]["field"]) == (400, "Host")
        connection.writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await connection.response()).status == 200


async def test_draining_lets_streams_finish_and_refuses_new_calls():
    async with serving_http(FakeEngine(holds)) as rig, rig.connect() as streaming, rig.connect() as other:
        await streaming.send("/v1/query", {**QUERY, "stream": True})
        assert (await streaming.head())[0] == 200
        await other.send("/healthz")
        assert (await other.response()).status == 200
        drain = asyncio.ensure_future(rig.server.drain())
        while (await rig.ask("/readyz")).status == 200:
            pass
        await other.send("/v1/query", QUERY)
        refused = await other.response()
        assert (refused.status, refused.json["error"]["code"]) == (503, "DRAINING")
        assert refused.headers["retry-after"] == "1"
        rig.engine.release()
        told = b""
        while piece := await streaming.chunk():
            told += piece
        assert b'"completed":true' in told
        await drain
        await other.ended()


async def test_a_port_in_use_is_one_clear_error():
    async with serving_http() as rig:
        config = ServerConfig(port=0, http_port=rig.server.http_port)
        other = Server(FakeEngine(), config)
        with pytest.raises(PortUnavailable, match=rf"127\.0\.0\.1:{rig.server.http_port}"):
            await other.start()
        await other.stop()


async def asked_over_tls(rig: HttpServing, context: ssl.SSLContext) -> tuple[int, bytes]:
    """The status of a call on a new connection, and the server's certificate."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.http_port, ssl=context)
    try:
        await Connection(reader, writer).send("/v1/query", QUERY)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return (await Connection(reader, writer).response()).status, certificate
    finally:
        writer.close()


async def test_a_new_certificate_serves_new_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reloaded_files, "RELOAD_INTERVAL_S", 0.01)
    pair, authority = Pair.within(tmp_path), trustme.CA()
    pair.write(authority)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving_http(tls_certificate=str(pair.certificate), tls_key=str(pair.key)) as rig:
        status, first = await asked_over_tls(rig, context)
        assert status == 200
        pair.write(authority)
        second = first
        while first == second:  # at most a few reloads long
            status, second = await asked_over_tls(rig, context)
            assert status == 200
        async with rig.connect() as plain:
            await plain.send("/healthz")
            await plain.ended()


async def test_a_certificate_of_the_client_is_asked_for(tmp_path: Path):
    pair, authority, clients = Pair.within(tmp_path), trustme.CA(), trustme.CA()
    pair.write(authority)
    client_ca = tmp_path / "clients.pem"
    clients.cert_pem.write_to_path(client_ca)
    options: dict[str, Any] = {
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tls_client_ca": str(client_ca),
    }
    async with serving_http(**options) as rig:
        for authority_of_client, is_taken in ((None, False), (authority, False), (clients, True)):
            context = ssl.create_default_context()
            authority.configure_trust(context)
            if authority_of_client is not None:
                authority_of_client.issue_cert("me@example.com").configure_cert(context)
            if is_taken:
                assert (await asked_over_tls(rig, context))[0] == 200
            else:
                with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                    await asked_over_tls(rig, context)
