import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.v1 import engine_service_pb2, image_service_pb2, vision_service_pb2
from kestrel_client.v1 import engine_service_pb2 as engine_wire
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.access import access as access_module
from kestrel_grpc.access import reloaded_files, token_file
from kestrel_grpc.access.access import TokenAccess, TokenInvalid, required_scopes
from kestrel_grpc.access.limits import RateLimited, TokenLimit, TokenLimits
from kestrel_grpc.access.reloaded_files import read_regular_file
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.calls.errors import describe
from kestrel_runtime.api.events import Started, TextChannel, TextDelta, Usage
from tests.fakes import HOLD, FakeEngine
from tests.journey import http2
from tests.journey.http2 import Http2Client
from tests.server.certificates import replace
from tests.server.serving import Serving, details_of, reason_of, serving

VISION = "kestrel.v1.VisionService/"
QUERY = wire.QueryRequest(question="?")
COMPLETE_QUERY = wire.CompleteQueryRequest(question="?")
SECRETS = {"alice": "kestrel_alice", "bob": "kestrel_bob", "operator": "kestrel_operator"}
SCOPES = {"operator": [Scope.ADMIN]}


def bearing(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {SECRETS[name]}"),)


def unended(refusal: Exception) -> None:
    raise AssertionError("no token is revoked here")


def write_tokens(path: Path, names: Iterable[str] = SECRETS, limits: str = "", scope: Scope | None = None) -> None:
    lines = []
    for name in names:
        scopes = frozenset(SCOPES.get(name, [scope or Scope.INFER]))
        lines.append(line_for(name, SECRETS[name], scopes).replace(" }", f"{limits} }}"))
    replace(path, "\n".join(lines).encode())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    write_tokens(path)
    return path


@pytest.fixture(autouse=True)
def _reload_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "RELOAD_INTERVAL_S", 0.02)


def stalls(request: object) -> list[object]:
    """A script that starts, says a word and then waits."""
    return [Started(Usage(1, 0)), TextDelta("a", TextChannel.ANSWER, 0, 1), HOLD]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """What a call is refused with, which must come without headers."""
    answer = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert "x-request-id" not in dict(await call.initial_metadata())
    return caught.value


@asynccontextmanager
async def running(rig: Serving, name: str) -> AsyncIterator[Any]:
    """A stream that has begun and will not end by itself."""
    stream = rig.vision.Query(QUERY, metadata=bearing(name))
    await stream.read()
    await stream.read()
    try:
        yield stream
    finally:
        stream.cancel()


async def test_a_known_token_gets_answers(path):
    async with serving(tokens=str(path)) as rig:
        response = await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
        assert response.result.answer == "a kestrel"
        events = [event async for event in rig.vision.Query(QUERY, metadata=bearing("alice"))]
        assert events[-1].completed.answer == "a kestrel"


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer kestrel_eve"),),
        (("authorization", "Basic kestrel_alice"),),
        (("authorization", "kestrel_alice"),),
        (("x-api-key", "kestrel_alice"),),
        (("authorization", "Bearer kestrel_alice"), ("authorization", "Bearer kestrel_bob")),
        (("authorization", "Bearer kestrel_alice"), ("authorization", "Basic kestrel_alice")),
    ],
)
@pytest.mark.parametrize("method", ["Query", "CompleteQuery"])
async def test_a_call_without_a_known_token_is_refused(path, metadata, method):
    async with serving(tokens=str(path)) as rig:
        request = QUERY if method == "Query" else COMPLETE_QUERY
        error = await refusal(getattr(rig.vision, method)(request, metadata=metadata))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reason_of(error) == "TOKEN_INVALID"
    assert rig.engine.requests == []


async def test_the_name_on_the_token_is_the_tenant_of_the_engine(path):
    async with serving(tokens=str(path)) as rig:
        await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
        assert [event async for event in rig.vision.Query(QUERY, metadata=bearing("bob"))]
    assert rig.engine.tenants == ["alice", "bob"]


