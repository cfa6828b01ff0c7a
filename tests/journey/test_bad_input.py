"""Input that is no good gets its documented status, and the server goes on serving."""

import io
import math
import struct
import zlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from PIL import Image

from kestrel_client.v1 import vision_service_pb2 as wire
from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD3_SMALL
from tests.server.serving import details_of

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def declared_png(width_px: int, height_px: int) -> bytes:
    """A PNG header that promises a size, and next to no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animated() -> bytes:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (40, 30), "red"), "JPEG", exif=exif)


USABLE_IMAGES = {
    "one pixel": encoded(Image.new("RGB", (1, 1), "red")),
    "CMYK": encoded(Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "JPEG"),
    "palette": encoded(Image.new("RGB", (40, 30), "red").quantize(4)),
    "alpha": encoded(Image.new("RGBA", (40, 30), (255, 0, 0, 128))),
    "animated": animated(),
    "turned by EXIF": turned(),
    "grey, 16 bit": encoded(Image.new("I;16", (40, 30), 30000)),
    "very wide": encoded(Image.new("RGB", (10_000, 400), "red")),
    "very tall": encoded(Image.new("RGB", (400, 10_000), "red")),
}
BROKEN_IMAGES = {
    "empty": (b"", "INVALID_REQUEST"),
    "truncated": (IMAGE[: len(IMAGE) // 2], "IMAGE_DECODE_FAILED"),
    "not an image": (b"hello, world" * 100, "IMAGE_DECODE_FAILED"),
    "a format that is not supported": (b"%PDF-1.7\n%%EOF", "IMAGE_DECODE_FAILED"),
    "declared as 20,000 by 20,000": (declared_png(20_000, 20_000), "IMAGE_TOO_LARGE"),
    "more bytes than allowed": (b"\xff\xd8" + b"x" * (33 * 2**20), "IMAGE_TOO_LARGE"),
}


async def error_of(call: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """Status, reason and the fields complained of."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = status_pb2.Status()
    for key, value in caught.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status.ParseFromString(value)
    reason, fields = "", []
    for detail in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            fields = [violation.field for violation in bad.field_violations]
    return caught.value.code(), reason, fields


async def still_serves(live_server: LiveServer) -> bool:
    answer = await live_server.stub.CompleteQuery(
        wire.CompleteQueryRequest(question="hi", sampling={"max_tokens": 2})
    )
    return answer.result.info.usage.output_token_count > 0


@pytest.mark.parametrize("image", USABLE_IMAGES.values(), ids=USABLE_IMAGES.keys())
async def test_an_unusual_image_is_answered(live_server: LiveServer, image: bytes):
    request = wire.CompleteCaptionRequest(image={"data": image}, sampling={"max_tokens": 2})
    answer = await live_server.stub.CompleteCaption(request)
    assert answer.result.info.usage.image_token_count == 729


async def test_broken_images_are_refused_by_name(live_server: LiveServer):
    for name, (image, expected_reason) in BROKEN_IMAGES.items():
        code, reason, fields = await error_of(
            live_server.stub.Detect(wire.DetectRequest(object="cat", image={"data": image}))
        )
        assert (name, code, reason) == (name, grpc.StatusCode.INVALID_ARGUMENT, expected_reason)
        assert [field.split(".")[0] for field in fields] == ["image"]
    assert await still_serves(live_server)


async def test_a_prompt_longer_than_the_context_is_refused(live_server: LiveServer):
    request = wire.CompleteQueryRequest(question="word " * 5000)
    code, reason, fields = await error_of(live_server.stub.CompleteQuery(request))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert fields == ["question"]
    assert await still_serves(live_server)


async def test_a_conversation_longer_than_the_context_is_refused_with_the_tokens_of_its_messages(
    live_server: LiveServer,
):
    turns = [
        {"role": "CHAT_ROLE_USER", "parts": [{"image": {"data": IMAGE}}, {"text": "word " * 1000}]},
        {"role": "CHAT_ROLE_ASSISTANT", "parts": [{"text": " A bird."}]},
        {"role": "CHAT_ROLE_USER", "parts": [{"text": "word " * 1000}]},
    ]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live_server.stub.CompleteChat(wire.CompleteChatRequest(messages=turns))
    info: Any = details_of(caught.value)["ErrorInfo"]
    counts = [int(count) for count in info.metadata["messageTokenCounts"].split(",")]
    assert info.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert (sum(counts), len(counts)) == (int(info.metadata["promptTokenCount"]), 3)
    assert counts[0] > counts[2] > 1000 > counts[1]
    assert 725 < counts[0] - counts[2] < 733  # the image, and what begins and ends a prompt
    assert await still_serves(live_server)


