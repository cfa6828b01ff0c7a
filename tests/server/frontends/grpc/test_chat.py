"""Conversations over gRPC: turns and images in, an answer out, and every violation with its path."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import image_service_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc.message_shape import MAX_OTHER_BYTES, check_shape, shape_of
from kestrel_grpc.frontends.grpc.vision_service import chat
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import ImageError, InvalidRequest, KestrelError
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import MAX_CHAT_MESSAGES, Chat, ChatMessage, Request, RequestOptions, Role
from kestrel_runtime.api.sampling_params import SamplingParams
from tests.fakes import FakeEngine
from tests.over_sockets import BOTH_CHANNELS
from tests.server.frontends.grpc.test_image_service import bearing, write_tokens
from tests.server.serving import details_of, reason_of, serving

pytestmark = BOTH_CHANNELS

SYSTEM, USER, ASSISTANT = wire.CHAT_ROLE_SYSTEM, wire.CHAT_ROLE_USER, wire.CHAT_ROLE_ASSISTANT
ONE, TWO, THREE = b"one", b"two", b"three"
MIB = 2**20


def said(role: int, *parts: str | bytes | dict[str, Any]) -> dict[str, Any]:
    """A message of texts and images; a dictionary is an image in another form than a file."""
    given = [
        {"text": part} if isinstance(part, str) else {"image": {"data": part} if isinstance(part, bytes) else part}
        for part in parts
    ]
    return {"role": role, "parts": given}


TURNS = [
    said(SYSTEM, "Be brief."),
    said(USER, ONE, "What is it?", TWO),
    said(ASSISTANT, " A bird."),
    said(USER, "And", {"data": THREE}, "this?"),
]
MESSAGES = (
    ChatMessage(Role.SYSTEM, "Be brief."),
    ChatMessage(Role.USER, "What is it?", (ONE, TWO)),
    ChatMessage(Role.ASSISTANT, " A bird."),
    ChatMessage(Role.USER, "And\nthis?", (THREE,)),
)


def violations(*turns: Any, **fields: Any) -> list[str]:
    """The fields that are wrong with a conversation."""
    with pytest.raises(InvalidRequest) as caught:
        chat(wire.ChatRequest(messages=turns, **fields))
    return [violation.field for violation in caught.value.violations]


async def test_a_conversation_streams_what_it_answers_in_one_response():
    async with serving() as rig:
        events = [event async for event in rig.vision.Chat(wire.ChatRequest(messages=TURNS, reasoning=True))]
        whole = await rig.vision.CompleteChat(wire.CompleteChatRequest(messages=TURNS, reasoning=True))
    assert rig.engine.requests == [Chat(MESSAGES, reasoning=True)] * 2
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1], {*kinds[1:-1]}) == ("started", "completed", {"delta"})
    completed = events[-1].completed
    assert "".join(event.delta.text for event in events[1:-1]) == completed.reasoning.text + completed.answer
    assert (completed.answer, completed.reasoning.text) == ("a kestrel", "A bird.")
    assert (whole.result.answer, whole.result.reasoning) == (completed.answer, completed.reasoning)
    assert (whole.result.info.usage.input_token_count, whole.result.info.usage.image_token_count) == (735, 729)


@pytest.mark.parametrize("kind", [wire.ChatRequest, wire.CompleteChatRequest])
def test_every_field_reaches_the_engine(kind: Any):
    message = kind(
        messages=TURNS,
        reasoning=True,
        sampling={"temperature": 0.5, "max_tokens": 7, "seed": 3},
        options={"model": "m", "adapter": "a"},
        constraint={"choices": {"values": ["yes", "no"]}},
    )
    assert chat(message) == Chat(
        MESSAGES,
        True,
        SamplingParams(temperature=0.5, max_tokens=7, seed=3),
        RequestOptions("m", adapter="a"),
        Constraint(choices=("yes", "no")),
    )


def test_pixels_are_an_image_of_a_conversation():
    raw = {"raw": {"pixels": bytes(12), "width_px": 2, "height_px": 2, "format": "PIXEL_FORMAT_RGB8"}}
    request = chat(wire.ChatRequest(messages=[said(USER, raw, "What?")]))
    assert request.images == (RawImage.packed(bytes(12), 2, 2, PixelFormat.RGB8),)


async def test_samples_are_alternatives():
    async with serving() as rig:
        request = wire.CompleteChatRequest(messages=TURNS, sampling={"n": 3, "temperature": 1.0})
        answer = await rig.vision.CompleteChat(request)
    assert [item.answer for item in answer.alternatives] == ["a kestrel"] * 2


def test_all_violations_are_reported_with_the_paths_of_the_message():
    raw = {"raw": {"pixels": b"", "width_px": 0, "height_px": 1, "format": "PIXEL_FORMAT_RGB8"}}
    wrong_format = {"raw": {"pixels": b"", "width_px": 0, "height_px": 1}}
    turns = [
        said(USER, "What is it?", b""),
        {"role": 0, "parts": [{"text": "a"}, {}]},
        said(SYSTEM, "late"),
        said(ASSISTANT, "b", ONE),
        said(USER, " ", raw, {"image_id": "sha256:?"}, wrong_format),
    ]
    found = violations(*turns, sampling={"top_p": 2.0, "n": 2}, options={"priority": 77})
    assert found == [
        "sampling.n",
        "messages[1].role",
        "messages[1].parts[1]",
        "messages[4].parts[2].image.image_id",
        "messages[4].parts[3].image.raw.format",
        "messages[4].parts[3].image.raw.width_px",
        "options.priority",
        "messages[2].role",
        "messages[4].parts",
        "messages[0].parts[1].image",
        "messages[3].parts[1].image",
        "messages[4].parts[1].image.raw.width_px",
        "sampling.top_p",
    ]


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([], ["messages"]),
        ([said(USER, "a")] * (MAX_CHAT_MESSAGES + 1), ["messages"]),
        ([said(USER, "a"), said(ASSISTANT, "b")] * 500, ["messages"]),
        ([said(USER, *["a"] * 1025)], ["messages"]),
        ([said(USER, *[ONE] * 17, "a")], ["messages"]),
        ([said(USER, "a"), said(ASSISTANT, "b")], ["messages[1].role"]),
        ([said(USER)], ["messages[0].parts"]),
        ([said(USER, "a" * 65_537)], ["messages"]),
    ],
    ids=["none", "257 messages", "1,000 turns", "1,025 parts", "17 images", "no question", "nothing", "long"],
)
def test_conversations_beyond_the_limits_are_refused(turns: list[Any], found: list[str]):
    assert violations(*turns) == found


def test_roles_need_not_alternate():
    turns = [said(ASSISTANT, "a"), said(ASSISTANT), said(USER, ONE), said(USER, TWO, "b")]
    found = chat(wire.ChatRequest(messages=turns))
    assert [(message.role, message.text, message.images) for message in found.messages] == [
        (Role.ASSISTANT, "a", ()),
        (Role.ASSISTANT, "", ()),
        (Role.USER, "", (ONE,)),
        (Role.USER, "b", (TWO,)),
    ]


class Refusing(FakeEngine):
    """An engine that refuses every conversation with an error of its own."""

    def __init__(self, error: KestrelError) -> None:
        super().__init__()
        self._error = error

    def _refusal(self, request: Request, num_samples: int) -> KestrelError | None:
        return self._error


async def test_errors_of_the_engine_name_the_part_of_the_message():
    error = ImageError("cannot be decoded", field="messages[1].images[1]")
    async with serving(Refusing(error)) as rig:
        for call in (
            rig.vision.CompleteChat(wire.CompleteChatRequest(messages=TURNS)),
            rig.vision.Chat(wire.ChatRequest(messages=TURNS)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            details: Any = details_of(caught.value)["BadRequest"]
            assert [item.field for item in details.field_violations] == ["messages[1].parts[2].image"]
            assert reason_of(caught.value) == "IMAGE_DECODE_FAILED"


async def test_stored_images_are_those_of_the_caller_alone():
    async with serving() as rig:
        stored = [
            (await rig.images.PutImage(image_service_pb2.PutImageRequest(data=data))).image.image_id
            for data in (ONE, TWO)
        ]
        turns = [said(USER, {"image_id": stored[0]}, "a"), said(USER, {"image_id": stored[1]}, THREE, "b")]
        await rig.vision.CompleteChat(wire.CompleteChatRequest(messages=turns))
        assert [request.images for request in rig.engine.requests] == [(ONE, TWO, THREE)]
        missing = "sha256:" + "a" * 64
        turns = [said(USER, {"image_id": stored[0]}, {"image_id": missing}, "a")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteChat(wire.CompleteChatRequest(messages=turns))
        resource: Any = details_of(caught.value)["ResourceInfo"]
        assert (reason_of(caught.value), resource.resource_name) == ("IMAGE_NOT_FOUND", missing)


async def test_addresses_that_are_not_fetched_are_all_named():
    async with serving() as rig:
        turns = [said(USER, {"uri": "https://a.example/1.png"}, ONE, {"uri": "https://a.example/2.png"}, "a")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteChat(wire.CompleteChatRequest(messages=turns))
        details: Any = details_of(caught.value)["BadRequest"]
        assert [item.field for item in details.field_violations] == [
            "messages[0].parts[0].image.uri",
            "messages[0].parts[2].image.uri",
        ]
        assert reason_of(caught.value) == "IMAGE_URI_NOT_ALLOWED"


def test_a_message_may_be_large_by_its_images_alone():
    shape = shape_of(wire.ChatRequest.DESCRIPTOR)
    large = wire.ChatRequest(messages=[said(USER, *[b"x" * MIB] * 16, "a")]).SerializeToString()
    check_shape(large, shape, MIB)
    for turn in (said(USER, *[b"x" * MIB] * 18, "a"), said(USER, ONE, "a" * (MAX_OTHER_BYTES + 1))):
        with pytest.raises(InvalidRequest, match="apart from its 16 largest images"):
            check_shape(wire.ChatRequest(messages=[turn]).SerializeToString(), shape, MIB)


def test_the_longest_conversation_has_no_more_fields_than_a_message_may_have():
    turns = [said(USER, *["a"] * 4) for _ in range(MAX_CHAT_MESSAGES - 16)]
    turns += [said(USER, b"x" * MIB, *["a"] * 3) for _ in range(16)]
    message = wire.ChatRequest(messages=turns).SerializeToString()
    check_shape(message, shape_of(wire.ChatRequest.DESCRIPTOR), MIB)
    assert len(chat(wire.ChatRequest.FromString(message)).images) == 16
    with pytest.raises(InvalidRequest, match="fields"):
        check_shape(message + b"\x0a\x00" * 4000, shape_of(wire.ChatRequest.DESCRIPTOR), MIB)


async def test_image_ids_of_another_tenant_are_not_found(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    write_tokens(tokens, "alice", "bob")
    async with serving(tokens=str(tokens)) as rig:
        put = image_service_pb2.PutImageRequest(data=ONE)
        image_id = (await rig.images.PutImage(put, metadata=bearing("alice"))).image.image_id
        request = wire.CompleteChatRequest(messages=[said(USER, TWO, {"image_id": image_id}, "a")])
        assert (await rig.vision.CompleteChat(request, metadata=bearing("alice"))).result.answer
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteChat(request, metadata=bearing("bob"))
        assert reason_of(caught.value) == "IMAGE_NOT_FOUND"
        assert rig.engine.tenants == ["alice"]
