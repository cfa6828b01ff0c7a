"""Whole requests over the wire: right answers, alone and in company."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD3_SMALL

SMALL_IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
IMAGE_OF_SEVERAL_CROPS = (MD3_SMALL / "image_0_500x400.png").read_bytes()
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def drawn(seed: int) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12, "seed": seed}


async def query(live_server: LiveServer, **fields: Any) -> wire.QueryResult:
    """Ask, check the stream's shape, and return what completed it."""
    responses = [response async for response in live_server.stub.Query(wire.QueryRequest(**fields))]
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert kinds[-1] == "completed"
    assert set(kinds[1:-1]) <= {"delta"}
    completed = responses[-1].completed
    deltas = [response.delta for response in responses[1:-1]]
    for channel, text in ((1, completed.answer), (2, completed.reasoning.text)):
        assert "".join(delta.text for delta in deltas if delta.channel == channel) == text
    return completed


async def caption(live_server: LiveServer, **fields: Any) -> wire.CaptionResult:
    responses = [response async for response in live_server.stub.Caption(wire.CaptionRequest(**fields))]
    assert responses[-1].completed.caption == "".join(response.delta.text for response in responses)
    return responses[-1].completed


def ask(live_server: LiveServer, number: int) -> Awaitable[Any]:
    """The request of this number, of every kind in turn."""
    small, stub = {"data": SMALL_IMAGE}, live_server.stub
    several = {"data": IMAGE_OF_SEVERAL_CROPS}
    refs = [{"point": {"x": 0.25, "y": 0.75}}, {"box": {"x_min": 0.1, "y_min": 0.2, "x_max": 0.6, "y_max": 0.9}}]
    kinds = (
        lambda: query(live_server, question="What is in this image?", image=small, sampling=GREEDY),
        lambda: query(live_server, question="license", image=small, reasoning=True, sampling=drawn(number)),
        lambda: query(live_server, question="Tell me about the oceans.", sampling=drawn(number)),
        lambda: query(live_server, question="Here?", image=small, spatial_refs=refs, sampling=GREEDY),
        lambda: caption(live_server, image=small, length="CAPTION_LENGTH_SHORT", sampling=GREEDY),
        lambda: caption(live_server, image=several if number < 8 else small, sampling=drawn(number)),
        lambda: stub.CompleteQuery(wire.CompleteQueryRequest(question="GNU", sampling=drawn(number))),
        lambda: stub.CompleteCaption(wire.CompleteCaptionRequest(image=small, sampling=drawn(number))),
        lambda: stub.Point(wire.PointRequest(object="copy", image=small, max_objects=5)),
        lambda: stub.Detect(wire.DetectRequest(object="License", image=small, max_objects=4)),
        lambda: stub.Segment(wire.SegmentRequest(object="copy", image=small, sampling=drawn(number))),
    )
    return kinds[number % len(kinds)]()


def without_circumstances(message: Any) -> Any:
    """An answer without its request id, its timing, and what was cached of its prompt."""
    message = getattr(message, "result", message)
    answer = type(message)()
    answer.CopyFrom(message)
    answer.info.ClearField("request_id")
    answer.info.ClearField("timing")
    answer.info.usage.ClearField("cached_token_count")
    return answer


async def test_thirty_two_mixed_requests_in_flight_answer_as_they_do_alone(live_server: LiveServer):
    alone = [without_circumstances(await ask(live_server, number)) for number in range(32)]
    together = await asyncio.gather(*(ask(live_server, number) for number in range(32)))
    assert [without_circumstances(answer) for answer in together] == alone
    await live_server.assert_empty()


async def test_a_stop_string_ends_an_answer_and_is_named(live_server: LiveServer):
    whole = await query(live_server, question="GNU", sampling=GREEDY)
    stop = whole.answer[len(whole.answer) // 2 :][:3]
    start = whole.answer.index(stop)
    for include in (False, True):
        sampling = {**GREEDY, "stop": ["never said", stop], "include_stop": include}
        cut = await query(live_server, question="GNU", sampling=sampling)
        assert cut.answer == whole.answer[: start + len(stop) * include]
        assert cut.info.finish_reason == generation_pb2.FINISH_REASON_STOP_SEQUENCE
        assert cut.info.stop_sequence == stop
    await live_server.assert_empty()


async def test_samples_come_in_one_response(live_server: LiveServer):
    message = wire.CompleteQueryRequest(question="GNU", image={"data": SMALL_IMAGE}, sampling=GREEDY)
    alone = await live_server.stub.CompleteQuery(message)
    message.sampling.n = 3
    greedy = await live_server.stub.CompleteQuery(message)
    assert [item.answer for item in greedy.alternatives] == [alone.result.answer] * 2
    assert greedy.result.info.usage.output_token_count == 3 * alone.result.info.usage.output_token_count
    assert greedy.result.info.usage.input_token_count == alone.result.info.usage.input_token_count
    message.sampling.MergeFrom(generation_pb2.SamplingParams(temperature=20.0, top_p=1.0, seed=5, logprobs=1))
    first, second = [await live_server.stub.CompleteQuery(message) for _ in range(2)]
    samples, again = ([call.result, *call.alternatives] for call in (first, second))
    assert [item.answer for item in samples] == [item.answer for item in again]
    for one, other in zip(samples, again, strict=True):
        assert [token.token_id for token in one.logprobs] == [token.token_id for token in other.logprobs]
        # Not the same bits: which samples share a step depends on the moment.
        assert [token.logprob for token in one.logprobs] == pytest.approx(
            [token.logprob for token in other.logprobs], abs=1e-3
        )
    assert len({item.answer for item in samples}) == 3
    for item in samples:
        assert b"".join(token.bytes for token in item.logprobs).decode(errors="replace") == item.answer
    await live_server.assert_empty()


async def test_a_stream_of_several_samples_is_refused_by_name(live_server: LiveServer):
    for call in (
        live_server.stub.Query(wire.QueryRequest(question="GNU", sampling={"n": 2, "top_k": 0})),
        live_server.stub.Caption(wire.CaptionRequest(image={"data": SMALL_IMAGE}, sampling={"n": 2, "top_k": 0})),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for name in ("sampling.n: must be 1 in a stream", "sampling.top_k"):
            assert name in (caught.value.details() or "")
