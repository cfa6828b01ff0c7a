"""What every call goes through: ids, deadlines, hang-ups, and unexpected exceptions."""

import asyncio
import logging
import re
import struct
import tracemalloc
from types import SimpleNamespace
from typing import Any

import grpc
import h2.events
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from kestrel_client.v1 import engine_service_pb2, vision_service_pb2_grpc
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.calls import call_groups
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.frontends.grpc.method_handlers import AdmittedServices
from kestrel_grpc.frontends.grpc.ports import UNREAD_BYTES
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.events import Box, OutlineBox, Started, TextChannel, TextDelta, Usage
from tests.fakes import HOLD, FakeEngine, much_text
from tests.journey import http2
from tests.journey.http2 import Http2Client, framed, messages_in
from tests.server.serving import IMAGE, Serving, details_of, open_channel, reason_of, server_deadline, serving

QUERY = wire.QueryRequest(question="?")
COMPLETE_QUERY = wire.CompleteQueryRequest(question="?")
MIB = 2**20
SECRET = "the password is swordfish"


def stalls(request: object) -> list[object]:
    """A script that starts, says a word and then waits."""
    return [Started(Usage(1, 0)), TextDelta("a", TextChannel.ANSWER, 0, 1), HOLD]


async def read(stream: Any, count: int) -> list[Any]:
    return [await stream.read() for _ in range(count)]


async def test_request_id_of_the_caller_comes_back_everywhere():
    metadata = (("x-request-id", "my.id_1-A"),)
    async with serving() as rig:
        stream = rig.vision.Query(QUERY, metadata=metadata)
        messages = [message async for message in stream]
        assert dict(await stream.initial_metadata())["x-request-id"] == "my.id_1-A"
        assert messages[0].started.request_id == "my.id_1-A"
        assert messages[-1].completed.info.request_id == "my.id_1-A"
        call = rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=metadata)
        assert (await call).result.info.request_id == "my.id_1-A"
        assert dict(await call.trailing_metadata())["x-request-id"] == "my.id_1-A"


@pytest.mark.parametrize("unfit", [None, "", "with space", "a" * 129, "line%0Abreak"])
async def test_request_without_a_fit_id_is_given_one(unfit: str | None):
    async with serving() as rig:
        metadata = () if unfit is None else (("x-request-id", unfit),)
        call = rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=metadata)
        assert re.fullmatch("[0-9a-f]{32}", (await call).result.info.request_id)


async def test_refusal_sends_no_headers_so_that_clients_may_retry():
    async with serving(FakeEngine(max_queued_requests=0)) as rig:
        for call in (rig.vision.Query(QUERY), rig.vision.CompleteQuery(COMPLETE_QUERY)):
            assert "x-request-id" not in dict(await call.initial_metadata())
            assert "x-request-id" in dict(await call.trailing_metadata())


async def test_deadline_of_the_caller_reaches_the_engine():
    async with serving() as rig:
        await rig.vision.CompleteQuery(COMPLETE_QUERY, timeout=30)
        await rig.vision.CompleteQuery(COMPLETE_QUERY)
    bounded, unbounded = rig.engine.deadlines_s
    assert bounded is not None
    assert 25 < bounded <= 30.3  # gRPC rounds up what it writes, by at most a hundredth
    assert unbounded is None


