"""Several objects in one call of Point or Detect: groups in order, errors of single objects, and limits."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_runtime.api.errors import ContextLengthExceeded, QueueTimeout
from kestrel_runtime.api.events import Box, DetectOutput, Event, Finished, FinishReason, Started, Timing, Usage
from kestrel_runtime.api.requests import Detect, Point, Request
from tests.fakes import HOLD, FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.serving import IMAGE, details_of, reason_of, serving

pytestmark = BOTH_CHANNELS

NAMES = ("car", "person", "dog", "cat", "bus")


def detect(*names: str, **fields: Any) -> wire.DetectRequest:
    return wire.DetectRequest(objects=names, image=IMAGE, **fields)


def point(*names: str, **fields: Any) -> wire.PointRequest:
    return wire.PointRequest(objects=names, image=IMAGE, **fields)


def failing(**errors: BaseException) -> Callable[[Request], list[object]]:
    """A script that fails for some objects."""
    return lambda request: [errors[request.text]] if request.text in errors else list(answers(request))


def found(count: int) -> Callable[[Request], list[Event]]:
    """A script in which object number N of `NAMES` is found N times, at most `count` times."""

    def script(request: Request) -> list[Event]:
        index = NAMES.index(request.text)
        boxes = tuple(Box(0.125 * place, 0.25, 0.5, 0.75) for place in range(min(index, count)))
        reason = FinishReason.MAX_OBJECTS if index >= count else FinishReason.STOP
        usage = Usage(735, 729, 3 * len(boxes) + 1, 730 if index else 0)
        end = Finished(
            DetectOutput(boxes), reason, usage, Timing(0.0, 0.0, 0.0, 0.0, 0.0), image_size_px=(640, 480)
        )
        return [Started(usage), end]

    return script


async def test_each_object_has_its_group_in_the_order_of_the_request():
    async with serving(FakeEngine(found(3))) as rig:
        response = await rig.vision.Detect(detect(*NAMES, max_objects=3))
    assert [request.text for request in rig.engine.requests] == list(NAMES)
    assert set(rig.engine.requests) == {Detect(name, IMAGE.data, max_objects=3) for name in NAMES}
    assert [group.object for group in response.groups] == list(NAMES)
    assert [len(group.objects) for group in response.groups] == [0, 1, 2, 3, 3]
    assert response.groups[2].objects[1].box.x_min == 0.125
    reasons = [generation_pb2.FinishReason.Name(group.finish_reason) for group in response.groups]
    assert reasons == ["FINISH_REASON_STOP"] * 3 + ["FINISH_REASON_MAX_OBJECTS"] * 2
    assert not any(group.HasField("error") for group in response.groups)
    assert not response.objects


async def test_the_whole_has_the_sums_of_all_objects_and_the_size_of_the_picture():
    async with serving(FakeEngine(found(3))) as rig:
        info = (await rig.vision.Detect(detect(*NAMES))).info
    usage = info.usage
    assert (usage.input_token_count, usage.cached_token_count, usage.output_token_count) == (5 * 735, 4 * 730, 32)
    assert info.finish_reason == generation_pb2.FINISH_REASON_MAX_OBJECTS
    assert (info.image_width_px, info.image_height_px) == (640, 480)


async def test_points_have_groups_too_and_one_object_in_the_list_has_one():
    async with serving() as rig:
        response = await rig.vision.Point(point("car"))
        alone = await rig.vision.Point(wire.PointRequest(object="car", image=IMAGE))
    assert rig.engine.requests == [Point("car", IMAGE.data)] * 2
    (group,) = response.groups
    assert list(group.points) == list(alone.points)
    assert (len(response.points), len(alone.groups)) == (0, 0)


async def test_an_error_of_one_object_does_not_end_the_others():
    script = failing(person=ContextLengthExceeded("object", 5000, 4096), cat=QueueTimeout(0.5))
    async with serving(FakeEngine(script)) as rig:
        response = await rig.vision.Detect(detect(*NAMES))
    errors = [(group.error.code, group.error.reason) for group in response.groups]
    invalid, unavailable = (
        code.value[0] for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE)
    )
    nothing = (0, "")
    assert errors == [
        nothing,
        (invalid, "CONTEXT_LENGTH_EXCEEDED"),
        nothing,
        (unavailable, "QUEUE_TIMEOUT"),
        nothing,
    ]
    assert "objects[1]: the prompt takes 5000 tokens" in response.groups[1].error.message
    assert [len(group.objects) for group in response.groups] == [1, 0, 1, 0, 1]
    assert response.groups[1].finish_reason == generation_pb2.FINISH_REASON_UNSPECIFIED


async def test_a_call_fails_if_no_object_has_an_answer():
    errors = [ContextLengthExceeded("object", 5000 + index, 4096) for index in range(2)]
    async with serving(FakeEngine(failing(car=errors[0], dog=errors[1]))) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.Point(point("car", "dog"))
    assert reason_of(caught.value) == "CONTEXT_LENGTH_EXCEEDED"
    details: Any = details_of(caught.value)
    assert [item.field for item in details["BadRequest"].field_violations] == ["objects[0]"]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (detect("car", object="car"), ["object"]),
        (detect(*["car"] * 65, max_objects=0), ["objects", "max_objects"]),
        (detect("car", " ", "dog", ""), ["objects[1]", "objects[3]"]),
        (detect("a" * 65_537), ["objects[0]"]),
        (wire.DetectRequest(image=IMAGE), ["object"]),
        (wire.PointRequest(objects=["car", ""]), ["objects[1]", "image"]),
    ],
)
async def test_names_that_make_no_sense_are_refused_with_everything_else(message: Any, fields: list[str]):
    async with serving() as rig:
        ask = rig.vision.Detect if isinstance(message, wire.DetectRequest) else rig.vision.Point
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details: Any = details_of(caught.value)
    assert [item.field for item in details["BadRequest"].field_violations] == fields
    assert rig.engine.requests == []


async def events_of(stream: Any) -> list[Any]:
    return [message async for message in stream]


async def test_each_find_is_sent_when_it_is_read_and_the_last_message_is_the_whole_answer():
    metadata = (("x-request-id", "same"),)
    async with serving(FakeEngine(answers)) as rig:
        fields: Any = {"image": IMAGE, "max_objects": 3}
        for kind, find, names in (("Point", 2, ()), ("Point", 2, NAMES), ("Detect", 1, ()), ("Detect", 1, NAMES)):
            fields |= {"object": "" if names else "bird", "objects": names}
            whole = await getattr(rig.vision, kind)(getattr(wire, f"{kind}Request")(**fields), metadata=metadata)
            message = getattr(wire, f"Stream{kind}Request")(**fields)
            events = await events_of(getattr(rig.vision, f"Stream{kind}")(message, metadata=metadata))
            kinds = [event.WhichOneof("event") for event in events]
            assert kinds == ["started", *["found"] * find * max(len(names), 1), "completed"]
            assert events[0].started.request_id == "same"
            assert events[-1].completed == whole
            groups = whole.groups or [whole]
            sent: list[list[Any]] = [[] for _ in groups]
            for event in events[1:-1]:
                sent[event.object_index].append(event.found.point if kind == "Point" else event.found)
            assert sent == [list(group.points if kind == "Point" else group.objects) for group in groups]


@pytest.mark.one_process("events come one by one")
async def test_the_first_box_comes_while_other_objects_are_still_looked_for():
    gate = asyncio.Event()

    def script(request: Request) -> list[object]:
        started, *finds, end = answers(request)
        return [gate, started, *finds, end] if request.text == "car" else [started, *finds, HOLD, end]

    async with serving(FakeEngine(script)) as rig:
        stream = rig.vision.StreamDetect(wire.StreamDetectRequest(objects=["car", "dog"], image=IMAGE))
        assert (await stream.read()).HasField("started")
        first = await stream.read()
        assert (first.WhichOneof("event"), first.object_index) == ("found", 1)
        gate.set()
        second = await stream.read()
        assert (second.WhichOneof("event"), second.object_index) == ("found", 0)
        rig.engine.release()
        assert [group.object for group in (await stream.read()).completed.groups] == ["car", "dog"]


async def test_an_error_of_one_object_ends_no_other_in_a_stream():
    script = failing(person=ContextLengthExceeded("object", 5000, 4096), cat=QueueTimeout(0.5))
    async with serving(FakeEngine(script)) as rig:
        stream = rig.vision.StreamDetect(wire.StreamDetectRequest(objects=NAMES, image=IMAGE))
        *events, last = await events_of(stream)
        whole = await rig.vision.Detect(detect(*NAMES))
    assert sorted(event.object_index for event in events if event.HasField("found")) == [0, 2, 4]
    assert list(last.completed.groups) == list(whole.groups)


async def test_a_stream_fails_if_no_object_has_an_answer():
    errors = [QueueTimeout(0.5), ContextLengthExceeded("object", 5000, 4096)]
    async with serving(FakeEngine(failing(car=errors[1], dog=errors[0]))) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events_of(rig.vision.StreamPoint(wire.StreamPointRequest(objects=["car", "dog"], image=IMAGE)))
    assert reason_of(caught.value) == "CONTEXT_LENGTH_EXCEEDED"
    details: Any = details_of(caught.value)
    assert [item.field for item in details["BadRequest"].field_violations] == ["objects[0]"]


async def test_a_stream_that_is_left_ends_the_requests_of_all_its_objects():
    async with serving(FakeEngine(lambda request: [*answers(request)[:-1], HOLD])) as rig:
        stream = rig.vision.StreamPoint(wire.StreamPointRequest(objects=NAMES, image=IMAGE))
        for _ in NAMES:
            await rig.engine.num_submitted.acquire()
        assert (await stream.read()).HasField("started")
        stream.cancel()
        await rig.engine.is_idle.wait()
    assert rig.engine.num_cancelled == len(NAMES)


async def test_a_cancelled_call_ends_the_requests_of_all_its_objects():
    async with serving(FakeEngine(lambda request: [HOLD])) as rig:
        call = rig.vision.Detect(detect(*NAMES))
        for _ in NAMES:
            await rig.engine.num_submitted.acquire()
        call.cancel()
        await rig.engine.is_idle.wait()
    assert rig.engine.num_cancelled == len(NAMES)


async def test_the_queue_takes_all_objects_or_none_and_never_more_than_it_holds():
    async with serving(FakeEngine(lambda request: [HOLD], max_queued_requests=4)) as rig:
        call = rig.vision.Detect(detect("car", "dog"))
        for _ in range(2):
            await rig.engine.num_submitted.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await rig.vision.Detect(detect("car", "dog", "cat"))
        with pytest.raises(grpc.aio.AioRpcError) as never:
            await rig.vision.Detect(detect(*NAMES))
        call.cancel()
        await rig.engine.is_idle.wait()
    assert reason_of(full.value) == "QUEUE_FULL"
    assert never.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "objects: are 5, and the queue of this server holds 4 requests" in (never.value.details() or "")
    assert len(rig.engine.requests) == 2


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[[str], str]:
    def write(limits: str) -> str:
        file = tmp_path / "tokens.toml"
        file.write_text(
            line_for("alice", "kestrel_alice", frozenset((Scope.INFER,))).replace(" }", f", {limits} }}")
        )
        return str(file)

    return write


ALICE = (("authorization", "Bearer kestrel_alice"),)


async def test_each_object_counts_towards_the_rate(tokens: Callable[[str], str]):
    async with serving(tokens=tokens("rate = 0.001, burst = 8")) as rig:
        await rig.vision.Detect(detect("car", "dog", "cat", "bus"), metadata=ALICE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.Detect(detect(*NAMES), metadata=ALICE)
        # The refused call has counted as the one that it began as.
        await rig.vision.Detect(detect("car", "dog", "cat"), metadata=ALICE)
        with pytest.raises(grpc.aio.AioRpcError) as empty:
            await rig.vision.Detect(wire.DetectRequest(object="car", image=IMAGE), metadata=ALICE)
    assert reason_of(caught.value) == reason_of(empty.value) == "RATE_LIMITED"


async def test_each_object_counts_towards_requests_at_a_time_until_the_call_ends(tokens: Callable[[str], str]):
    async with serving(FakeEngine(lambda request: [HOLD]), tokens=tokens("concurrency = 6")) as rig:
        call = rig.vision.Detect(detect("car", "dog", "cat", "bus"), metadata=ALICE)
        for _ in range(4):
            await rig.engine.num_submitted.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.Detect(detect("car", "dog", "cat"), metadata=ALICE)
        call.cancel()
        await rig.engine.is_idle.wait()
        rig.engine.release()
    assert reason_of(caught.value) == "RATE_LIMITED"


@pytest.mark.parametrize(
    ("limits", "limit"),
    [("concurrency = 4", "at most 4 requests at a time"), ("rate = 100, burst = 4", "at most 4 requests at once")],
)
async def test_more_objects_than_a_token_may_ever_send_are_refused_at_once(
    limits: str, limit: str, tokens: Callable[[str], str]
):
    async with serving(tokens=tokens(limits)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.Detect(detect(*NAMES), metadata=ALICE)
        await rig.vision.Detect(detect(*NAMES[:3]), metadata=ALICE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"objects: are 5, and this token may send {limit}" in (caught.value.details() or "")
    assert "RetryInfo" not in details_of(caught.value)
