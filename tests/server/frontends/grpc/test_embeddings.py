"""`EmbedImage` and `StreamEmbedImage` over the wire."""

import struct
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_runtime.api.events import PatchEmbeddings
from kestrel_runtime.api.requests import CachePolicy, Embed, Request, RequestOptions
from tests.fakes import HOLD, FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.serving import IMAGE, details_of, reason_of, serving

pytestmark = BOTH_CHANNELS


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    bad: Any = details_of(error)["BadRequest"]
    return [item.field for item in bad.field_violations]


async def events_of(rig: Any, **fields: Any) -> list[wire.StreamEmbedImageResponse]:
    stream = rig.vision.StreamEmbedImage(wire.StreamEmbedImageRequest(image=IMAGE, **fields))
    return [event async for event in stream]


async def test_the_mean_is_one_response():
    options = generation_pb2.RequestOptions(cache=generation_pb2.CACHE_POLICY_BYPASS)
    async with serving() as rig:
        response = await rig.vision.EmbedImage(wire.EmbedImageRequest(image=IMAGE, normalize=True, options=options))
    assert rig.engine.requests == [
        Embed(IMAGE.data, normalize=True, options=RequestOptions(cache=CachePolicy.BYPASS))
    ]
    assert list(response.mean) == [0.25, -0.5, 1.0]
    assert response.patch_count == 3
    usage = response.info.usage
    assert (usage.input_token_count, usage.image_token_count, usage.output_token_count) == (729, 729, 0)


@pytest.mark.parametrize(("type", "form"), [("UNSPECIFIED", "e"), ("FLOAT16", "e"), ("FLOAT32", "f")])
async def test_patches_come_in_pieces_before_the_mean(type: str, form: str):
    async with serving() as rig:
        events = await events_of(rig, type=f"EMBEDDING_TYPE_{type}")
    (request,) = rig.engine.requests
    assert request == Embed(IMAGE.data, patches=True, dtype="float32" if form == "f" else "float16")
    assert [event.WhichOneof("event") for event in events] == ["started", "patches", "patches", "completed"]
    pieces = [event.patches for event in events[1:3]]
    assert [(piece.first_patch, piece.patch_count) for piece in pieces] == [(0, 2), (2, 1)]
    data = b"".join(piece.data for piece in pieces)
    assert struct.unpack(f"<9{form}", data) == (1, -2, 0.5) * 3
    assert list(events[-1].completed.mean) == [0.25, -0.5, 1.0]


async def test_all_mistakes_of_a_request_are_named_and_cost_nothing():
    wrong = generation_pb2.RequestOptions(adapter="colours", priority=99)  # pyrefly: ignore[bad-argument-type]
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.vision.EmbedImage(wire.EmbedImageRequest(options=wrong))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        fields = fields_of(refused.value)
        assert fields == ["options.priority", "image", "options.adapter"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(rig, type=7)
        assert fields_of(refused.value) == ["type"]
    assert rig.engine.requests == []


async def test_patches_of_megabytes_arrive_whole_and_in_order():
    row, count = bytes(range(256)) * 16, 1460  # 5.7 MiB, as float32 of a real model

    def script(request: Request) -> list[Any]:
        first, *_, last = answers(request)
        pieces = [PatchEmbeddings(start, 20, row * 20) for start in range(0, count, 20)]
        return [first, *pieces, last]

    async with serving(FakeEngine(script)) as rig:
        events = await events_of(rig)
    assert b"".join(event.patches.data for event in events) == row * count


async def test_streams_that_are_not_read_are_bounded_and_others_go_on():
    async with serving(FakeEngine(lambda request: [*answers(request)[:-1], HOLD])) as rig:
        streams = [rig.vision.StreamEmbedImage(wire.StreamEmbedImageRequest(image=IMAGE)) for _ in range(8)]
        for stream in streams:
            assert (await stream.read()).HasField("started")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(rig)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(refused.value) == "TOO_MANY_CALLS"
        for stream in streams:
            stream.cancel()
        await rig.engine.is_idle.wait()