@pytest.mark.parametrize("method", ["Query", "CompleteQuery"])
async def test_passed_deadline_ends_the_request_in_the_engine(method: str):
    async with serving(FakeEngine(stalls)) as rig:
        request = QUERY if method == "Query" else COMPLETE_QUERY
        call = getattr(rig.vision, method)(request, metadata=server_deadline(50))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (read(call, 3) if method == "Query" else call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.engine.num_submitted.acquire()
        await rig.engine.is_idle.wait()


@pytest.mark.parametrize("method", ["Query", "CompleteQuery"])
async def test_cancelled_call_cancels_its_request(method: str):
    async with serving(FakeEngine(stalls)) as rig:
        call = getattr(rig.vision, method)(QUERY if method == "Query" else COMPLETE_QUERY)
        await rig.engine.num_submitted.acquire()
        call.cancel()
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1


async def test_stream_cancelled_midway_cancels_its_request():
    async with serving(FakeEngine(stalls)) as rig:
        stream = rig.vision.Query(QUERY)
        await read(stream, 2)
        stream.cancel()
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1


async def test_an_outline_cancelled_midway_cancels_its_request():
    box, path = OutlineBox(Box(0.0, 0.0, 1.0, 1.0)), TextDelta("M 0 0", TextChannel.PATH, 0, 3)
    async with serving(FakeEngine(lambda _: [Started(Usage(1, 0)), box, path, HOLD])) as rig:
        stream = rig.vision.StreamSegment(wire.StreamSegmentRequest(object="bird", image=IMAGE))
        kinds = [message.WhichOneof("event") for message in await read(stream, 3)]
        assert kinds == ["started", "box", "path_delta"]
        stream.cancel()
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1


async def test_client_that_vanishes_cancels_all_its_requests():
    async with serving(FakeEngine(stalls)) as rig:
        async with open_channel(rig.server) as channel:
            other = Serving(rig.server, rig.engine, channel)
            streams = [other.vision.Query(QUERY) for _ in range(8)]
            for stream in streams:
                await read(stream, 2)
            await channel.close(None)
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 8


async def test_finished_request_is_not_cancelled():
    async with serving() as rig:
        _ = [message async for message in rig.vision.Query(QUERY)]
        await rig.vision.CompleteQuery(COMPLETE_QUERY)
        assert rig.engine.num_cancelled == 0


@pytest.mark.one_process("what an engine raises stays in its process")
@pytest.mark.parametrize("method", ["Query", "CompleteQuery"])
async def test_own_cancellation_does_not_hang_the_caller(method: str):
    """Something that the handler waits for is cancelled, not by the caller, who must get an error."""

    def cancels(request: object) -> list[object]:
        raise asyncio.CancelledError

    async with serving(FakeEngine(cancels)) as rig:
        call = getattr(rig.vision, method)(QUERY if method == "Query" else COMPLETE_QUERY, timeout=60)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.one_process("what an engine raises stays in its process")
@pytest.mark.parametrize("method", ["Query", "CompleteQuery"])
async def test_bug_is_internal_and_its_text_is_for_the_log_alone(method: str, caplog: pytest.LogCaptureFixture):
    def breaks(request: object) -> list[object]:
        raise RuntimeError(SECRET)

    async with serving(FakeEngine(breaks)) as rig:
        call = getattr(rig.vision, method)(QUERY if method == "Query" else COMPLETE_QUERY)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if method == "Query" else call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in str(caught.value)
    assert SECRET in caplog.text
    info: Any = details_of(caught.value)["ErrorInfo"]
    assert info.metadata["requestId"] in caplog.text


async def test_bytes_that_are_no_message_are_the_callers_fault():
    async with serving() as rig:
        for kind, method in ((rig.channel.unary_unary, "CompleteQuery"), (rig.channel.unary_stream, "Query")):
            call: Any = kind(f"/kestrel.v1.VisionService/{method}")(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if method == "CompleteQuery" else call.read())
            assert (caught.value.code(), reason_of(caught.value)) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
            )


async def test_a_call_without_a_message_is_the_callers_fault():
    async with serving() as rig:
        for method in (http2.COMPLETE_QUERY, http2.QUERY):
            async with Http2Client.connected(rig.address) as client:
                stream = await client.begin(method)
                await client.send(stream, b"", ends=True)
                _, trailers = await client.read(stream)
            assert int(trailers["grpc-status"]) == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert trailers["grpc-message"] == "there is no message"


async def test_only_the_first_message_of_a_call_is_read():
    async with serving() as rig, Http2Client.connected(rig.address) as client:
        stream = await client.begin(http2.COMPLETE_QUERY)
        await client.send(stream, framed(COMPLETE_QUERY) + framed(COMPLETE_QUERY), ends=True)
        body, trailers = await client.read(stream)
    assert len(messages_in(body)) == 1
    assert int(trailers["grpc-status"]) == 0
    assert len(rig.engine.requests) == 1


def promised(num_bytes: int) -> bytes:
    """The beginning of a message of that length."""
    return struct.pack(">BI", 0, num_bytes) + b"\x0a"


async def stalling(client: Http2Client, count: int = 1) -> list[int]:
    """Calls whose message does not come."""
    streams = []
    for _ in range(count):
        streams.append(await client.begin(http2.COMPLETE_QUERY))
        await client.send(streams[-1], promised(MIB))
    return streams