@pytest.mark.parametrize("method", [http2.QUERY, http2.COMPLETE_QUERY])
@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("Bearer kestrel_eve", grpc.StatusCode.UNAUTHENTICATED),
        ("Bearer kestrel_operator", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_a_call_is_refused_from_its_headers_before_its_message_has_come(path, method, authorization, code):
    async with serving(tokens=str(path)) as rig, Http2Client.connected(rig.address) as client:
        stream = await client.begin(method, authorization=authorization)
        await client.send(stream, struct.pack(">BI", 0, 40 * 2**20))
        _, trailers = await client.read(stream)
    assert int(trailers["grpc-status"]) == code.value[0]


async def test_a_call_above_its_rate_is_refused_from_its_headers(path):
    write_tokens(path, limits=", rate = 0.001, burst = 1")
    async with serving(tokens=str(path)) as rig, Http2Client.connected(rig.address) as client:
        await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
        stream = await client.begin(http2.QUERY, authorization="Bearer kestrel_alice")
        _, trailers = await client.read(stream)
    assert int(trailers["grpc-status"]) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


async def test_a_token_is_checked_before_its_message_is_read(path):
    async with serving(tokens=str(path)) as rig:
        call = rig.channel.unary_unary("/kestrel.v1.VisionService/CompleteQuery")(b"\xff")
        assert reason_of(await refusal(call)) == "TOKEN_INVALID"


async def test_the_scheme_may_be_written_in_any_case(path):
    async with serving(tokens=str(path)) as rig:
        metadata = (("authorization", "bearer kestrel_alice"),)
        assert await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=metadata)


async def test_without_a_file_of_tokens_every_caller_is_admitted():
    async with serving() as rig:
        assert await rig.vision.CompleteQuery(COMPLETE_QUERY)
        assert await rig.engine_service.GetLoad(engine_wire.GetLoadRequest())


async def test_no_token_is_written_to_the_log(path, caplog):
    caplog.set_level("DEBUG")
    async with serving(tokens=str(path)) as rig:
        await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
    assert SECRETS["alice"] not in caplog.text


async def test_each_scope_opens_its_own_methods(path):
    async with serving(tokens=str(path)) as rig:
        for name in ("alice", "operator"):
            assert await rig.engine_service.GetServerInfo(
                engine_wire.GetServerInfoRequest(), metadata=bearing(name)
            )
            assert await rig.engine_service.ListModels(engine_wire.ListModelsRequest(), metadata=bearing(name))
        assert await rig.engine_service.GetLoad(engine_wire.GetLoadRequest(), metadata=bearing("operator"))
        alice, operator = bearing("alice"), bearing("operator")
        for call, name, scope in (
            (rig.engine_service.GetLoad(engine_wire.GetLoadRequest(), metadata=alice), "alice", "admin"),
            (rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=operator), "operator", "infer"),
            (rig.vision.Query(QUERY, metadata=operator), "operator", "infer"),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert reason_of(error) == "SCOPE_REQUIRED"
            assert error.details() == f"the token {name!r} needs the scope {scope}"