async def test_a_conversation_is_answered_and_its_turns_find_each_other(live_server: LiveServer):
    question = {"role": "CHAT_ROLE_USER", "parts": [{"image": {"data": IMAGE}}, {"text": "What is it?"}]}
    sampling = {"temperature": 0.0, "max_tokens": 4}
    first = await live_server.stub.CompleteChat(wire.CompleteChatRequest(messages=[question], sampling=sampling))
    answer = {"role": "CHAT_ROLE_ASSISTANT", "parts": [{"text": first.result.answer}]}
    further = {"role": "CHAT_ROLE_USER", "parts": [{"text": "Why?"}]}
    request = wire.CompleteChatRequest(messages=[question, answer, further], sampling=sampling)
    second = await live_server.stub.CompleteChat(request)
    assert first.result.info.usage.image_token_count == second.result.info.usage.image_token_count == 729
    assert second.result.info.usage.input_token_count > first.result.info.usage.input_token_count
    assert second.result.info.usage.cached_token_count > 700


async def test_two_pictures_are_answered_and_the_broken_one_of_three_is_named(live_server: LiveServer):
    other = encoded(Image.new("RGB", (61, 45), "green"))

    def seen(*images: bytes) -> Any:
        parts: list[Any] = [{"image": {"data": image}} for image in images]
        turns = [{"role": "CHAT_ROLE_USER", "parts": [*parts[:1], {"text": "What is it?"}, *parts[1:]]}]
        return wire.CompleteChatRequest(messages=turns, sampling={"temperature": 0.0, "max_tokens": 3})

    answer = await live_server.stub.CompleteChat(seen(IMAGE, other))
    assert answer.result.info.usage.image_token_count == 2 * 729
    for broken in (b"no image", IMAGE[:-40]):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await live_server.stub.CompleteChat(seen(IMAGE, other, broken))
        details: Any = details_of(caught.value)["BadRequest"]
        assert [item.field for item in details.field_violations] == ["messages[0].parts[3].image"]
    assert await still_serves(live_server)


async def test_sixteen_huge_pictures_are_refused_with_both_numbers(live_server: LiveServer):
    huge = declared_png(8000, 8000)
    images: list[Any] = [{"image": {"data": huge + bytes([number])}} for number in range(16)]
    turns = [{"role": "CHAT_ROLE_USER", "parts": [*images, {"text": "What?"}]}]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live_server.stub.CompleteChat(wire.CompleteChatRequest(messages=turns))
    info: Any = details_of(caught.value)["ErrorInfo"]
    details: Any = details_of(caught.value)["BadRequest"]
    (violation,) = details.field_violations
    # A front end knows the sizes of images, an engine first of all the length of the prompt.
    assert info.reason in ("IMAGE_TOO_LARGE", "CONTEXT_LENGTH_EXCEEDED")
    assert violation.field in ("messages", "messages[0].parts[0].image")
    assert await still_serves(live_server)


async def test_a_conversation_is_answered_turn_by_turn_for_every_order_of_roles(live_server: LiveServer):
    for roles in ("UAU", "AU", "UU", "SAAU", "SSUAU"):
        kinds = {"U": "CHAT_ROLE_USER", "A": "CHAT_ROLE_ASSISTANT", "S": "CHAT_ROLE_SYSTEM"}
        turns = [{"role": kinds[role], "parts": [{"text": "word"}]} for role in roles]
        request = wire.CompleteChatRequest(messages=turns, sampling={"max_tokens": 2})
        assert (await live_server.stub.CompleteChat(request)).result.info.usage.output_token_count > 0


async def test_settings_that_are_no_numbers_or_out_of_range_are_all_named_at_once(live_server: LiveServer):
    request = wire.CompleteQueryRequest(
        question=" ",
        spatial_refs=[{"point": {"x": math.nan, "y": 2.0}}, {}],
        sampling={"temperature": math.nan, "top_p": math.inf, "max_tokens": 0, "seed": -1},
        options={"max_queue_duration": {"seconds": -1}},
    )
    code, reason, fields = await error_of(live_server.stub.CompleteQuery(request))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert {
        "question",
        "spatial_refs[0].point.x",
        "spatial_refs[0].point.y",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.seed",
        "options.max_queue_duration",
    } <= set(fields)
    assert await still_serves(live_server)


async def test_an_unknown_enum_value_and_an_unknown_model_are_refused(live_server: LiveServer):
    length = wire.CompleteCaptionRequest.FromString(
        wire.CompleteCaptionRequest(image={"data": IMAGE}).SerializeToString() + b"\x10\x63"
    )
    code, _, fields = await error_of(live_server.stub.CompleteCaption(length))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["length"])
    named = wire.PointRequest(object="cat", image={"data": IMAGE}, options={"model": "another"})
    code, reason, _ = await error_of(live_server.stub.Point(named))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    unknown = live_server.channel.unary_unary("/kestrel.v1.VisionService/Paint")
    code, _, _ = await error_of(unknown(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert await still_serves(live_server)


async def test_bytes_that_are_no_message_are_refused(live_server: LiveServer):
    raw = live_server.channel.unary_unary("/kestrel.v1.VisionService/Point")
    code, reason, _ = await error_of(raw(b"\xff\xff\xff\xff"))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert await still_serves(live_server)


async def test_a_message_of_a_hundred_megabytes_is_refused(live_server: LiveServer):
    huge = wire.CaptionRequest(image={"data": bytes(100 * 10**6)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in live_server.stub.Caption(huge):
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await still_serves(live_server)
