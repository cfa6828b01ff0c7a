"""`VisionService` over the wire: what goes in reaches the engine, what comes out reaches the caller."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from PIL import Image

from kestrel_client import results
from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc.vision_service import gaze_response
from kestrel_runtime.api.events import (
    Box,
    Event,
    Finished,
    FinishReason,
    OutlineBox,
    PointOutput,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)
from kestrel_runtime.api.requests import Query, Request, Segment
from tests.fakes import FakeEngine
from tests.over_sockets import BOTH_CHANNELS
from tests.server.serving import IMAGE, details_of, serving

pytestmark = BOTH_CHANNELS


async def test_query_streams_started_deltas_and_the_whole():
    async with serving() as rig:
        messages = [
            message
            async for message in rig.vision.Query(wire.QueryRequest(question="?", image=IMAGE, reasoning=True))
        ]
    assert rig.engine.requests == [Query("?", IMAGE.data, reasoning=True)]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", "delta", "delta", "completed"]  # the pieces of the answer came at once
    completed = messages[-1].completed
    for channel, text in (("REASONING", completed.reasoning.text), ("ANSWER", completed.answer)):
        value = generation_pb2.TextChannel.Value(f"TEXT_CHANNEL_{channel}")
        deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
        assert "".join(delta.text for delta in deltas if delta.channel == value) == text != ""


@pytest.mark.parametrize("options", [{"adapter": "colours"}, {"model": "colours"}, {"model": "fake/colours"}])
async def test_results_and_streams_name_the_adapter_that_answers(options: dict[str, Any]):
    fields: Any = {"image": IMAGE, "options": generation_pb2.RequestOptions(**options)}
    async with serving() as rig:
        streams = [
            rig.vision.Query(wire.QueryRequest(question="?", **fields)),
            rig.vision.Caption(wire.CaptionRequest(**fields)),
            rig.vision.StreamSegment(wire.StreamSegmentRequest(object="bird", **fields)),
        ]
        events = [[event async for event in stream] for stream in streams]
        results = [
            (await rig.vision.CompleteQuery(wire.CompleteQueryRequest(question="?", **fields))).result,
            (await rig.vision.CompleteCaption(wire.CompleteCaptionRequest(**fields))).result,
            await rig.vision.Point(wire.PointRequest(object="bird", **fields)),
            await rig.vision.Detect(wire.DetectRequest(object="bird", **fields)),
            await rig.vision.Segment(wire.SegmentRequest(object="bird", **fields)),
            await rig.vision.Gaze(wire.GazeRequest(eye={"x": 0.5, "y": 0.5}, **fields)),
        ]
    names = {result.info.model for result in results}
    names |= {each[0].started.model for each in events} | {each[-1].completed.info.model for each in events}
    assert names == {"fake/colours"}


async def test_segments_stream_the_box_and_then_the_path():
    fields: Any = {"object": "bird", "image": IMAGE}
    metadata = (("x-request-id", "same"),)
    async with serving() as rig:
        stream = rig.vision.StreamSegment(wire.StreamSegmentRequest(**fields), metadata=metadata)
        messages = [message async for message in stream]
        whole = await rig.vision.Segment(wire.SegmentRequest(**fields), metadata=metadata)
    assert rig.engine.requests == [Segment("bird", IMAGE.data)] * 2
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", "box", "path_delta", "completed"]  # the pieces of the path came at once
    started, box, delta, completed = messages
    assert (started.started.model, started.started.usage.input_token_count) == ("fake", 735)
    assert box.box == whole.segments[0].box
    assert delta.path_delta == wire.PathDelta(text=whole.segments[0].svg_path, token_index=0, token_count=7)
    assert completed.completed == whole
    assert not whole.segments[0].is_partial


async def test_a_partial_outline_says_so():
    masks = (SegmentMask("M 0 0", Box(0.0, 0.0, 1.0, 1.0), is_partial=True),)
    finished = Finished(SegmentOutput(masks), FinishReason.STOP, Usage(1, 1), Timing(0.0, 0.0, 0.0, 0.0, 0.0))
    async with serving(FakeEngine(lambda _: [Started(Usage(1, 1)), finished])) as rig:
        request = wire.SegmentRequest(object="bird", image=IMAGE)
        assert (await rig.vision.Segment(request)).segments[0].is_partial


@pytest.mark.one_process("events come one by one")
async def test_the_path_of_a_slow_reader_is_joined_and_the_box_is_not_lost():
    box = OutlineBox(Box(0.0, 0.0, 0.5, 1.0))
    pieces = [TextDelta(" L 0 1" * 100, TextChannel.PATH, index, 1) for index in range(2000)]
    finished = Finished(SegmentOutput(()), FinishReason.STOP, Usage(1, 1), Timing(0.0, 0.0, 0.0, 0.0, 0.0))
    async with serving(FakeEngine(lambda _: [Started(Usage(1, 1)), box, *pieces, finished])) as rig:
        stream = rig.vision.StreamSegment(wire.StreamSegmentRequest(object="bird", image=IMAGE))
        await rig.engine.num_submitted.acquire()
        await rig.engine.is_idle.wait()
        messages = [message async for message in stream]
    assert [message.WhichOneof("event") for message in messages] == ["started", "box", "path_delta", "completed"]
    assert messages[2].path_delta.token_count == 2000


def square(size_px: tuple[int, int]) -> Callable[[Request], list[Event]]:
    """A script that finds a square in the middle of a picture of this size."""

    def script(request: Request) -> list[Event]:
        assert isinstance(request, Segment)
        masks = (SegmentMask("M 0 0 H 1 V 1 H 0 Z", Box(0.25, 0.25, 0.75, 0.75)),)
        output, timing = SegmentOutput(masks, request.mask_format), Timing(0.0, 0.0, 0.0, 0.0, 0.0)
        return [
            Started(Usage(1, 1)),
            Finished(output, FinishReason.STOP, Usage(1, 1), timing, image_size_px=size_px),
        ]

    return script


async def test_an_outline_has_the_form_that_is_asked_for_as_the_client_makes_it_itself():
    async with serving(FakeEngine(square((40, 20)))) as rig:
        found = {}
        for form in ("UNSPECIFIED", "SVG_PATH", "POLYGON", "RUN_LENGTH", "PNG"):
            request = wire.SegmentRequest(object="bird", image=IMAGE, mask_format=f"MASK_FORMAT_{form}")
            (found[form],) = (await rig.vision.Segment(request)).segments
            streamed = wire.StreamSegmentRequest(object="bird", image=IMAGE, mask_format=f"MASK_FORMAT_{form}")
            *_, last = [event async for event in rig.vision.StreamSegment(streamed)]
            assert last.completed.segments[0] == found[form]
    plain = found["UNSPECIFIED"]
    own = results.Segment(plain.svg_path, results.box(plain.box))
    assert found["SVG_PATH"] == plain
    assert not any((plain.polygons, plain.png, plain.HasField("run_length")))
    (line,) = found["POLYGON"].polygons
    assert [[(point.x, point.y) for point in line.points]] == own.polygons()
    runs = found["RUN_LENGTH"].run_length
    assert {"size": [runs.height_px, runs.width_px], "counts": runs.counts} == own.to_rle(40, 20)
    assert found["PNG"].png == own.to_png(40, 20)
    with Image.open(io.BytesIO(found["PNG"].png)) as picture:
        assert (picture.size, picture.getbbox()) == ((40, 20), (10, 5, 30, 15))


async def test_a_mask_of_a_picture_that_is_too_large_is_refused_and_its_path_is_not():
    async with serving(FakeEngine(square((20_000, 20_000)))) as rig:
        for form in ("PNG", "BMP"):
            value: Any = 9 if form == "BMP" else "MASK_FORMAT_PNG"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.vision.Segment(wire.SegmentRequest(object="bird", image=IMAGE, mask_format=value))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            bad: Any = details_of(refused.value)["BadRequest"]
            assert [item.field for item in bad.field_violations] == ["mask_format"]
        runs = wire.SegmentRequest(object="bird", image=IMAGE, mask_format="MASK_FORMAT_RUN_LENGTH")
        assert len((await rig.vision.Segment(runs)).segments[0].run_length.counts) < 100_000


def test_a_gaze_without_a_target_has_none():
    finished = Finished(PointOutput(()), FinishReason.STOP, Usage(1, 1), Timing(0.0, 0.0, 0.0, 0.0, 0.0))
    assert not gaze_response(finished, "id", "m").HasField("target")


@pytest.mark.parametrize("count", [64])
async def test_many_calls_at_once_get_each_their_own_answer(count: int):
    async with serving() as rig:

        async def ask(index: int) -> None:
            metadata = (("x-request-id", f"call-{index}"),)
            if index % 2:
                response = await rig.vision.CompleteQuery(
                    wire.CompleteQueryRequest(question="?"), metadata=metadata
                )
                assert response.result.info.request_id == f"call-{index}"
            else:
                stream = rig.vision.Query(wire.QueryRequest(question="?"), metadata=metadata)
                last = [message async for message in stream][-1]
                assert last.completed.info.request_id == f"call-{index}"

        await asyncio.gather(*(ask(index) for index in range(count)))
        assert len(rig.engine.requests) == count
