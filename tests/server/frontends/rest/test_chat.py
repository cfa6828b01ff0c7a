"""`/v1/chat` of the REST API: turns and images in, an answer out."""

import base64
from typing import Any

import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.requests import Chat, ChatMessage, Role
from tests.server.http_calls import IMAGE_URL, HttpServing

pytestmark = pytest.mark.asyncio(loop_scope="module")

URLS = [f"data:image/png;base64,{base64.b64encode(name).decode()}" for name in (b"1", b"2", b"3")]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What differs?", "image_urls": URLS[:2]},
    {"role": "assistant", "content": " Nothing."},
    {"role": "user", "content": "And here?", "image_urls": URLS[2:]},
]


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "What?", **fields}


async def test_a_conversation_reaches_the_engine_with_its_images(rig: HttpServing):
    body = {
        "messages": MESSAGES,
        "reasoning": True,
        "constraint": {"choices": ["yes", "no"]},
        "settings": {"max_tokens": 7},
    }
    answer = await rig.ask("/v1/chat", body)
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    assert request.messages == (
        ChatMessage(Role.SYSTEM, "Be brief."),
        ChatMessage(Role.USER, "What differs?", (b"1", b"2")),
        ChatMessage(Role.ASSISTANT, " Nothing."),
        ChatMessage(Role.USER, "And here?", (b"3",)),
    )
    assert (request.reasoning, request.constraint) == (True, Constraint(choices=("yes", "no")))
    assert request.sampling.max_tokens == 7
    assert (answer.status, answer.json["answer"], answer.json["reasoning"]["text"]) == (200, "a kestrel", "A bird.")


async def test_a_conversation_is_streamed(rig: HttpServing):
    answer = await rig.ask("/v1/chat", {"messages": MESSAGES, "stream": True})
    events = answer.events
    assert "".join(event.get("chunk", "") for event in events) == "a kestrel"
    assert (events[-1]["completed"], events[-1]["answer"]) == (True, "a kestrel")


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], ["messages"]),
        ([turn()] * 257, ["messages"]),
        ([turn(image_urls=URLS * 6)], ["messages[0].image_urls"]),
        ([turn(image_urls=URLS * 3), turn(image_urls=URLS * 3)], ["messages"]),
        ([turn(role="robot")], ["messages[0].role"]),
        ([turn(role="assistant")], ["messages[0].role"]),
        ([turn(content="")], ["messages[0].content"]),
        (
            [turn(role="system", image_urls=URLS[:1]), turn(image_urls=[URLS[0], "!", "data:,"])],
            ["messages[0].image_urls", "messages[1].image_urls[1]", "messages[1].image_urls[2]"],
        ),
        (
            [turn(image_urls=["https://a.example/1.png", URLS[0], "https://a.example/2.png"])],
            ["messages[0].image_urls[0]", "messages[0].image_urls[2]"],
        ),
    ],
)
async def test_every_violation_names_its_place(rig: HttpServing, messages: list[Any], fields: list[str]):
    answer = await rig.ask("/v1/chat", {"messages": messages})
    assert (answer.status, rig.engine.requests) == (400, [])
    assert sorted(item["field"] for item in answer.json["error"]["violations"]) == fields


async def test_a_conversation_is_no_form(rig: HttpServing):
    answer = await rig.ask("/v1/chat", {"messages": [turn()], "image_url": IMAGE_URL})
    assert [item["field"] for item in answer.json["error"]["violations"]] == ["image_url"]
