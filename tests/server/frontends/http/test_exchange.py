"""Comments on a stream that is silent, so that proxies do not close it, and on nothing else."""

import asyncio
from functools import partial
from typing import Any

import pytest

from kestrel_grpc.calls.errors import CallFailure, describe
from kestrel_grpc.frontends.http import endpoint
from kestrel_grpc.frontends.http.exchange import EventStream
from kestrel_runtime.api.errors import Overloaded
from tests.fakes import HOLD, FakeEngine, answers
from tests.server.http_calls import serving_http


class Response:
    """What an exchange is asked to send."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.request_ids: list[str] = []
        self.has_been_written = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def begin_events(self, request_id: str) -> None:
        self.request_ids.append(request_id)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self.written.append(data)
        self.has_been_written.set()
        await self.may_write.wait()


@pytest.fixture
async def response() -> Any:
    return Response()


def failed(failure: CallFailure) -> bytes:
    return b"data: %b\n\n" % failure.reason.encode()


async def test_a_silent_stream_begins_with_a_comment_and_goes_on_with_more(response: Any):
    events = EventStream(response, "id", failed, heartbeat_s=0.005)
    assert not events.has_begun
    for _ in range(3):
        await response.has_been_written.wait()
        response.has_been_written.clear()
    events.close()
    assert response.request_ids == ["id"]
    assert set(response.written) == {b": waiting\n\n"}


async def test_events_begin_the_response_once(response: Any):
    events = EventStream(response, "id", failed)
    await events.write(b"data: 1\n\n")
    await events.write(b"data: 2\n\n")
    events.close()
    await events.fail(describe(Overloaded(3, 0.25)))
    assert response.request_ids == ["id"]
    assert response.written == [b"data: 1\n\n", b"data: 2\n\n", b"data: QUEUE_FULL\n\n"]


async def test_no_comment_comes_while_an_event_is_being_written(response: Any):
    events = EventStream(response, "id", failed, heartbeat_s=0.001)
    response.may_write.clear()
    writing = asyncio.ensure_future(events.write(b"data: 1\n\n"))
    await response.has_been_written.wait()
    timer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, timer.set_result, None)
    await timer
    response.may_write.set()
    await writing
    events.close()
    assert response.written == [b"data: 1\n\n"]


async def test_a_stream_that_is_closed_says_nothing(response: Any):
    EventStream(response, "id", failed, heartbeat_s=0.0).close()
    await asyncio.sleep(0)
    assert response.written == []


async def test_no_comment_comes_behind_the_end_of_a_stream(monkeypatch: pytest.MonkeyPatch):
    written: list[bytes] = []

    class Recorded(EventStream):
        async def write(self, data: bytes) -> None:
            written.append(data)
            await super().write(data)

    monkeypatch.setattr(endpoint, "EventStream", partial(Recorded, heartbeat_s=0.001))
    async with serving_http() as rig:
        assert (await rig.ask("/v1/query", {"question": "?", "stream": True})).status == 200
        written.clear()
        timer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, timer.set_result, None)
        await timer
    assert written == []


async def test_a_whole_answer_that_is_awaited_for_long_has_no_comments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint, "EventStream", partial(EventStream, heartbeat_s=0.005))
    engine = FakeEngine(lambda request: [HOLD, *answers(request)])
    async with serving_http(engine) as rig, rig.connect() as whole, rig.connect() as stream:
        await whole.send("/v1/query", {"question": "?"})
        await stream.send("/v1/query", {"question": "?", "stream": True})
        assert (await stream.head())[0] == 200
        for _ in range(3):
            assert await stream.chunk() == b": waiting\n\n"
        engine.release()
        answer = await whole.response()
        assert (answer.headers["content-type"], answer.json["answer"]) == ("application/json", "a kestrel")
