"""The connection between the supervisor and a child, both ends in this process."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from kestrel_grpc.access.limits import RateLimited
from kestrel_grpc.calls.errors import Code, describe
from kestrel_grpc.multiprocess.protocol import link as link_module
from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.framing import framed
from kestrel_grpc.multiprocess.protocol.link import Link, receive_first, send_first
from kestrel_grpc.multiprocess.protocol.messages import Hello
from kestrel_grpc.multiprocess.protocol.questions import Codec, Message, Question
from kestrel_runtime.api.engine import EngineStatus

TIMEOUT_S = 30.0


class Doubled(msgspec.Struct):
    number: int


class Double(Question[Doubled]):
    number: int


class Said(Message):
    text: str


class Reverse(Question[str]):
    text: str


class Sync(Question[None]):
    pass


CODEC = Codec(Double, Said, Reverse, Sync)
Ends = tuple[Link, Link]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """The supervisor's end and the child's."""
    ours, theirs = socket.socketpair()
    supervisor, child = Link("frontend-0", CODEC), Link("the supervisor", CODEC)
    await supervisor.start(ours)
    await child.start(theirs)
    yield supervisor, child
    supervisor.close()
    child.close()
    await asyncio.gather(supervisor.closed, child.closed)


async def test_questions_are_answered_in_both_directions(ends: Ends) -> None:
    for one, other in (ends, ends[::-1]):
        one.on(Double, lambda question: Doubled(2 * question.number))
        answers = await asyncio.gather(*(other.ask(Double(n), timeout_s=TIMEOUT_S) for n in range(100)))
        assert [answer.number for answer in answers] == [2 * n for n in range(100)]


async def test_an_answer_may_take_its_time_and_delays_no_other(ends: Ends) -> None:
    supervisor, child = ends
    second_answered = asyncio.Event()

    async def double(question: Double) -> Doubled:
        if question.number == 1:
            await second_answered.wait()
        return Doubled(2 * question.number)

    supervisor.on(Double, double)
    first = asyncio.ensure_future(child.ask(Double(1), timeout_s=TIMEOUT_S))
    assert (await child.ask(Double(2), timeout_s=TIMEOUT_S)).number == 4
    assert not first.done()
    second_answered.set()
    assert (await first).number == 2


async def test_notes_keep_their_order_and_come_before_a_later_question(ends: Ends) -> None:
    supervisor, child = ends
    heard: list[str] = []
    supervisor.on(Said, lambda note: heard.append(note.text))
    supervisor.on(Sync, lambda _: None)
    for number in range(1000):
        child.notify(Said(str(number)))
    await child.ask(Sync(), timeout_s=TIMEOUT_S)
    assert heard == [str(number) for number in range(1000)]


async def test_notes_before_the_start_are_sent_then() -> None:
    ours, theirs = socket.socketpair()
    supervisor, child = Link("frontend-0", CODEC), Link("the supervisor", CODEC)
    heard: list[str] = []
    child.on(Said, lambda note: heard.append(note.text))
    supervisor.notify(Said("first"))
    supervisor.notify(Said("second"))
    child.on(Sync, lambda _: None)
    await supervisor.start(ours)
    await child.start(theirs)
    await supervisor.ask(Sync(), timeout_s=TIMEOUT_S)
    assert heard == ["first", "second"]
    for one in (supervisor, child):
        one.close()
        await one.closed


async def test_a_long_message_arrives_whole(ends: Ends) -> None:
    supervisor, child = ends
    supervisor.on(Reverse, lambda question: question.text[::-1])
    text = "long" * 1_000_000
    assert await child.ask(Reverse(text), timeout_s=TIMEOUT_S) == text[::-1]


async def test_a_question_without_an_answer_fails_at_its_deadline(ends: Ends) -> None:
    supervisor, child = ends
    supervisor.on(Double, lambda question: asyncio.Event().wait())
    with pytest.raises(SupervisorUnavailable, match=r"the supervisor has not answered Double within 0\.01 s"):
        await child.ask(Double(1), timeout_s=0.01)


async def test_an_answer_that_comes_too_late_is_dropped(ends: Ends) -> None:
    supervisor, child = ends
    begun, released = asyncio.Event(), asyncio.Event()

    async def double(question: Double) -> Doubled:
        begun.set()
        await released.wait()
        return Doubled(2 * question.number)

    supervisor.on(Double, double)
    with pytest.raises(SupervisorUnavailable):
        await child.ask(Double(1), timeout_s=0.01)
    await begun.wait()
    released.set()
    assert (await child.ask(Double(2), timeout_s=TIMEOUT_S)).number == 4


async def test_a_peer_that_goes_fails_all_open_questions_and_every_later_one(ends: Ends) -> None:
    supervisor, child = ends
    begun = asyncio.Semaphore(0)

    async def double(question: Double) -> None:
        begun.release()
        await asyncio.Event().wait()

    supervisor.on(Double, double)
    questions = [asyncio.ensure_future(child.ask(Double(n), timeout_s=TIMEOUT_S)) for n in range(3)]
    for _ in questions:
        await begun.acquire()
    supervisor.close()
    answers = await asyncio.gather(*questions, return_exceptions=True)
    assert [type(answer) for answer in answers] == [SupervisorUnavailable] * 3
    await child.closed
    with pytest.raises(SupervisorUnavailable, match="the supervisor is gone"):
        await child.ask(Double(1), timeout_s=TIMEOUT_S)
    child.notify(Said("into the void"))


async def test_callers_are_told_that_the_server_is_unavailable() -> None:
    failure = describe(SupervisorUnavailable("the supervisor is gone"), EngineStatus.SERVING)
    assert failure.code is Code.UNAVAILABLE
    assert "supervisor" not in failure.message


async def test_a_handler_that_fails_is_logged_where_it_runs(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, child = ends

    def fail(question: Double) -> None:
        raise ValueError("a secret")

    supervisor.on(Double, fail)
    with pytest.raises(SupervisorUnavailable, match=r"^the supervisor cannot answer$"):
        await child.ask(Double(1), timeout_s=TIMEOUT_S)
    with pytest.raises(SupervisorUnavailable):
        await child.ask(Reverse("a question that nobody expects"), timeout_s=TIMEOUT_S)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "a Double from frontend-0 could not be handled",
        "a Reverse from frontend-0 could not be handled",
    ]


async def test_an_error_that_callers_may_see_crosses_the_link(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, child = ends

    async def refuse(question: Double) -> None:
        raise RateLimited("alice", "at most 2 requests at a time", 1.5)

    supervisor.on(Double, refuse)
    with pytest.raises(RateLimited) as caught:
        await child.ask(Double(1), timeout_s=TIMEOUT_S)
    assert (caught.value.name, caught.value.limit, caught.value.retry_after_s) == (
        *("alice", "at most 2 requests at a time", 1.5),
    )
    assert caplog.records == []


async def test_a_frame_without_a_message_ends_the_link_alone(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    link = Link("frontend-0", CODEC)
    await link.start(ours)
    asking = asyncio.ensure_future(link.ask(Sync(), timeout_s=TIMEOUT_S))
    await asyncio.sleep(0)
    theirs.sendall(framed(b"\xc1"))
    with pytest.raises(SupervisorUnavailable):
        await asking
    await link.closed
    theirs.close()
    assert "frontend-0 sends what is no message" in caplog.text


async def test_the_first_message_of_every_build_can_be_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(msgspec.msgpack.encode([["Hello", "another", "supervisor", "a later field"]])))
        assert receive_first(theirs, Hello).build == "another"


async def test_a_peer_that_does_not_read_is_let_go(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, child = ends
    monkeypatch.setattr(link_module, "MAX_UNREAD_BYTES", 2**20)
    for _ in range(100):  # this event loop does not turn, so nobody reads
        child.notify(Said("x" * 2**16))
    await asyncio.gather(child.closed, supervisor.closed)
    assert "the supervisor does not read: its link is closed" in caplog.text


async def test_the_first_message_needs_no_event_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_first(ours, Said("begin"), CODEC)
        assert receive_first(theirs, Said, CODEC).text == "begin"
        ours.close()
        with pytest.raises(EOFError):
            receive_first(theirs, Said, CODEC)