def test_every_method_asks_for_a_scope_and_new_ones_for_that_of_operators():
    methods = {
        f"{service.full_name}/{method.name}": required_scopes(f"{service.full_name}/{method.name}")
        for file in (vision_service_pb2.DESCRIPTOR, image_service_pb2.DESCRIPTOR, engine_service_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    infer = {name for name, scopes in methods.items() if scopes == {Scope.INFER}}
    stored = {name for name, scopes in methods.items() if scopes == {Scope.IMAGES}}
    either = {name for name, scopes in methods.items() if scopes == set(Scope)}
    assert infer == {name for name in methods if name.startswith(VISION)}
    assert stored == {name for name in methods if name.startswith("kestrel.v1.ImageService/")}
    assert either == {f"kestrel.v1.EngineService/{name}" for name in ("GetServerInfo", "ListModels")}
    assert required_scopes("kestrel.v1.EngineService/Invented") == {Scope.ADMIN}
    assert required_scopes("kestrel.v2.VisionService/Query") == {Scope.ADMIN}


async def test_health_asks_for_no_token(path):
    async with serving(tokens=str(path)) as rig:
        answer = await rig.health.Check(HealthCheckRequest())
        assert answer.status == HealthCheckResponse.SERVING


async def test_too_many_requests_are_told_when_to_come_again(path):
    write_tokens(path, limits=", rate = 0.001, burst = 2")
    async with serving(tokens=str(path)) as rig:
        for _ in range(2):
            await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
        error = await refusal(rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice")))
        assert await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("bob"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details: Any = details_of(error)
    assert details["ErrorInfo"].reason == "RATE_LIMITED"
    assert 900 < details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 1000
    (violation,) = details["QuotaFailure"].violations
    assert violation.subject == "token:alice"
    assert violation.description == "at most 0.001 requests per second, and 2 at once"


async def test_too_many_requests_at_a_time_are_refused_until_one_has_ended(path):
    write_tokens(path, limits=", concurrency = 1")
    async with serving(FakeEngine(stalls), tokens=str(path)) as rig:
        async with running(rig, "alice"), running(rig, "bob"):
            error = await refusal(rig.vision.Query(QUERY, metadata=bearing("alice")))
        assert reason_of(error) == "RATE_LIMITED"
        await rig.engine.is_idle.wait()
        async with running(rig, "alice"):
            pass


async def test_a_token_that_is_taken_back_ends_its_streams_and_no_others(path):
    async with serving(FakeEngine(stalls), tokens=str(path)) as rig:
        async with running(rig, "alice") as revoked, running(rig, "bob") as kept:
            write_tokens(path, ["bob", "operator"])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await revoked.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(caught.value) == "TOKEN_INVALID"
            assert caught.value.details() == "the token 'alice' was revoked"
            assert not kept.done()
        again = await refusal(rig.vision.Query(QUERY, metadata=bearing("alice")))
        assert reason_of(again) == "TOKEN_INVALID"
        await rig.engine.is_idle.wait()


async def test_a_token_that_is_taken_back_ends_its_unary_calls(path):
    async with serving(FakeEngine(stalls), tokens=str(path)) as rig:
        call = rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
        await rig.engine.num_submitted.acquire()
        write_tokens(path, ["bob"])
        assert reason_of(await refusal(call)) == "TOKEN_INVALID"
        await rig.engine.is_idle.wait()


async def test_a_token_that_loses_its_scope_ends_its_streams(path):
    async with serving(FakeEngine(stalls), tokens=str(path)) as rig, running(rig, "alice") as stream:
        write_tokens(path, scope=Scope.ADMIN)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert reason_of(caught.value) == "SCOPE_REQUIRED"


async def test_a_token_is_refused_from_the_time_at_which_it_expires(path: Path):
    now = [datetime(2027, 1, 30, 23, 59, 59, tzinfo=UTC)]
    write_tokens(path, ["alice"], ", expires = 2027-01-31")
    access = TokenAccess(path, clock=lambda: now[0])
    ended: asyncio.Queue[Exception] = asyncio.Queue()
    call = await access.admit(VISION + "Query", bearing("alice"), ended.put_nowait)
    watching = asyncio.create_task(access.watch())
    now[0] = datetime(2027, 1, 31, tzinfo=UTC)
    with pytest.raises(TokenInvalid) as caught:
        await access.admit(VISION + "Query", bearing("alice"), unended)
    assert isinstance(await ended.get(), TokenInvalid)
    call.leave()
    watching.cancel()
    failure = describe(caught.value)
    assert (failure.reason, failure.http_status) == ("TOKEN_INVALID", 401)
    assert failure.message == "the token 'alice' has expired; it was valid until 2027-01-31 00:00 UTC"


@pytest.mark.parametrize(
    ("lines", "logged"),
    [
        (["carol", "bob"], "tokens: added carol; removed alice, operator; changed bob"),
        (["alice", "bob", "operator"], "tokens: changed alice, bob, operator"),
    ],
)
async def test_a_reload_logs_the_names_of_what_has_changed(path: Path, caplog: Any, lines: Any, logged: str):
    caplog.set_level("INFO")
    access = TokenAccess(path)
    access.read_again()
    await access.reload()
    assert "tokens: none changed" in caplog.text
    replace(path, "\n".join(line_for(name, f"new {name}", frozenset((Scope.INFER,))) for name in lines).encode())
    await access.reload()
    assert logged in caplog.text
    assert "new alice" not in caplog.text


async def test_a_log_of_many_changes_is_short(path: Path, caplog: Any):
    caplog.set_level("INFO")
    access = TokenAccess(path)
    lines = (line_for(f"t{number}", f"s{number}", frozenset((Scope.INFER,))) for number in range(100))
    replace(path, "\n".join(lines).encode())
    await access.reload()
    assert "t19 and 80 more; removed alice, bob, operator" in caplog.text


async def test_a_new_token_is_let_in_without_a_restart(path):
    write_tokens(path, ["bob"])
    async with serving(tokens=str(path)) as rig:
        await refusal(rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice")))
        write_tokens(path)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=bearing("alice"))
                    return


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: replace(path, b"alice = 1"), "must be like"),
        (lambda path: path.write_text(""), "holds no tokens"),
        (lambda path: path.write_text("# nothing so far\n"), "holds no tokens"),
        (put_pipe, "not a regular file"),
        (Path.unlink, "No such file"),
    ],
    ids=["mistake", "empty", "comment", "pipe", "missing"],
)
async def test_a_file_with_a_mistake_keeps_the_tokens_and_images_it_had(path, caplog, spoil, problem):
    access = TokenAccess(path)
    gone: list[str] = []
    access.on_namespace_gone(gone.append)
    spoil(path)
    await access.reload()
    assert await admitted(access)
    assert "stays in force" in caplog.text
    assert problem in caplog.text
    assert gone == []


async def test_a_mount_that_does_not_answer_stops_nothing_and_is_followed_once_it_does(path, caplog, monkeypatch):
    access = TokenAccess(path)
    write_tokens(path, ["bob"])
    may_go_on = threading.Event()

    def hangs(path: Path) -> bytes:
        may_go_on.wait()
        return read_regular_file(path)

    monkeypatch.setattr(token_file, "read_regular_file", hangs)
    monkeypatch.setattr(reloaded_files, "READ_TIMEOUT_S", 0.01)
    try:
        for _ in range(3):
            await access.reload()
            assert await admitted(access)
    finally:
        may_go_on.set()
    assert caplog.text.count("does not answer") == 1
    monkeypatch.setattr(reloaded_files, "READ_TIMEOUT_S", 20.0)
    await access.reload()
    with pytest.raises(TokenInvalid):
        await access.admit(f"{VISION}Query", bearing("alice"), unended)


async def test_a_namespace_is_gone_with_its_last_token_and_not_with_a_new_secret(path):
    access = TokenAccess(path)
    gone: list[str] = []
    access.on_namespace_gone(gone.append)
    assert access.namespaces()["alice"] == "token:alice"
    replace(path, line_for("alice", "another secret", frozenset({Scope.INFER})).encode())
    await access.reload()
    assert sorted(gone) == ["token:bob", "token:operator"]
    assert access.namespaces() == {"alice": "token:alice"}
    write_tokens(path, ["bob"])
    await access.reload()
    assert gone[2:] == ["token:alice"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def admitted(access: TokenAccess) -> bool:
    try:
        (await access.admit(f"{VISION}Query", bearing("alice"), unended)).leave()
    except RateLimited:
        return False
    return True


async def test_a_bucket_fills_at_its_rate_and_holds_no_more_than_its_burst(path):
    write_tokens(path, limits=", rate = 2, burst = 3")
    clock = Clock()
    access = TokenAccess(path, TokenLimits(clock=clock))
    assert [await admitted(access) for _ in range(4)] == [True, True, True, False]
    clock.now += 0.5
    assert [await admitted(access) for _ in range(2)] == [True, False]
    clock.now += 3600
    assert [await admitted(access) for _ in range(4)] == [True, True, True, False]


async def test_the_time_to_wait_is_just_enough(path):
    write_tokens(path, limits=", rate = 2, burst = 1")
    clock = Clock()
    access = TokenAccess(path, TokenLimits(clock=clock))
    assert await admitted(access)
    with pytest.raises(RateLimited) as caught:
        await access.admit(f"{VISION}Query", bearing("alice"), unended)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now += caught.value.retry_after_s
    assert await admitted(access)


async def test_calls_that_ran_before_their_token_had_a_limit_count_towards_it(path):
    access = TokenAccess(path)
    first, second = [await access.admit(f"{VISION}Query", bearing("alice"), unended) for _ in range(2)]
    stream = await access.admit(f"{VISION}Query", bearing("alice"), unended, counts=False)
    write_tokens(path, limits=", concurrency = 2")
    await access.reload()
    assert not await admitted(access)
    first.leave()
    assert await admitted(access)
    # A further change counts no call for a second time.
    write_tokens(path, limits=", concurrency = 1")
    await access.reload()
    assert not await admitted(access)
    second.leave()
    assert await admitted(access)
    stream.leave()
    assert await admitted(access)


async def test_accounts_of_tokens_that_are_not_used_any_more_are_dropped_and_debts_stay():
    clock = Clock()
    limits = TokenLimits(clock=clock)

    def limit(index: int, rate: float = 1.0) -> TokenLimit:
        return TokenLimit("alice", index.to_bytes(32, "big"), rate, 1, None)

    (await limits.enter(limit(0, rate=1e-6))).leave()
    for index in range(1, 10_000):
        (await limits.enter(limit(index))).leave()
        clock.now += 0.01
    with pytest.raises(RateLimited):
        await limits.enter(limit(0, rate=1e-6))
    assert limits.num_accounts < 2048


async def test_new_limits_count_at_once_and_debts_stay(path):
    write_tokens(path, limits=", rate = 0.001, burst = 1")
    access = TokenAccess(path, TokenLimits(clock=Clock()))
    assert [await admitted(access) for _ in range(2)] == [True, False]
    write_tokens(path, limits=", rate = 0.001, burst = 9")
    await access.reload()
    assert not await admitted(access)
    write_tokens(path)
    await access.reload()
    assert await admitted(access)
