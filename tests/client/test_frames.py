"""Streams of frames of both clients, against a canned server: results, errors, resumption, and their ends."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from grpc_status import rpc_status

from kestrel_client import (
    AsyncClient,
    Box,
    Cancelled,
    Client,
    DetectedObject,
    DetectResult,
    FrameResult,
    ImageInput,
    InvalidRequest,
    RawImage,
    ServerError,
    Unavailable,
)
from kestrel_client.v1 import vision_service_pb2
from tests.client.canned import BOX, INFO, CannedVision, error_info, queue_full, serving, status

DRAINING = status(code_pb2.UNAVAILABLE, "the engine takes no requests now", error_info("DRAINING"))
DRAINING.details.append(queue_full().details[1])


class Cameras(CannedVision):
    """Answers each frame; ends each of the first calls after as many frames as `lengths` says, without an answer to
    the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.settings: list[Any] = []
        self.frames: list[bytes] = []
        self.timeouts: list[Any] = []
        self.counts: list[int] = []

    def DetectFrames(self, request_iterator: Iterator[Any], context: Any) -> Any:
        self.timeouts.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            context.abort_with_status(rpc_status.to_status(self.failures.pop(0)))
        self.settings.append(next(request_iterator).settings)
        length = self.lengths.pop(0) if self.lengths else None
        for index, request in enumerate(request_iterator):
            self.counts.append(request.frame.read_response_count)
            self.frames.append(request.frame.image.data or request.frame.image.raw.pixels)
            if index + 1 == length:
                context.abort_with_status(rpc_status.to_status(DRAINING))
            response = vision_service_pb2.DetectFramesResponse(frame_index=index, dropped_frame_count=index // 2)
            response.waiting_duration.FromMilliseconds(250)
            if request.frame.image.data == b"broken":
                response.error.code, response.error.reason = code_pb2.INVALID_ARGUMENT, "IMAGE_DECODE_FAILED"
                response.error.message = "frame.image: is broken"
            else:
                found = vision_service_pb2.DetectedObject(box=BOX, track_id=index + 1, score=self.score)
                response.result.CopyFrom(vision_service_pb2.DetectResponse(objects=[found], info=INFO))
            yield response


@pytest.fixture
def vision() -> Cameras:
    return Cameras()


def tracks(result: DetectResult | None) -> list[int | None]:
    assert result is not None
    return [found.track_id for found in result.objects]


def test_each_frame_has_its_result_or_its_error(client: Client, vision: Cameras, tmp_path: Path):
    path = tmp_path / "frame.jpg"
    path.write_bytes(b"file")
    vision.score = 0.5
    images: list[ImageInput] = [b"bytes", b"broken", path, RawImage(b"123", 1, 1)]
    with client.detect_frames(
        images, "car", max_objects=7, min_score=0.25, every_frame=True, track=True, priority="batch"
    ) as stream:
        found = list(stream)
    assert vision.frames == [b"bytes", b"broken", b"file", b"123"]
    assert [each.index for each in found] == [0, 1, 2, 3]
    assert [each.dropped_count for each in found] == [0, 0, 1, 1]
    assert isinstance(found[0].result, DetectResult)
    assert found[0].result.objects == (DetectedObject(Box(0.25, 0.125, 0.75, 0.5), 0.5, track_id=1),)
    assert (found[0].error, found[0].waiting_s) == (None, 0.25)
    assert found[1].result is None
    assert isinstance(found[1].error, InvalidRequest)
    assert (found[1].error.reason, found[1].error.request_id) == ("IMAGE_DECODE_FAILED", stream.request_id)
    (settings,) = vision.settings
    assert (settings.request.object, settings.request.max_objects, settings.request.min_score) == ("car", 7, 0.25)
    assert (settings.every_frame, settings.track) == (True, True)
    assert not settings.request.HasField("image")
    assert vision.metadata[0]["x-request-id"] == stream.request_id
    assert vision.timeouts[0] > 1e9, "a stream has no deadline by default"


async def test_the_asyncio_client_takes_frames_of_both_kinds_of_iterators(address: str, vision: Cameras):
    async def camera() -> AsyncIterator[bytes]:
        for number in range(3):
            await asyncio.sleep(0)
            yield b"%d" % number

    async with AsyncClient(address) as client:
        found = [each async for each in client.detect_frames(camera(), "car", timeout_s=30.0)]
        assert [tracks(each.result) for each in found] == [[1], [2], [3]]
        points = [each async for each in client.point_frames([b"0", b"1"], ["car"])]
        assert [group.object for each in points if each.result for group in each.result.groups] == ["car", "car"]
    assert vision.frames == [b"0", b"1", b"2"]
    assert 20.0 < vision.timeouts[0] <= 30.0


def test_a_stream_that_the_server_ends_goes_on_with_the_next_frame(client: Client, vision: Cameras):
    vision.lengths = [3, 2]
    found: list[FrameResult[DetectResult]] = []

    def camera() -> Iterator[bytes]:
        """Gives a frame when the one before is answered."""
        for number in range(6):
            while len(found) < number:
                threading.Event().wait(0.001)
            yield b"%d" % number

    for each in client.detect_frames(camera(), "car", track=True):
        found.append(each)
    assert vision.frames == [b"0", b"1", b"2", b"2", b"3", b"3", b"4", b"5"], "the newest is sent again"
    assert [each.index for each in found] == [0, 1, 2, 3, 4, 5]
    assert vision.counts == [0, 1, 2, 0, 1, 0, 1, 2], "what each call has read"
    assert [tracks(each.result) for each in found] == [[1], [2], [3], [4], [5], [6]], "no name has two meanings"


def test_frames_without_an_answer_are_sent_again_where_each_is_to_be_looked_at(client: Client, vision: Cameras):
    vision.lengths = [3, 2]
    found = list(client.detect_frames([b"%d" % number for number in range(6)], "car", every_frame=True))
    assert [each.index for each in found] == [0, 1, 2, 3, 4, 5]
    assert len(vision.settings) == 3


def test_a_server_that_refuses_for_a_while_is_asked_again_and_others_are_not(client: Client, vision: Cameras):
    vision.failures = [queue_full(), queue_full()]
    assert [each.index for each in client.detect_frames([b"0"], "car")] == [0]
    vision.failures = [status(code_pb2.INTERNAL, "internal error", error_info("INTERNAL"))]
    with pytest.raises(ServerError):
        list(client.detect_frames([b"0"], "car"))


def test_a_stream_that_ends_with_a_status_of_grpc_itself_goes_on(client: Client, vision: Cameras):
    """As grpc.aio makes one of the server's, if it was sending a message when the stream ended."""
    vision.failures = [status(code_pb2.INTERNAL, "Internal error from Core")]
    assert [each.index for each in client.detect_frames([b"0"], "car")] == [0]


def test_the_longest_wait_of_a_frame_does_not_limit_the_attempts_to_go_on(client: Client, vision: Cameras):
    vision.failures = [DRAINING]
    assert [each.index for each in client.detect_frames([b"0"], "car", max_queue_s=0.001)] == [0]
    (settings,) = vision.settings
    assert settings.request.options.max_queue_duration.ToMilliseconds() == 1


def test_a_connection_that_is_lost_is_reported_once_retries_have_ended():
    with serving(Cameras()) as address:
        pass
    with Client(address, max_retries=0, max_retry_s=0.0) as client, pytest.raises(Unavailable):
        list(client.detect_frames([b"0"], "car"))


def test_what_the_frames_raise_is_raised_by_the_stream_after_the_answers_before(client: Client, vision: Cameras):
    def camera() -> Iterator[ImageInput]:
        yield b"0"
        raise OSError("the camera is gone")

    stream = client.detect_frames(camera(), "car")
    assert next(stream).index == 0
    with pytest.raises(OSError, match="the camera is gone"):
        next(stream)
    with pytest.raises(InvalidRequest) as caught:
        list(client.detect_frames([b"0", 7], "car"))  # pyrefly: ignore[bad-argument-type]
    assert caught.value.request_id


def test_a_least_score_that_the_server_ignores_is_an_error(client: Client):
    with pytest.raises(ServerError, match="makes no scores") as caught:
        list(client.detect_frames([b"0"], "car", min_score=0.5))
    assert caught.value.reason == "SCORES_MISSING"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"object": 7}, "object"),
        ({"images": "video.mp4"}, "images"),
        ({"images": b"file"}, "images"),
        ({"images": Path("folder")}, "images"),
        ({"every_frame": "yes"}, "every_frame"),
        ({"track": "yes"}, "track"),
        ({"timeout_s": "1"}, "timeout_s"),
        ({"max_retry_s": "1"}, "max_retry_s"),
    ],
)
def test_arguments_are_checked_before_anything_is_sent(
    changed: dict[str, Any], field: str, client: Client, vision: Cameras
):
    arguments: dict[str, Any] = {"images": [b"0"], "object": "car", **changed}
    with pytest.raises(InvalidRequest) as caught:
        client.detect_frames(**arguments)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.request_id
    assert not vision.settings


def test_leaving_the_block_ends_the_call(client: Client, vision: Cameras):
    def camera() -> Iterator[bytes]:
        while True:
            yield b"frame"

    with client.detect_frames(camera(), "car") as stream:
        assert next(stream).index == 0
    with pytest.raises(Cancelled):
        next(stream)
    assert len(vision.settings) == 1
