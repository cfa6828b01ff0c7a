"""Answers with many logprobs: other callers are answered while one is rendered, and nothing of it is lost."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from msgspec import structs

from kestrel_client.v1 import engine_service_pb2, generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_runtime.api.events import (
    Finished,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)
from kestrel_runtime.api.requests import Request
from tests.fakes import FakeEngine, answers, much_text
from tests.server.http_calls import serving_http
from tests.server.serving import serving

MAX_WAIT_S = 20.0
NUM_TOKENS, NUM_TOP = 101, 20
TOP = tuple(TopLogprob(id, f"t{id}", b"t%d" % id, -id / 7) for id in range(NUM_TOP))


class HeldTop(tuple[TopLogprob, ...]):
    """Tokens that are not rendered before others have been answered."""

    others_are_answered: threading.Event

    def __iter__(self) -> Iterator[TopLogprob]:
        assert self.others_are_answered.wait(MAX_WAIT_S), "others wait for the rendering"
        return super().__iter__()


def answering_with(first_top: tuple[TopLogprob, ...]) -> FakeEngine:
    """Each sample has many logprobs, the first token with `first_top`."""

    def script(request: Request) -> list[object]:
        started, *_, finished = answers(request)
        assert isinstance(started, Started)
        assert isinstance(finished, Finished)
        tops = (first_top, *[TOP] * (NUM_TOKENS - 1))
        tokens = tuple(TokenLogprob(7, f"w{index}", b"w", -0.5, top) for index, top in enumerate(tops))
        output = QueryOutput("".join(token.text for token in tokens), None, tokens)
        delta = TextDelta(output.answer, TextChannel.ANSWER, 0, NUM_TOKENS)
        return [started, delta, structs.replace(finished, output=output)]

    return FakeEngine(script)


HELD: dict[str, dict[str, Any]] = {
    "/v1/query": {"question": "?", "settings": {"logprobs": 20, "n": 2}},
    "/v1/query streamed": {"question": "?", "stream": True, "settings": {"logprobs": 20}},
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [{"role": "user", "content": "?"}],
        "logprobs": True,
        "top_logprobs": 20,
        "n": 2,
    },
    "/v1/completions": {"model": "fake", "prompt": "?", "logprobs": 20},
}


@pytest.mark.parametrize("route", HELD)
async def test_others_are_answered_while_an_answer_is_rendered_as_json(route: str):
    held = HeldTop(TOP)
    held.others_are_answered = threading.Event()
    path = route.partition(" ")[0]
    async with serving_http(answering_with(held)) as rig, serving_http(answering_with(TOP)) as plain:
        asked = asyncio.create_task(rig.ask(path, HELD[route], headers={"X-Request-Id": "same"}))
        await rig.engine.num_submitted.acquire()
        await rig.engine.is_idle.wait()
        others = [await rig.ask(other) for other in ("/healthz", "/v1/models")]
        held.others_are_answered.set()
        answer = await asked
        same = await plain.ask(path, HELD[route], headers={"X-Request-Id": "same"})
    assert [other.status for other in others] == [200, 200]
    assert answer.status == same.status == 200
    last, same_last = (answer.events[-1], same.events[-1]) if "stream" in route else (answer.json, same.json)
    assert {**last, "created": 0} == {**same_last, "created": 0}
    assert answer.body.count(b"w100") >= 2, "in the text and in the logprobs"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_others_are_answered_while_an_answer_is_rendered_over_grpc(is_streamed: bool):
    held = HeldTop(TOP)
    held.others_are_answered = threading.Event()
    n = 1 if is_streamed else 2
    sampling = generation_pb2.SamplingParams(logprobs=20, n=n)

    async def ask(vision: Any) -> Any:
        if not is_streamed:
            response = await vision.CompleteQuery(wire.CompleteQueryRequest(question="?", sampling=sampling))
            return response.result, list(response.alternatives)
        stream = vision.Query(wire.QueryRequest(question="?", sampling=sampling))
        return [message async for message in stream][-1].completed, []

    async with serving(answering_with(held)) as rig:
        asked = asyncio.create_task(ask(rig.vision))
        await rig.engine.num_submitted.acquire()
        await rig.engine.is_idle.wait()
        info = await rig.engine_service.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
        held.others_are_answered.set()
        result, alternatives = await asked
    assert info.model == "fake"
    for each in (result, *alternatives):
        assert [token.text for token in each.logprobs] == [f"w{index}" for index in range(NUM_TOKENS)]
        assert [len(token.top) for token in each.logprobs] == [NUM_TOP] * NUM_TOKENS
    assert len(alternatives) == n - 1
    assert MessageToDict(result.logprobs[1].top[2])["text"] == "t2"


async def test_a_large_answer_arrives_whole_however_slowly_it_is_read():
    text = "".join(f"{number} " for number in range(300_000))

    def script(request: Request) -> list[object]:
        started, *_, finished = answers(request)
        assert isinstance(finished, Finished)
        return [started, structs.replace(finished, output=QueryOutput(text, None))]

    async with serving_http(FakeEngine(script)) as rig, rig.connect() as connection:
        for _ in range(2):  # the connection goes on afterwards
            await connection.send("/v1/query", {"question": "?"})
            status, headers = await connection.head()
            body = bytearray()
            while len(body) < int(headers["content-length"]):
                body += await connection.reader.read(4096)
            assert (status, text.encode() in body) == (200, True)


async def test_a_caller_who_does_not_read_a_large_answer_is_disconnected():
    def says_much(request: Request) -> list[object]:
        started, *_, finished = answers(request)
        assert isinstance(finished, Finished)
        text = "".join(event.text for event in much_text() if isinstance(event, TextDelta))
        return [started, structs.replace(finished, output=QueryOutput(text, None))]

    async with serving_http(FakeEngine(says_much), stream_idle_timeout=0.2) as rig, rig.connect() as connection:
        await connection.send("/v1/query", {"question": "?"})
        transport: Any = connection.writer.transport
        transport.pause_reading()
        await rig.engine.num_submitted.acquire()
        await rig.server.drain()  # waits for the end of the call
        transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await connection.response()
