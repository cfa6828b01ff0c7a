"""Skills by the name of a model, or by the field `skill`."""

import json
from typing import Any

import pytest

from kestrel_runtime.api.requests import Caption, Detect, Gaze, Point, PointRef, Query, Request, Segment
from tests.over_sockets import BOTH_CHANNELS
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}


def chat(text: str, model: str = "fake", **fields: Any) -> dict[str, Any]:
    content = [PICTURE, *([{"type": "text", "text": text}] if text else [])]
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def response(text: str, model: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": IMAGE_URL}, {"type": "input_text", "text": text}]
    return {"model": model, "input": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    ("skill", "text", "kind", "facts"),
    [
        ("detect", " bird ", Detect, {"object": "bird"}),
        ("point", "bird", Point, {"object": "bird"}),
        ("segment", "bird", Segment, {"object": "bird"}),
        ("caption", "Short", Caption, {"length": "short"}),
        ("caption", "describe it", Caption, {"length": "normal"}),
        ("caption", "", Caption, {"length": "normal"}),
        ("gaze", "0.25, .5", Gaze, {"eye": PointRef(0.25, 0.5)}),
        ("gaze", "[1,0]", Gaze, {"eye": PointRef(1.0, 0.0)}),
        ("query", "bird?", Query, {"question": "bird?"}),
    ],
)
async def test_a_skill_is_asked_with_the_text_and_answers_as_the_rest_api_does(
    rig: HttpServing, skill: str, text: str, kind: type[Request], facts: dict[str, Any], is_named: bool
):
    body = chat(text, f"fake:{skill}") if is_named else chat(text, skill=skill)
    answer = await rig.ask(CHAT, {**body, "temperature": 0.5})
    request = rig.engine.requests[0]
    assert type(request) is kind
    assert (request.images, request.sampling.temperature) == ((IMAGE_BYTES,), 0.5)
    assert {name: getattr(request, name) for name in facts} == facts
    content = answer.json["choices"][0]["message"]["content"]
    if skill == "query":
        assert content == "a kestrel"
        return
    asked = {"image_url": IMAGE_URL, "object": "bird", "length": facts.get("length"), "eye": [0.25, 0.5]}
    fields = {"caption": ("length",), "gaze": ("eye",)}.get(skill, ("object",))
    rest = (await rig.ask(f"/v1/{skill}", {name: asked[name] for name in ("image_url", *fields)})).json
    assert json.loads(content) == {name: rest[name] for name in json.loads(content)}
    *chunks, done = (await rig.ask(CHAT, {**body, "stream": True})).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert (done, deltas[0]) == ("[DONE]", {"role": "assistant", "content": ""})
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_may_be_one_of_a_skill(rig: HttpServing, is_streamed: bool):
    answer = await rig.ask(RESPONSES, response("bird", "fake/colours:detect", stream=is_streamed))
    (request,) = rig.engine.requests
    assert isinstance(request, Detect)
    assert (request.object, request.options.adapter) == ("bird", "colours")
    data = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    found = data[-1]["response"] if is_streamed else answer.json
    (item,) = found["output"]
    assert json.loads(item["content"][0]["text"])["objects"]


async def test_a_served_name_goes_before_a_skill_and_aliases_are_not_listed():
    async with serving_http(served_model_name=("fake:detect", "gpt")) as rig:
        listed = [model["id"] for model in (await rig.ask("/v1/models")).json["data"]]
        answer = await rig.ask(CHAT, chat("bird", "fake:detect"))
        assert (await rig.ask(CHAT, chat("bird", "gpt:point"))).status == 200
        assert (await rig.ask(CHAT, chat("bird", "fake:detect:detect"))).status == 200
        assert (await rig.ask("/v1/models/gpt:point")).status == 200
        assert (await rig.ask("/v1/models/gull:point")).status == 404
        kinds = [type(request) for request in rig.engine.requests]
    assert answer.json["choices"][0]["message"]["content"] == "a kestrel"
    assert kinds == [Query, Point, Detect]
    assert [name for name in listed if ":" in name] == ["fake:detect"]


@pytest.mark.parametrize(
    "name",
    [
        "moondream3.1-9B-A2B",
        "moondream/moondream3-preview",
        "moondream3.1-9B-A2B/shapes@200",
        "moondream3-preview/colours@7",
    ],
)
async def test_published_names_stand_for_a_served_model_of_their_generation(rig: HttpServing, name: str):
    assert (await rig.ask(CHAT, chat("?", name))).status == 200
    assert (await rig.ask("/v1/query", {"question": "?", "model": name})).status == 200
    assert {request.options.adapter for request in rig.engine.requests} == {
        name.rpartition("/")[2] if "@" in name else ""
    }
    assert (await rig.ask(CHAT, chat("?", "moondream2"))).status == 404


@pytest.mark.parametrize(
    ("body", "param", "described"),
    [
        (chat("bird", "fake:detect", skill="point"), "skill", "must be detect, as the name of the model says"),
        (chat("bird", skill="fly"), "skill", "must be one of query, caption"),
        (chat("", skill="detect"), "messages[0].content", "must not be empty"),
        (chat("here", skill="gaze"), "messages", "must end with the place of an eye"),
        (chat("2, 0", skill="gaze"), "messages[0].content", "must be from 0 to 1"),
        (
            {"model": "fake:point", "messages": [{"role": "user", "content": "x"}]},
            "messages",
            "must have one image",
        ),
        (chat("bird", skill="detect", reasoning=True), "reasoning", "is not supported with the skill detect"),
        (chat("bird", skill="detect", constraint={"regex": "a"}), "constraint", "is not supported with the skill"),
        (chat("bird", skill="detect", stop="x"), "stop", ""),
    ],
)
async def test_what_a_skill_cannot_do_is_refused(rig: HttpServing, body: Any, param: str, described: str):
    answer = await rig.ask(CHAT, body)
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert described in answer.json["error"]["message"]


async def test_a_skill_of_no_model_and_a_completion_of_a_skill_are_not_found(rig: HttpServing):
    assert (await rig.ask(CHAT, chat("bird", "gull:detect"))).status == 404
    assert (await rig.ask(CHAT, chat("bird", "fake:fly"))).status == 404
    assert (await rig.ask("/v1/completions", {"model": "fake:detect", "prompt": "?"})).status == 404