@pytest.mark.parametrize("method", [http2.COMPLETE_QUERY, http2.QUERY])
async def test_a_message_that_does_not_come_ends_its_call(method: str):
    async with serving(receive_timeout=0.05) as rig, Http2Client.connected(rig.address) as client:
        stream = await client.begin(method)
        await client.send(stream, promised(MIB))
        _, trailers = await client.read(stream)
    assert int(trailers["grpc-status"]) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert trailers["grpc-message"] == "the message of the call was not complete within 0.05 s"


async def test_senders_that_stall_delay_no_other_call():
    async with serving() as rig, Http2Client.connected(rig.address) as client:
        await stalling(client, 50)
        async with asyncio.timeout(60):
            for _ in range(3):
                assert (await rig.vision.CompleteQuery(COMPLETE_QUERY)).result.answer == "a kestrel"
            await rig.health.Check(HealthCheckRequest())
            await rig.engine_service.GetLoad(engine_service_pb2.GetLoadRequest())


async def test_many_images_at_a_time_all_arrive():
    image = bytes(MIB)
    async with serving() as rig:
        request = wire.CompleteCaptionRequest(image={"data": image})
        calls = [rig.vision.CompleteCaption(request) for _ in range(64)]
        assert all([(await call).result.caption for call in calls])


async def test_a_message_that_has_no_place_yet_waits_with_its_sender():
    async with (
        serving(max_message_bytes=4 * MIB, max_receiving_bytes=4 * MIB) as rig,
        Http2Client.connected(rig.address) as client,
    ):
        served, waiting = await client.begin(http2.COMPLETE_QUERY), await client.begin(http2.COMPLETE_QUERY)
        for stream in (served, waiting):
            await client.send(stream, promised(3 * MIB))
        async for event in client.events():
            if isinstance(event, h2.events.WindowUpdated) and event.stream_id:
                assert event.stream_id == served
                break
        assert client.window_bytes(served) > MIB
        assert client.window_bytes(waiting) < UNREAD_BYTES


