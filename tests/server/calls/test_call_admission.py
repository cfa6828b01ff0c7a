"""Calls of a frontend that is none of ours: it has no transport, and needs no rules of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.access.access import OpenAccess, TokenAccess
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.calls.call_admission import ReaderWatch
from kestrel_grpc.calls.call_context import OK, CallContext, Headers, Interruptible, Outcome, StreamIdle
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.errors import CallFailure
from kestrel_grpc.calls.submission import Submission, ending_with
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import NoRemoteImages
from kestrel_grpc.images.stored_images import ImageUri
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.events import Started, TextDelta, Usage
from kestrel_runtime.api.requests import Query, Request
from tests.fakes import HOLD, FakeEngine, fails

METHOD = "kestrel.v1.VisionService/Query"
SECRET = "the password is swordfish"
LIMIT_S = 0.02


class PlainFrontend:
    """Serves queries to callers in this process: a request comes in as Python, and texts go out by a function."""

    def __init__(self, engine: FakeEngine, config: ServerConfig) -> None:
        self.ended: list[tuple[CallContext, Outcome]] = []
        access = OpenAccess() if config.tokens is None else TokenAccess(Path(config.tokens))
        groups = CallGroups(engine, config, access, [lambda call, outcome: self.ended.append((call, outcome))])
        self.groups = groups
        self._admission = groups.inference
        self._submission = Submission(engine, NoRemoteImages())

    async def query(self, *arguments: Any, **options: Any) -> CallFailure | None:
        """Each call runs in a task of its own."""
        return await asyncio.create_task(self._query(*arguments, **options))

    async def _query(
        self, read: Any, write: Any, headers: Headers = (), deadline_s: float | None = None, uri: str | None = None
    ) -> CallFailure | None:
        admission = self._admission
        call = admission.begin(headers, deadline_in(deadline_s), METHOD, lambda: "nowhere:1")
        try:
            async with admission.admit(call):
                request = await admission.receive(read, call, lambda: "nowhere:1")
                references = () if uri is None else (ImageUri(uri),)
                asked = replace(request, image=b"?") if references else request
                stream = await self._submission.submit(asked, references, call)
                with ending_with(stream), admission.watch_reader(call) as reader:
                    async for event in stream:
                        await reader.wait_for(write(event))
        except BaseException as error:
            failure = admission.fail(call, error)
            if failure is None:
                raise
            return failure
        admission.succeed(call)
        return None


class Sink:
    """What was written."""

    def __init__(self) -> None:
        self.events: list[object] = []

    async def write(self, event: object) -> None:
        self.events.append(event)


async def a_question() -> Request:
    return Query("?")


async def never() -> Request:
    return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def frontend(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[PlainFrontend]:
    plain = PlainFrontend(engine or FakeEngine(), ServerConfig(**options))
    yield plain
    await plain.groups.ended()


async def test_an_answer_passes_and_is_recorded():
    sink = Sink()
    async with frontend() as plain:
        assert await plain.query(a_question, sink.write, (("x-request-id", "abc"),)) is None
    ((call, outcome),) = plain.ended
    assert (call.request_id, call.method, outcome) == ("abc", METHOD, OK)
    assert any(isinstance(event, TextDelta) for event in sink.events)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.toml"
    alice = line_for("alice", "a", frozenset((Scope.INFER,)))
    bob = line_for("bob", "b", frozenset((Scope.ADMIN,)))
    path.write_text(f"{alice}\n{bob}\n")
    return str(path)


@pytest.mark.parametrize(
    ("headers", "reason", "http_status"),
    [((), "TOKEN_INVALID", 401), ((("authorization", "Bearer b"),), "SCOPE_REQUIRED", 403)],
)
async def test_a_caller_without_a_fitting_token_is_refused(tokens, headers, reason, http_status):
    engine = FakeEngine()
    async with frontend(engine, tokens=tokens) as plain:
        failure = await plain.query(a_question, Sink().write, headers)
    assert failure is not None
    assert (failure.reason, failure.http_status) == (reason, http_status)
    assert engine.requests == []


async def test_the_name_on_the_token_and_the_deadline_reach_the_engine(tokens):
    engine = FakeEngine()
    async with frontend(engine, tokens=tokens) as plain:
        await plain.query(a_question, Sink().write, (("authorization", "Bearer a"),), 30.0)
    assert engine.tenants == ["alice"]
    assert engine.deadlines_s[0] is not None
    assert 25 < engine.deadlines_s[0] <= 30


async def test_an_error_of_the_engine_becomes_its_failure_and_is_recorded():
    async with frontend(FakeEngine(fails(EngineUnavailable("gone")))) as plain:
        failure = await plain.query(a_question, Sink().write)
    assert failure is not None
    assert (failure.reason, failure.code.name, failure.http_status) == ("ENGINE_UNAVAILABLE", "UNAVAILABLE", 503)
    assert [outcome for _, outcome in plain.ended] == [Outcome("UNAVAILABLE", "ENGINE_UNAVAILABLE")]


async def test_a_bug_is_internal_and_its_text_is_for_the_log_alone(caplog: pytest.LogCaptureFixture):
    def breaks(request: Request) -> list[object]:
        raise RuntimeError(SECRET)

    async with frontend(FakeEngine(breaks)) as plain:
        failure = await plain.query(a_question, Sink().write)
    assert failure is not None
    assert (failure.reason, failure.http_status) == ("INTERNAL", 500)
    assert SECRET not in str(failure)
    assert SECRET in caplog.text


async def test_a_message_that_does_not_come_ends_its_call():
    async with frontend(receive_timeout=0.02) as plain:
        failure = await plain.query(never, Sink().write)
    assert failure is not None
    assert (failure.reason, failure.http_status) == ("MESSAGE_TIMEOUT", 408)


async def test_a_reader_that_takes_nothing_ends_its_call():
    async def full(event: object) -> None:
        await asyncio.Event().wait()

    engine = FakeEngine()
    async with frontend(engine, stream_idle_timeout=0.02) as plain:
        failure = await plain.query(a_question, full)
        assert failure is not None
        assert failure.reason == "STREAM_IDLE"
        await engine.is_idle.wait()


async def test_a_cancelled_call_cancels_its_request_and_is_recorded_as_cancelled():
    engine = FakeEngine(lambda request: [Started(Usage(1, 0)), HOLD])
    async with frontend(engine) as plain:
        call = asyncio.create_task(plain.query(a_question, Sink().write))
        await engine.num_submitted.acquire()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.is_idle.wait()
    assert engine.num_cancelled == 1
    assert [outcome.code for _, outcome in plain.ended] == ["CANCELLED"]


async def test_after_the_groups_are_closed_no_message_is_received():
    async with frontend() as plain:
        plain.groups.close()
        failure = await plain.query(a_question, Sink().write)
    assert failure is not None
    assert failure.http_status == 503


async def test_an_image_that_may_not_be_fetched_is_the_callers_fault():
    async with frontend() as plain:
        failure = await plain.query(a_question, Sink().write, uri="https://example.com/a.png")
    assert failure is not None
    assert (failure.reason, failure.http_status) == ("IMAGE_URI_NOT_ALLOWED", 400)


async def nothing() -> None:
    """A write that the buffers take."""


async def longer_than_the_limit() -> None:
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(3 * LIMIT_S, passed.set)
    await passed.wait()


async def test_a_write_that_the_client_does_not_read_is_abandoned():
    async def write() -> None:
        call = Interruptible()
        with call, ReaderWatch(LIMIT_S, call.interrupt) as reader:
            await reader.wait_for(nothing())
            await reader.wait_for(asyncio.Event().wait())

    with pytest.raises(StreamIdle) as caught:
        await write()
    assert caught.value.limit_s == LIMIT_S


async def test_a_stream_may_have_nothing_to_say_for_any_time():
    call = Interruptible()
    with call, ReaderWatch(LIMIT_S, call.interrupt) as reader:
        for _ in range(3):
            await longer_than_the_limit()
            await reader.wait_for(nothing())
        await longer_than_the_limit()


async def test_a_watch_whose_write_was_given_up_interrupts_nothing_later():
    interrupted: list[StreamIdle] = []
    with ReaderWatch(LIMIT_S, interrupted.append) as reader:
        write = asyncio.ensure_future(reader.wait_for(asyncio.Event().wait()))
        await asyncio.sleep(0)
        write.cancel()
    await longer_than_the_limit()
    assert interrupted == []


async def test_connections_of_streams_that_only_wait_count_as_idle():
    groups = PlainFrontend(FakeEngine(), ServerConfig()).groups
    waiting = (groups.streams, groups.health_watches())
    for port, group in enumerate((groups.inference, groups.images, groups.operations, *waiting)):
        group.begin((), None, METHOD, lambda port=port: f"ipv4:127.0.0.1:{port}")
    groups.health_checks().begin((), None, METHOD, lambda: "unix:")
    assert groups.busy_ports() == {0, 1, 2}
