"""Streams of frames: the newest first, errors of single frames, limits, and that nothing stays behind."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import engine_service_pb2 as engine_wire
from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import ContextLengthExceeded, EngineUnavailable, ImageError, QueueTimeout
from kestrel_runtime.api.events import Box, DetectOutput, Finished, FinishReason, Started, Usage
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import Detect, Point, Request, RequestOptions
from tests.fakes import HOLD, SKILLS, TIMING, FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.certificates import replace
from tests.server.serving import EOF, IMAGE, Serving, details_of, reason_of, serving

pytestmark = BOTH_CHANNELS

ALICE = (("authorization", "Bearer kestrel_alice"),)
USAGE = Usage(735, 729, 3)


def settings(
    *objects: str, every_frame: bool = False, track: bool = False, **fields: Any
) -> wire.DetectFramesRequest:
    names: dict[str, Any] = {"object": objects[0]} if len(objects) == 1 else {"objects": objects}
    request = wire.DetectRequest(**names, **fields)
    started = wire.DetectFramesSettings(request=request, every_frame=every_frame, track=track)
    return wire.DetectFramesRequest(settings=started)


def frame(data: bytes = b"a picture", num_read: int | None = None) -> wire.DetectFramesRequest:
    image = media_pb2.Image(data=data)
    return wire.DetectFramesRequest(frame=wire.Frame(image=image, read_response_count=num_read))


def holds(request: Request) -> list[object]:
    return [HOLD, *answers(request)]


def boxes(*found: Box) -> list[object]:
    return [Started(USAGE), Finished(DetectOutput(found), FinishReason.STOP, USAGE, TIMING)]


def images_of(engine: FakeEngine) -> list[object]:
    return [request.images[0] for request in engine.requests]


def counts_of(rig: Serving) -> FrameCounts:
    return vars(rig.server)["_groups"].frames_seen


async def until(condition: Callable[[], bool]) -> None:
    """Lets the server go on until something holds."""

    def wait() -> None:
        end = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < end
            threading.Event().wait(0.001)

    await asyncio.to_thread(wait)


@asynccontextmanager
async def streaming(rig: Serving, *messages: Any, **options: Any) -> AsyncIterator[Any]:
    call = rig.vision.DetectFrames(**options)
    for message in messages:
        await call.write(message)
    try:
        yield call
    finally:
        call.cancel()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    async def rest() -> None:
        while await call.read() is not EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest()
    return caught.value


def write_tokens(path: Path, more: str = "", name: str = "alice", scope: Scope = Scope.INFER) -> str:
    line = line_for(name, f"kestrel_{name}", frozenset((scope,))).replace(" }", f"{more} }}")
    replace(path, line.encode())
    return str(path)


async def test_the_newest_frame_is_looked_at_next_and_those_before_it_are_dropped():
    async with serving(FakeEngine(holds)) as rig, streaming(rig, settings("car"), frame(b"0")) as call:
        await rig.engine.num_submitted.acquire()
        for number in range(1, 10):
            await call.write(frame(b"%d" % number))
        await until(lambda: counts_of(rig).num_dropped == 8)
        rig.engine.release()
        first, second = await call.read(), await call.read()
        await call.done_writing()
        assert await call.read() is EOF
        assert counts_of(rig) == FrameCounts(num_streams=0, num_answered=2, num_failed=0, num_dropped=8)
    assert [(each.frame_index, each.dropped_frame_count) for each in (first, second)] == [(0, 8), (9, 8)]
    assert images_of(rig.engine) == [b"0", b"9"]
    assert all(request.options.is_transient for request in rig.engine.requests)
    assert second.result.info.request_id.endswith("-9")
    assert second.waiting_duration.ToNanoseconds() > 0
    assert len(first.result.objects) == 1
    assert first.result.objects[0].track_id == 0


async def test_every_frame_is_looked_at_in_order_where_the_client_asks_for_it():
    messages = [frame(b"%d" % number) for number in range(5)]
    async with serving() as rig, streaming(rig, settings("car", every_frame=True), *messages) as call:
        await call.done_writing()
        responses = [await call.read() for _ in messages]
        assert await call.read() is EOF
    assert [each.frame_index for each in responses] == [0, 1, 2, 3, 4]
    assert images_of(rig.engine) == [b"0", b"1", b"2", b"3", b"4"]
    assert responses[-1].dropped_frame_count == 0


async def test_a_client_that_says_what_it_has_read_gets_no_answers_that_grow_old_unread():
    async with serving() as rig, streaming(rig, settings("car")) as call:
        for number in range(2):
            await call.write(frame(b"%d" % number, num_read=0))
            assert (await call.read()).frame_index == number
        await call.write(frame(b"2", num_read=0))
        await call.write(frame(b"3", num_read=2))
        response = await call.read()
        assert (response.frame_index, response.dropped_frame_count) == (3, 1)
        await call.write(frame(b"4", num_read=2))
        await call.done_writing()  # the last frame is looked at in any case
        assert (await call.read()).frame_index == 4
    assert images_of(rig.engine) == [b"0", b"1", b"3", b"4"]


async def test_a_camera_that_pauses_gets_the_answer_about_its_last_frame(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kestrel_grpc.frontends.grpc.frame_streams._LAST_WORD_S", 0.01)
    async with serving() as rig, streaming(rig, settings("car")) as call:
        for number in range(4):
            await call.write(frame(b"%d" % number, num_read=0))
            assert (await call.read()).frame_index == number


async def test_points_and_several_objects_are_found_as_in_single_calls():
    raw = media_pb2.RawImage(pixels=bytes(12), width_px=2, height_px=2, format=media_pb2.PIXEL_FORMAT_RGB8)
    one = wire.PointFramesSettings(request=wire.PointRequest(objects=["car", "dog"], max_objects=7))
    async with serving() as rig:
        call = rig.vision.PointFrames()
        await call.write(wire.PointFramesRequest(settings=one))
        await call.write(wire.PointFramesRequest(frame=wire.Frame(image=media_pb2.Image(raw=raw))))
        response = await call.read()
        call.cancel()
        expected = await rig.vision.Point(wire.PointRequest(objects=["car", "dog"], image=IMAGE))
    assert list(response.result.groups) == list(expected.groups)
    image = RawImage(bytes(12), 2, 2, PixelFormat.RGB8, 6)
    asked = [
        Point(name, image, max_objects=7, options=RequestOptions(is_transient=True)) for name in ("car", "dog")
    ]
    assert rig.engine.requests[:2] == asked


async def test_a_frame_that_fails_has_an_error_and_the_stream_goes_on():
    def script(request: Request) -> list[object]:
        errors = {b"broken": ImageError("is broken"), b"late": QueueTimeout(0.5), b"bug": RuntimeError("a secret")}
        assert isinstance(request, Detect)
        return [errors[request.image]] if request.image in errors else list(answers(request))

    frames = [frame(data) for data in (b"fine", b"broken", b"", b"x" * 300_000, b"fine", b"late")]
    frames.insert(1, wire.DetectFramesRequest(frame=wire.Frame()))
    async with (
        serving(FakeEngine(script, max_image_bytes=200_000)) as rig,
        streaming(rig, settings("car", every_frame=True), *frames) as call,
    ):
        responses = [await call.read() for _ in frames]
    invalid, unavailable = (
        code.value[0] for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE)
    )
    assert [(each.error.code, each.error.reason) for each in responses] == [
        (0, ""),
        (invalid, "INVALID_REQUEST"),
        (invalid, "IMAGE_DECODE_FAILED"),
        (invalid, "INVALID_REQUEST"),
        (invalid, "IMAGE_TOO_LARGE"),
        (0, ""),
        (unavailable, "QUEUE_TIMEOUT"),
    ]
    assert responses[1].error.message == "frame.image: must not be empty"
    assert responses[2].error.message == "frame.image: is broken"
    assert counts_of(rig).num_failed == 5


@pytest.mark.parametrize(
    ("messages", "code", "reason", "text"),
    [
        ((), "INVALID_ARGUMENT", "INVALID_REQUEST", "settings: must come first"),
        ((frame(),), "INVALID_ARGUMENT", "INVALID_REQUEST", "settings: must come first"),
        (
            (settings("car", image=IMAGE),),
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "settings.request.image: must be absent: frames follow",
        ),
        (
            (settings("", max_objects=0),),
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "settings.request.object: must not be empty; settings.request.max_objects: must be from 1 to 1000",
        ),
        (
            (settings("car"), settings("dog")),
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "settings: must come once, and frames after it",
        ),
        (
            (settings("car", options=generation_pb2.RequestOptions(model="other")), frame()),
            "NOT_FOUND",
            "MODEL_NOT_FOUND",
            "no model named 'other' is served",
        ),
    ],
)
async def test_what_every_frame_would_fail_with_ends_the_stream(
    messages: tuple[Any, ...], code: str, reason: str, text: str
):
    async with serving() as rig, streaming(rig, *messages) as call:
        await call.done_writing()
        error = await refused(call)
        assert (error.code().name, reason_of(error), error.details()) == (code, reason, text)
        assert not rig.engine.requests


async def test_settings_that_only_the_engine_can_judge_end_the_stream_with_the_path_of_their_field():
    async with (
        serving(FakeEngine(lambda request: [ContextLengthExceeded("object", 5000, 4096)])) as rig,
        streaming(rig, settings("car"), frame()) as call,
    ):
        error = await refused(call)
    assert reason_of(error) == "CONTEXT_LENGTH_EXCEEDED"
    details: Any = details_of(error)
    assert [item.field for item in details["BadRequest"].field_violations] == ["settings.request.object"]


async def test_a_model_without_the_skill_ends_the_stream_at_once():
    async with (
        serving(FakeEngine(skills=[name for name in SKILLS if name != "detect"])) as rig,
        streaming(rig, settings("car")) as call,
    ):
        assert reason_of(await refused(call)) == "SKILL_UNSUPPORTED"


async def test_messages_that_cannot_be_parsed_end_the_stream():
    async with serving() as rig:
        method = rig.channel.stream_stream("/kestrel.v1.VisionService/DetectFrames")
        for bad, text in ((b"\xff" * 9, "the message cannot be parsed"), (b"\x1f\x8bzip", "without compression")):
            call: Any = method()
            await call.write(settings("car").SerializeToString())
            await call.write(bad)
            error = await refused(call)
            assert text in (error.details() or "")


async def test_objects_keep_their_ids_while_their_boxes_overlap():
    places = iter(((0.1, 0.6), (0.65, 0.15), (0.7,), (0.2, 0.75), (0.45,)))

    def script(request: Request) -> list[object]:
        return boxes(*(Box(place, 0.2, place + 0.2, 0.4) for place in next(places)))

    frames = [frame() for _ in range(5)]
    async with (
        serving(FakeEngine(script)) as rig,
        streaming(rig, settings("car", every_frame=True, track=True), *frames) as call,
    ):
        responses = [await call.read() for _ in frames]
    assert [[each.track_id for each in response.result.objects] for response in responses] == [
        [1, 2],
        [2, 1],
        [2],
        [1, 2],
        [3],
    ]


async def test_a_stream_holds_the_place_of_its_frames_among_the_concurrent_calls_of_a_token(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", concurrency = 1")
    async with serving(tokens=tokens) as rig:
        async with streaming(rig, settings("car"), metadata=ALICE) as call:
            for _ in range(3):
                await call.write(frame())
                assert (await call.read()).HasField("result")
            error = await refused(rig.vision.DetectFrames(metadata=ALICE))
            assert error.details() == "the token 'alice' allows at most 1 requests at a time"
            await call.done_writing()
            assert await call.read() is EOF
        await rig.vision.Detect(wire.DetectRequest(object="car", image=IMAGE), metadata=ALICE)
    assert rig.engine.tenants == ["alice"] * 4


async def test_each_frame_counts_towards_the_rate_and_the_stream_survives_its_end(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", rate = 0.001, burst = 3")
    async with serving(tokens=tokens) as rig, streaming(rig, settings("car"), metadata=ALICE) as call:
        found = []
        for _ in range(3):  # the stream itself is a call, too
            await call.write(frame())
            found.append((await call.read()).error.reason)
        assert found == ["", "", "RATE_LIMITED"]


async def test_more_objects_than_a_token_may_ask_for_at_once_end_the_stream(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", concurrency = 2")
    async with (
        serving(tokens=tokens) as rig,
        streaming(rig, settings("a", "b", "c"), frame(), metadata=ALICE) as call,
    ):
        error = await refused(call)
    assert (
        error.details() == "settings.request.objects: are 3, and this token may send at most 2 requests at a time"
    )


async def test_a_client_that_leaves_midway_leaves_nothing_behind(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", ", concurrency = 1")
    async with serving(FakeEngine(holds), tokens=tokens) as rig:
        call = rig.vision.DetectFrames(metadata=ALICE)
        for message in (settings("car"), frame(b"0"), frame(b"1"), frame(b"2")):
            await call.write(message)
        await until(lambda: counts_of(rig).num_dropped == 1)
        call.cancel()
        await rig.engine.is_idle.wait()
        await until(lambda: not counts_of(rig).num_streams)
        assert rig.engine.num_cancelled == 1
        rig.engine.release()
        async with streaming(rig, settings("car"), frame(), metadata=ALICE) as again:
            assert (await again.read()).HasField("result")


async def test_a_reader_that_stops_ends_its_stream_and_frames_are_dropped_meanwhile(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "kestrel_grpc.calls")
    many = tuple(Box(0.125, 0.25, 0.5, 0.75) for _ in range(900))
    async with (
        serving(FakeEngine(lambda request: boxes(*many)), stream_idle_timeout=0.5) as rig,
        streaming(rig, settings("car", max_objects=1000)) as call,
    ):
        seen = counts_of(rig)

        async def send() -> None:
            while True:
                await call.write(frame())

        sending = asyncio.create_task(send())
        await until(lambda: seen.num_answered > 0 and seen.num_streams == 0)
        assert seen.num_dropped > 0
        assert rig.engine.is_idle.is_set()
        sending.cancel()
        await asyncio.wait((sending,))
    lines: list[Any] = [record.args for record in caplog.records]
    assert lines[-1]["outcome"] == "STREAM_IDLE"


async def test_a_stream_without_frames_ends_after_a_time():
    async with serving(stream_idle_timeout=0.05) as rig, streaming(rig, settings("car"), frame()) as call:
        error = await refused(call)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.ABORTED, "STREAM_IDLE")
    assert error.details() == "no message of the stream was sent for 0.05 s"


async def test_a_stream_ends_at_its_greatest_age_after_the_answer_of_its_frame():
    async with (
        serving(FakeEngine(holds), max_frame_stream_age=0.05) as rig,
        streaming(rig, settings("car"), frame(b"0")) as call,
    ):
        await rig.engine.num_submitted.acquire()
        rig.engine.release()
        assert (await call.read()).frame_index == 0
        error = await refused(call)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "STREAM_EXPIRED")
    assert "RetryInfo" in details_of(error)


async def test_a_draining_server_answers_the_frame_that_it_has_and_ends_the_stream():
    async with serving(FakeEngine(holds), drain_timeout=3600.0) as rig:
        async with streaming(rig, settings("car"), frame(b"0"), frame(b"1")) as call:
            await rig.engine.num_submitted.acquire()
            drain = asyncio.ensure_future(rig.server.drain())
            await until(lambda: vars(rig.server)["_engine"].status is EngineStatus.DRAINING)
            rig.engine.release()
            assert (await call.read()).frame_index == 0
            error = await refused(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await drain
    assert images_of(rig.engine) == [b"0"]


async def test_an_engine_that_takes_no_requests_for_a_while_ends_no_stream():
    async with (
        serving(FakeEngine(lambda request: [EngineUnavailable("restarts")])) as rig,
        streaming(rig, settings("car"), frame()) as call,
    ):
        assert (await call.read()).error.reason == "ENGINE_UNAVAILABLE"
        await call.done_writing()
        assert await call.read() is EOF


async def test_a_token_that_is_revoked_ends_its_streams(tmp_path: Path):
    path = tmp_path / "tokens"
    async with (
        serving(FakeEngine(holds), tokens=write_tokens(path)) as rig,
        streaming(rig, settings("car"), frame(), metadata=ALICE) as call,
    ):
        await rig.engine.num_submitted.acquire()
        write_tokens(path, name="bob")
        assert reason_of(await refused(call)) == "TOKEN_INVALID"
        await rig.engine.is_idle.wait()


async def test_a_stream_needs_the_scope_of_requests(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens", scope=Scope.IMAGES)
    async with serving(tokens=tokens) as rig:
        assert reason_of(await refused(rig.vision.DetectFrames(metadata=ALICE))) == "SCOPE_REQUIRED"
        assert reason_of(await refused(rig.vision.PointFrames())) == "TOKEN_INVALID"


async def test_operators_cancel_a_frame_with_its_stream():
    async with (
        serving(FakeEngine(holds)) as rig,
        streaming(rig, settings("car"), frame(), metadata=(("x-request-id", "mine"),)) as call,
    ):
        await rig.engine.num_submitted.acquire()
        request = engine_wire.CancelRequestsRequest(request_id="mine")
        assert (await rig.engine_service.CancelRequests(request)).cancelled_request_count == 1
        assert reason_of(await refused(call)) == "REQUEST_CANCELLED"
        await rig.engine.is_idle.wait()


async def test_frames_are_logged_and_counted_one_by_one(caplog: pytest.LogCaptureFixture):
    outcomes = iter([answers, lambda request: [ImageError("is broken")]])
    with caplog.at_level(logging.INFO):
        async with serving(FakeEngine(lambda request: next(outcomes)(request))) as rig:
            metadata = (("x-request-id", "mine"),)
            async with streaming(
                rig, settings("car", every_frame=True), frame(), frame(), metadata=metadata
            ) as call:
                await call.read()
                await call.read()
                await call.done_writing()
                assert await call.read() is EOF
            usage = await rig.engine_service.GetUsage(engine_wire.GetUsageRequest())
    (caller,) = usage.callers
    assert (caller.answered_request_count, caller.failed_request_count) == (1, 1)
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.calls"]
    assert [(line["request_id"], line["method"], line["outcome"]) for line in lines[:2]] == [
        ("mine-0", "kestrel.v1.VisionService/DetectFrames", "OK"),
        ("mine-1", "kestrel.v1.VisionService/DetectFrames", "IMAGE_DECODE_FAILED"),
    ]
    (end,) = (record for record in caplog.records if record.name == "kestrel_grpc.frames")
    assert end.getMessage() == "request_id=mine stream of frames ended: 1 answered, 1 failed, 0 dropped"


async def test_the_number_of_streams_is_bounded_and_they_can_be_switched_off():
    async with serving(max_frame_streams=1) as rig, streaming(rig, settings("car"), frame()) as call:
        await call.read()
        assert reason_of(await refused(rig.vision.DetectFrames())) == "TOO_MANY_CALLS"
    async with serving(max_frame_streams=0) as rig:
        info = await rig.engine_service.GetServerInfo(engine_wire.GetServerInfoRequest())
        assert "frames" not in info.capabilities
        error = await refused(rig.vision.DetectFrames())
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_frames_that_wait_share_a_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    async with serving(FakeEngine(holds)) as rig, streaming(rig, settings("car"), frame(b"0")) as call:
        await rig.engine.num_submitted.acquire()
        streams = vars(rig.server)["_frontend"]._frames
        monkeypatch.setattr(streams, "_max_waiting_bytes", 100)
        await call.write(frame(b"x" * 200))
        await until(lambda: counts_of(rig).num_dropped == 1)
        await call.write(frame(b"small"))
        rig.engine.release()
        assert [(await call.read()).frame_index for _ in range(2)] == [0, 2]
        await until(lambda: not streams._waiting_bytes)