async def test_calls_beyond_the_limit_are_refused_and_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_groups, "_max_calls", lambda info: 1)
    async with serving(FakeEngine(stalls)) as rig:
        stream = rig.vision.Query(QUERY)
        await read(stream, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(COMPLETE_QUERY)
        assert (caught.value.code(), reason_of(caught.value)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_CALLS",
        )
        assert {"RetryInfo", "QuotaFailure"} <= details_of(caught.value).keys()
        await rig.health.Check(HealthCheckRequest())
        stream.cancel()
        await rig.engine.is_idle.wait()
        await read(rig.vision.Query(QUERY), 1)


@pytest.mark.one_process("a front end holds the image until the core has it")
@pytest.mark.parametrize("method", [http2.QUERY, http2.COMPLETE_QUERY])
async def test_only_the_engine_holds_an_image(method: str):
    image = bytes(200_000)
    async with serving(FakeEngine(stalls)) as rig, Http2Client.connected(rig.address) as client:
        await client.greeted()
        stream = await client.begin(method)
        tracemalloc.start()
        try:
            await client.send(stream, framed(wire.QueryRequest(question="?", image={"data": image})))
            await rig.engine.num_submitted.acquire()
            (request,) = rig.engine.requests
            assert request.images == (image,)
            del request
            rig.engine.requests.clear()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held_bytes < len(image) / 2


async def test_unknown_method_is_unimplemented():
    async with serving() as rig:
        call: Any = rig.channel.unary_unary("/kestrel.v1.VisionService/Fly")(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_each_call_writes_one_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "kestrel_grpc.calls")
    async with serving(FakeEngine()) as rig:
        await rig.vision.CompleteQuery(COMPLETE_QUERY, metadata=(("x-request-id", "one"),))
        _ = [message async for message in rig.vision.Query(QUERY, metadata=(("x-request-id", "two"),))]
        await rig.engine_service.GetLoad(engine_service_pb2.GetLoadRequest(), metadata=(("x-request-id", "three"),))
    lines = [record.getMessage() for record in caplog.records if record.name == "kestrel_grpc.calls"]
    assert len(lines) == 3
    for line, name, method in zip(
        lines,
        ("one", "two", "three"),
        ("VisionService/CompleteQuery", "VisionService/Query", "EngineService/GetLoad"),
        strict=True,
    ):
        assert f"request_id={name} " in line
        assert f"kestrel.v1.{method} " in line
        assert re.search(r"duration_ms=\d", line)


@pytest.mark.parametrize("method", ["CompleteQuery", "Query"])
async def test_a_call_whose_task_runs_after_the_server_has_stopped_writes_one_line_and_no_error(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Under load the event loop may run the task of a call only then, before that of its cancellation."""
    caplog.set_level(logging.INFO)
    has_begun, has_stopped, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    receive = CallAdmission.receive

    async def receive_late(self: CallAdmission, *arguments: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: has_ended.set())
        has_begun.set()
        while not has_stopped.is_set():
            try:
                await has_stopped.wait()
            except asyncio.CancelledError:
                task.uncancel()
        return await receive(self, *arguments)

    monkeypatch.setattr(CallAdmission, "receive", receive_late)
    async with serving() as rig:
        request = COMPLETE_QUERY if method == "CompleteQuery" else QUERY
        call: Any = getattr(rig.vision, method)(request)
        await has_begun.wait()
        await rig.server._frontend._servers[0].stop(None)
        has_stopped.set()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await has_ended.wait()
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.calls"]
    assert [facts["outcome"] for facts in lines] == ["DRAINING"]
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_refusal_that_can_no_longer_be_sent_ends_its_call_as_a_cancelled_one_does():
    """A call may end, such as by its deadline, between its refusal and the moment at which the status is sent."""

    class GoneContext:
        """gRPC's context of such a call. The real one is in this state for microseconds."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

        def time_remaining(self) -> float:
            return 0.001

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def read(self) -> bytes:
            return b"no message"

        async def abort(self, *status: Any) -> None:
            raise grpc.aio.InternalError

    class Handlers:
        """Takes the place of gRPC's server."""

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            (self.methods,) = handlers

    async with serving() as rig:
        frontend: Any = rig.server._frontend
        handlers: Any = Handlers()
        services = AdmittedServices(handlers, frontend._groups.inference, frontend._connections, 1000)
        vision_service_pb2_grpc.add_VisionServiceServicer_to_server(frontend._vision, services)
        for method in ("Query", "CompleteQuery"):
            details: Any = SimpleNamespace(method=f"/kestrel.v1.VisionService/{method}", invocation_metadata=())
            handler = handlers.methods.service(details)
            with pytest.raises(asyncio.CancelledError):
                await (handler.stream_unary or handler.stream_stream)(None, GoneContext())


async def test_failed_call_logs_its_reason(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "kestrel_grpc.calls")
    async with serving(FakeEngine(max_queued_requests=0)) as rig:
        await rig.vision.CompleteQuery(COMPLETE_QUERY).code()
    assert "QUEUE_FULL" in caplog.text


async def test_error_in_the_middle_of_a_stream_follows_what_was_said():
    def breaks(request: object) -> list[object]:
        return [Started(Usage(1, 0)), TextDelta("a", TextChannel.ANSWER, 0, 1), EngineUnavailable("gone")]

    async with serving(FakeEngine(breaks)) as rig:
        stream = rig.vision.Query(QUERY)
        started, delta = await read(stream, 2)
        assert (started.WhichOneof("event"), delta.delta.text) == ("started", "a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert reason_of(caught.value) == "ENGINE_UNAVAILABLE"


@pytest.mark.one_process("the load is that of a tenth of a second ago")
async def test_hanging_up_at_any_moment_leaves_nothing_behind():
    async with serving(FakeEngine(stalls)) as rig:
        for number in range(60):
            stream = rig.vision.Query(QUERY)
            await read(stream, number % 3)
            stream.cancel()
        rig.engine.release()
        await rig.engine.is_idle.wait()
        assert (
            await rig.engine_service.GetLoad(engine_service_pb2.GetLoadRequest())
        ).load.running_request_count == 0


def says_much(request: object) -> list[object]:
    """More than the buffers between server and caller hold, and it does not end there."""
    return [Started(Usage(1, 0)), *much_text(), HOLD]


async def test_a_reader_that_takes_nothing_loses_its_request():
    async with serving(FakeEngine(says_much), stream_idle_timeout=0.1) as rig:
        stream = rig.vision.Query(QUERY)
        await read(stream, 1)
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stream, 17)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "STREAM_IDLE")
