"""Tokens, limits, metrics and the end of the server, for requests that come in streams."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.calls import call_groups
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.requests import Query
from tests.fakes import HOLD, FakeEngine
from tests.fakes import answers as scripted
from tests.server.certificates import replace
from tests.server.serving import EOF, Serving, reason_of, serving
from tests.server.triton_calls import TritonStub, answers, facts, infer, iterate, query

ALICE = (("authorization", "Bearer kestrel_alice"),)


def write_tokens(path: Path, more: str = "", scope: Scope = Scope.INFER, name: str = "alice") -> str:
    line = line_for(name, f"kestrel_{name}", frozenset((scope,))).replace(" }", f"{more} }}")
    replace(path, line.encode())
    return str(path)


def holds(request: Any) -> list[object]:
    return [HOLD, *scripted(request)]


async def open_stream(rig: Serving, *messages: Any, **options: Any) -> Any:
    call = TritonStub(rig.channel).ModelStreamInfer(**options)
    for message in messages:
        await call.write(message)
    return call


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if isinstance(call, grpc.aio.StreamStreamCall) else call)
    return caught.value


async def test_without_a_token_there_are_only_probes(tmp_path: Path):
    async with serving(tokens=write_tokens(tmp_path / "tokens")) as rig:
        triton = TritonStub(rig.channel)
        assert (await triton.ServerReady(wire.ServerReadyRequest())).ready
        assert (await triton.ModelReady(wire.ModelReadyRequest(name="moondream"))).ready
        for call in (
            triton.ModelInfer(query()),
            triton.ModelStreamInfer(),
            triton.ServerMetadata(wire.ServerMetadataRequest()),
            triton.ModelStatistics(wire.ModelStatisticsRequest()),
            triton.SystemSharedMemoryStatus(wire.SystemSharedMemoryStatusRequest()),
        ):
            error = await refused(call)
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
        assert facts(await triton.ModelInfer(query(), metadata=ALICE))["answer"] == "a kestrel"
        error = await refused(triton.ModelStatistics(wire.ModelStatisticsRequest(), metadata=ALICE))
        assert reason_of(error) == "SCOPE_REQUIRED"
    assert rig.engine.tenants == ["alice"]


async def test_each_request_of_a_stream_counts_for_its_token(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", rate = 0.001, burst = 2")
    async with serving(tokens=tokens) as rig:
        messages = [query(f"{index}") for index in range(4)]
        call = await open_stream(rig, *messages, metadata=ALICE)
        await call.done_writing()
        responses = await answers(call)
    assert sorted(bool(response.error_message) for response in responses) == [False, False, True, True]
    (text,) = {response.error_message for response in responses if response.error_message}
    assert text == "the token 'alice' allows at most 0.001 requests per second, and 2 at once"


async def test_a_stream_takes_nothing_of_the_concurrency_of_its_token(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", concurrency = 1")
    async with serving(FakeEngine(holds), tokens=tokens) as rig:
        call = await open_stream(rig, query("first"), metadata=ALICE)
        await rig.engine.num_submitted.acquire()
        await call.write(query("second"))
        second = await call.read()
        assert (second.infer_response.id, second.error_message) == (
            "second",
            "the token 'alice' allows at most 1 requests at a time",
        )
        rig.engine.release()
        assert (await call.read()).infer_response.id == "first"
        await call.write(query("third"))
        assert not (await call.read()).error_message
        await call.done_writing()
        assert await call.read() is EOF


async def test_a_token_that_is_revoked_ends_its_streams_and_their_requests(tmp_path: Path):
    path = tmp_path / "tokens"
    async with serving(FakeEngine(holds), tokens=write_tokens(path)) as rig:
        call = await open_stream(rig, query(), metadata=ALICE)
        await rig.engine.num_submitted.acquire()
        write_tokens(path, name="bob")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(call)
        assert reason_of(caught.value) == "TOKEN_INVALID"
        await rig.engine.is_idle.wait()
    assert rig.engine.num_cancelled == 1


async def test_a_full_queue_is_told_for_the_request_that_found_it_full():
    async with serving(FakeEngine(holds, max_queued_requests=1)) as rig:
        call = await open_stream(rig, query("runs"))
        await rig.engine.num_submitted.acquire()
        await call.write(query("comes late"))
        late = await call.read()
        assert (late.infer_response.id, late.error_message) == (
            "comes late",
            "the queue is full: 1 requests may wait in all",
        )
        error = await refused(TritonStub(rig.channel).ModelInfer(query()))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        rig.engine.release()
        assert not (await call.read()).error_message


async def test_requests_of_a_stream_are_logged_and_counted_one_by_one(caplog: pytest.LogCaptureFixture):
    outcomes = iter([scripted, lambda request: [ImageError("is broken")]])
    with caplog.at_level(logging.INFO, "kestrel_grpc.calls"):
        async with serving(FakeEngine(lambda request: next(outcomes)(request))) as rig:
            call = await open_stream(rig, query("a"), metadata=(("x-request-id", "mine"),))
            answered = await call.read()
            await call.write(query("b"))
            assert (await call.read()).error_message == "IMAGE: is broken"
            await call.done_writing()
            assert await call.read() is EOF
    assert facts(answered.infer_response)["request_id"] == "mine-0"
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.calls"]
    assert [(line["request_id"], line["method"], line["outcome"]) for line in lines] == [
        ("mine-0", "inference.GRPCInferenceService/ModelStreamInfer", "OK"),
        ("mine-1", "inference.GRPCInferenceService/ModelStreamInfer", "IMAGE_DECODE_FAILED"),
    ]


async def test_a_stream_that_ends_with_a_status_is_recorded_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "kestrel_grpc.calls"):
        async with serving() as rig:
            call = await open_stream(rig, query(QUESTION=""), metadata=(("triton_grpc_error", "true"),))
            await refused(call)
    assert len([record for record in caplog.records if record.name == "kestrel_grpc.calls"]) == 1


async def test_an_error_of_the_server_tells_nothing_about_itself():
    async with serving(FakeEngine(lambda request: [RuntimeError("a secret")])) as rig:
        call = await open_stream(rig, query())
        rig.engine.die()
        response = await call.read()
    assert "secret" not in response.error_message


async def test_a_draining_server_waits_for_requests_but_not_for_streams():
    async with serving(FakeEngine(holds), drain_timeout=3600.0) as rig:
        call = await open_stream(rig, query("runs"))
        idle = await open_stream(rig, query("before", QUESTION=""))
        assert (await idle.read()).error_message
        await rig.engine.num_submitted.acquire()
        drain = asyncio.ensure_future(rig.server.drain())
        error = await refused(idle)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not drain.done()
        rig.engine.release()
        assert (await call.read()).infer_response.id == "runs"
        assert reason_of(await refused(call)) == "DRAINING"
        await drain


async def test_where_too_many_streams_wait_the_one_that_waits_longest_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kestrel_grpc.calls.call_groups.MAX_WAITING_STREAMS", 2)
    async with serving() as rig:
        streams = []
        for _ in range(3):
            streams.append(await open_stream(rig, query()))
            assert not (await streams[-1].read()).error_message
        error = await refused(streams[0])
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "STREAM_EVICTED")
        for stream in streams[1:]:
            await stream.write(query())
            assert not (await stream.read()).error_message
            stream.cancel()


async def test_many_callers_that_wait_for_each_answer_may_have_a_stream_each():
    num_streams = 3 * call_groups.MAX_WAITING_STREAMS
    may_answer = [asyncio.Event() for _ in range(num_streams)]

    def holds_each(request: object) -> list[object]:
        assert isinstance(request, Query)
        return [may_answer[int(request.question)], *scripted(request)]

    async with serving(FakeEngine(holds_each)) as rig:
        streams: list[Any] = []
        for index in range(num_streams):
            streams.append(await open_stream(rig, query(f"{index}", QUESTION=f"{index}")))
            await rig.engine.num_submitted.acquire()
        # One after the other: streams that have their answer, and whose end has not arrived, wait for a message.
        for index, stream in enumerate(streams):
            may_answer[index].set()
            assert (await stream.read()).infer_response.id == f"{index}"
            await stream.done_writing()
            assert await stream.read() is EOF


async def test_a_message_that_is_none_ends_the_stream_with_a_status():
    async with serving() as rig:
        call = rig.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iterate(b"\xff" * 9))
        error = await refused(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be parsed")


async def test_large_images_pass_and_other_large_fields_do_not():
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        await triton.ModelInfer(query(IMAGE=b"x" * 4 * 2**20))
        typed = infer(SKILL="query", QUESTION="?", IMAGE=b"")
        for tensor, value in zip(typed.inputs, (b"query", b"?", b"x" * 4 * 2**20), strict=True):
            tensor.contents.bytes_contents.append(value)
        del typed.raw_input_contents[:]
        await triton.ModelInfer(typed)
        large = query(QUESTION="?" * 2 * 2**20, IMAGE=b"x" * 4 * 2**20)
        error = await refused(triton.ModelInfer(large))
    assert "apart from its image" in (error.details() or "")


async def test_answers_are_json_in_utf_8():
    async with serving() as rig:
        response = await TritonStub(rig.channel).ModelInfer(query(QUESTION="é"))
    assert json.loads(response.raw_output_contents[0][4:])["answer"]
