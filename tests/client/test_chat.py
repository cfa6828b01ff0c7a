"""Conversations by both clients: what they send, what they return, and where a balancer takes them."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from google.rpc import code_pb2

from kestrel_client import AsyncClient, ChatMessage, Client, InvalidRequest, Job, Overloaded, RawImage, TextChannel
from kestrel_client.v1 import media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from tests.client.canned import CannedVision, error_info, status

SMALL, OTHER = bytes(range(100)), bytes(range(50))
LARGE, LARGER = b"kestrel" * 1000, b"falcon" * 2000
ROUTE, DIGEST, STORED = "x-kestrel-route", "x-image-sha256", "x-image-stored"


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, store_from_bytes=len(LARGE)) as client:
        yield client


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, store_from_bytes=len(LARGE)) as client:
        yield client


def turns(*images: Any) -> list[ChatMessage]:
    return [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "What is it?", images[:1]),
        ChatMessage("assistant", " A bird."),
        ChatMessage("user", "And these?", images[1:]),
    ]


def key(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sent_images(request: Any) -> list[tuple[str | None, bytes]]:
    """The form and the content of each image of a request."""
    found = [part.image for message in request.messages for part in message.parts if part.HasField("image")]
    return [(image.WhichOneof("source"), image.data) for image in found]


def keys(vision: CannedVision) -> list[tuple[Any, Any, Any]]:
    return [(each.get(ROUTE), each.get(DIGEST), each.get(STORED)) for each in vision.metadata]


def test_a_conversation_is_streamed_and_completed(client: Client, vision: CannedVision):
    stream = client.chat(turns(SMALL, OTHER, "https://example.com/a.png"), reasoning=True, max_tokens=7)
    deltas = list(stream.deltas())
    whole = client.complete_chat(turns(SMALL, OTHER, "https://example.com/a.png"), reasoning=True, max_tokens=7)
    streamed, completed = vision.requests
    assert isinstance(streamed, wire.ChatRequest)
    assert isinstance(completed, wire.CompleteChatRequest)
    assert streamed.SerializeToString(deterministic=True) == completed.SerializeToString(deterministic=True)
    assert [wire.ChatRole.Name(message.role)[10:] for message in streamed.messages] == [
        "SYSTEM",
        "USER",
        "ASSISTANT",
        "USER",
    ]
    assert [[part.text for part in message.parts if part.HasField("text")] for message in streamed.messages] == [
        ["Be brief."],
        ["What is it?"],
        [" A bird."],
        ["And these?"],
    ]
    assert sent_images(streamed) == [("data", SMALL), ("data", OTHER), ("uri", b"")]
    assert (streamed.reasoning, streamed.sampling.max_tokens) == (True, 7)
    answer = "".join(delta.text for delta in deltas if delta.channel is TextChannel.ANSWER)
    assert stream.result().answer == whole.answer == answer
    assert whole.reasoning is not None
    assert keys(vision) == [(key(SMALL), None, None)] * 2


async def test_the_awaiting_client_does_the_same(async_client: AsyncClient, vision: CannedVision):
    stream = async_client.chat(turns(SMALL, OTHER))
    assert "".join([piece async for piece in stream]) == (await async_client.complete_chat(turns(SMALL))).answer
    assert [sent_images(request) for request in vision.requests] == [
        [("data", SMALL), ("data", OTHER)],
        [("data", SMALL)],
    ]
    assert keys(vision) == [(key(SMALL), None, None)] * 2


def test_turns_of_a_conversation_go_where_its_first_image_is(client: Client, vision: CannedVision):
    client.complete_chat([ChatMessage("user", "hi")])
    client.complete_chat([ChatMessage("user", "hi", ["https://example.com/a.png", SMALL])])
    client.complete_chat([ChatMessage("user", "hi", [RawImage(bytes(24), 3, 2, "rgba8"), SMALL])])
    assert keys(vision) == [(None, None, None), (None, None, None), (key(bytes(24)), None, None)]


def test_large_images_are_stored_with_the_conversation_and_named(client: Client, vision: CannedVision):
    for _ in range(3):
        client.complete_chat(turns(SMALL, LARGE, LARGER))
    forms = [[form for form, _ in sent_images(request)] for request in vision.requests]
    assert forms == [["data"] * 3, ["data", "image_id", "image_id"], ["data", "image_id", "image_id"]]
    assert keys(vision) == [(key(SMALL), None, None), (key(SMALL), None, "1"), (key(SMALL), None, "1")]
    assert [each.get(ROUTE) for each in vision.images.metadata] == [key(SMALL)] * 2
    vision.images.stored.clear()
    vision.requests.clear()
    client.complete_chat(turns(SMALL, LARGE, LARGER))  # both are stored again
    assert [[form for form, _ in sent_images(request)] for request in vision.requests] == [
        ["data", "image_id", "image_id"]
    ] * 2
    assert len(vision.images.stored) == 2


def test_a_stored_image_is_named_by_what_was_returned(client: Client, vision: CannedVision):
    image = client.upload_image(SMALL)
    client.complete_chat([ChatMessage("user", "hi", [image, image.image_id])])
    (request,) = vision.requests
    assert [part.image for part in request.messages[0].parts[:2]] == [media_pb2.Image(image_id=image.image_id)] * 2
    assert keys(vision) == [(key(SMALL), None, "1")]


def test_a_refused_conversation_is_sent_again_whole(client: Client, vision: CannedVision):
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import RetryInfo

    delay = RetryInfo(retry_delay=Duration(nanos=1_000_000))
    refused = status(code_pb2.RESOURCE_EXHAUSTED, "full", error_info("QUEUE_FULL"), delay)
    vision.failures = [refused]
    client.complete_chat(turns(SMALL, OTHER))
    assert [sent_images(request) for request in vision.requests] == [[("data", SMALL), ("data", OTHER)]] * 2
    vision.failures = [refused]
    with pytest.raises(Overloaded):
        client.complete_chat(turns(SMALL, OTHER), max_retry_s=0)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (["hi"], "messages"),
        ([ChatMessage("robot", "hi")], "messages[0].role"),  # pyrefly: ignore[bad-argument-type] what a user may pass
        ([ChatMessage("user", 3)], "messages[0].text"),  # pyrefly: ignore[bad-argument-type]
        ([ChatMessage("user", "hi", SMALL)], "messages[0].images"),  # pyrefly: ignore[bad-argument-type]
        ([ChatMessage("user", "hi", [SMALL, 3])], "messages[0].images[1]"),  # pyrefly: ignore[bad-argument-type]
    ],
)
def test_arguments_of_a_wrong_type_are_named(client: Client, messages: Any, field: str):
    with pytest.raises(InvalidRequest) as caught:
        client.complete_chat(messages)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_job_may_be_a_conversation(client: Client, vision: CannedVision):
    jobs = [Job("chat", None, turns(SMALL)), Job("chat", None, turns(OTHER), is_streamed=True, max_tokens=3)]
    outcomes = list(client.map(jobs))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert {request.sampling.max_tokens for request in vision.requests} == {0, 3}
    with pytest.raises(ValueError, match="in its messages"):
        Job("chat", SMALL, turns(OTHER))


@pytest.mark.parametrize(
    "messages",
    [ChatMessage("user", "q"), None, "q", b"q", iter([])],
    ids=["one", "None", "text", "bytes", "iterator"],
)
def test_messages_that_are_no_list_are_refused_before_they_are_sent(
    messages: Any, client: Client, vision: CannedVision
):
    for call in (client.chat, client.complete_chat):
        with pytest.raises(InvalidRequest, match="messages: are messages in a list"):
            call(messages)
    assert vision.metadata == []
