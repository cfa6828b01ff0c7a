"""`ModelInfer` and `ModelStreamInfer` over the wire, with stubs of our own."""

import asyncio
from typing import Any

import grpc
import pytest

from kestrel_runtime.api.requests import Priority, Query, RequestOptions, SamplingParams
from tests.fakes import HOLD, FakeEngine
from tests.fakes import answers as scripted
from tests.over_sockets import BOTH_CHANNELS
from tests.server.serving import EOF, serving
from tests.server.triton_calls import FINAL, IMAGE, TritonStub, answers, facts, infer, iterate, query

pytestmark = BOTH_CHANNELS

STRICT = (("triton_grpc_error", "true"),)


async def test_one_request_has_one_answer():
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        response = await triton.ModelInfer(query("42"))
    assert rig.engine.requests == [Query("?", IMAGE)]
    assert (response.model_name, response.model_version, response.id) == ("moondream", "1", "42")
    found = facts(response)
    assert found.pop("request_id")
    assert found == {
        "finish_reason": "stop",
        "answer": "a kestrel",
        "metrics": {
            "input_tokens": 735,
            "output_tokens": 3,
            "prefill_time_ms": 500.0,
            "decode_time_ms": 250.0,
            "ttft_ms": 1500.0,
        },
    }


async def test_inputs_may_be_in_typed_contents():
    message = infer(SKILL="query", QUESTION="?", MAX_TOKENS=3)
    for tensor, (field, value) in zip(
        message.inputs, (("bytes_contents", b"query"), ("bytes_contents", b"?"), ("int_contents", 3)), strict=True
    ):
        getattr(tensor.contents, field).append(value)
    del message.raw_input_contents[:]
    async with serving() as rig:
        await TritonStub(rig.channel).ModelInfer(message)
    assert rig.engine.requests == [Query("?", sampling=SamplingParams(max_tokens=3))]


async def test_a_streamed_answer_comes_in_pieces_and_then_as_a_whole():
    async with serving() as rig:
        responses = await answers(
            TritonStub(rig.channel).ModelStreamInfer(iterate(query("7", STREAM=True, REASONING=True)))
        )
    found = [facts(response.infer_response) for response in responses]
    assert {response.infer_response.id for response in responses} == {"7"}
    *pieces, last = found
    assert all(not piece["completed"] for piece in pieces)
    assert "".join(piece.get("reasoning_chunk", "") for piece in pieces) == last["reasoning"]["text"]
    assert "".join(piece["chunk"] for piece in found) == last["answer"] == "a kestrel"
    assert last["completed"]
    finals = [response.infer_response.parameters[FINAL].bool_param for response in responses]
    assert finals == [False] * len(pieces) + [True]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_empty_last_response_comes_where_it_is_asked_for(streams: bool):
    message = query("7", STREAM=streams, parameters={"triton_enable_empty_final_response": True})
    async with serving() as rig:
        *others, last = await answers(TritonStub(rig.channel).ModelStreamInfer(iterate(message)))
    assert not last.infer_response.outputs
    assert last.infer_response.id == "7"
    assert last.infer_response.parameters[FINAL].bool_param
    assert others
    assert not any(response.infer_response.parameters[FINAL].bool_param for response in others)


async def test_many_requests_of_one_stream_run_at_a_time():
    count = 64
    script = lambda request: [HOLD, *scripted(request)]  # noqa: E731 a name helps the reader
    async with serving(FakeEngine(script)) as rig:
        call = TritonStub(rig.channel).ModelStreamInfer()
        for index in range(count):
            await call.write(query(f"{index}", QUESTION=f"{index}?", STREAM=bool(index % 2)))
        await call.done_writing()
        for _ in range(count):
            await rig.engine.num_submitted.acquire()
        rig.engine.release()
        responses = await answers(call)
    assert sorted(map(repr, rig.engine.requests)) == sorted(repr(Query(f"{i}?", IMAGE)) for i in range(count))
    finals = [item.infer_response.id for item in responses if item.infer_response.parameters[FINAL].bool_param]
    assert sorted(finals, key=int) == [f"{index}" for index in range(count)]
    request_ids = {
        facts(item.infer_response)["request_id"]
        for item in responses
        if item.infer_response.parameters[FINAL].bool_param
    }
    assert len(request_ids) == count


async def test_a_failed_request_leaves_the_stream_open():
    async with serving() as rig:
        call = TritonStub(rig.channel).ModelStreamInfer()
        await call.write(query("bad", QUESTION=""))
        bad = await call.read()
        assert bad.error_message == "QUESTION: must not be empty"
        assert (bad.infer_response.id, bad.infer_response.model_name) == ("bad", "moondream")
        assert not bad.infer_response.outputs
        await call.write(query("good"))
        good = await call.read()
        assert facts(good.infer_response)["answer"] == "a kestrel"
        await call.done_writing()
        assert await call.read() is EOF


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"SPATIAL_REFS": [[0.0, 0.0, 0.0]]}, "SPATIAL_REFS: must have 2 (points) or 4 (boxes) columns"),
        ({"SPATIAL_REFS": [[0.0, 0.0]] * 257}, "SPATIAL_REFS: must be at most 256"),
        ({"QUESTION": b"\xff"}, "QUESTION: must be UTF-8"),
        ({"SKILL": "gaze"}, "EYE: is required"),
    ],
)
async def test_inputs_that_cannot_be_used_are_refused_by_their_name(inputs: dict[str, Any], told: str):
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TritonStub(rig.channel).ModelInfer(query(**inputs))
        assert rig.engine.requests == []
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, told)


async def test_a_single_answer_cannot_be_streamed():
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TritonStub(rig.channel).ModelInfer(query(STREAM=True))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (caught.value.details() or "").startswith("ModelInfer RPC doesn't support models with decoupled")


@pytest.mark.parametrize(
    ("number", "priority"), [(0, "NORMAL"), (1, "INTERACTIVE"), (2, "NORMAL"), (3, "BATCH"), (9, "NORMAL")]
)
async def test_priority_and_timeout_reach_the_engine(number: int, priority: str):
    message = query(parameters={"priority": number, "timeout": 5_000_000})
    async with serving() as rig:
        await TritonStub(rig.channel).ModelInfer(message)
    (request,), (deadline_s,) = rig.engine.requests, rig.engine.deadlines_s
    assert request.options == RequestOptions(priority=Priority[priority])
    assert deadline_s is not None
    assert 4.0 < deadline_s <= 5.0


async def test_cancelling_the_stream_cancels_all_of_its_requests():
    async with serving(FakeEngine(lambda request: [HOLD])) as rig:
        call = TritonStub(rig.channel).ModelStreamInfer()
        for index in range(8):
            await call.write(query(f"{index}"))
        for _ in range(8):
            await rig.engine.num_submitted.acquire()
        call.cancel()
        await asyncio.wait_for(rig.engine.is_idle.wait(), 60)
    assert rig.engine.num_cancelled == 8


async def test_cancelling_a_single_request_cancels_it():
    async with serving(FakeEngine(lambda request: [HOLD])) as rig:
        call = TritonStub(rig.channel).ModelInfer(query())
        await rig.engine.num_submitted.acquire()
        call.cancel()
        await asyncio.wait_for(rig.engine.is_idle.wait(), 60)
    assert rig.engine.num_cancelled == 1
