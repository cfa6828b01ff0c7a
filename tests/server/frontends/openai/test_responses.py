"""`/v1/responses`: what reaches the engine, the objects and events of answers, and what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import Overloaded
from kestrel_runtime.api.events import FinishReason
from kestrel_runtime.api.requests import Chat, Query, Role
from tests.fakes import FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.frontends.openai.test_tools import SHAPE, saying
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

PATH = "/v1/responses"
FIND = {"type": "function", "name": "find", "parameters": SHAPE, "strict": True}
COUNT = {"type": "function", "name": "count"}
PICTURE = {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"}


def body(given: Any = "What is it?", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": given, **fields}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def test_a_text_is_answered(rig: HttpServing):
    answer = await rig.ask(PATH, body(store=True, metadata={"run": "7"}), headers={"X-Request-Id": "mine"})
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    assert (query.question, query.image) == ("What is it?", None)
    found = answer.json
    assert (answer.status, found["id"], found["object"], found["model"]) == (200, "resp_mine", "response", "fake")
    assert (found["status"], found["store"], found["metadata"]) == ("completed", False, {"run": "7"})
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "a kestrel", "annotations": [], "logprobs": []}]
    assert found["usage"] == {
        "input_tokens": 735,
        "input_tokens_details": {"cached_tokens": 0, "image_tokens": 729, "text_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 738,
    }


async def test_images_reach_the_engine_in_their_messages(rig: HttpServing):
    text = {"type": "input_text", "text": "Look."}
    items = [
        {"role": "user", "content": [PICTURE, text, PICTURE]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"role": "user", "content": [text, PICTURE]},
    ]
    assert (await rig.ask(PATH, body(items, instructions="Be brief."))).status == 200
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    assert [len(message.images) for message in request.messages] == [0, 2, 0, 1]
    bad = {"type": "input_image", "image_url": "https://a.example/1.png"}
    answer = await rig.ask(
        PATH, body([{"role": "user", "content": [PICTURE, bad, text]}], instructions="Be brief.")
    )
    assert (answer.status, answer.json["error"]["param"]) == (400, "input[0].content[1].image_url")


async def test_items_reach_the_engine_as_a_conversation(rig: HttpServing):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}, PICTURE]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "find", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "one"}]},
    ]
    fields = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "reasoning": {"enabled": True},
    }
    answer = await rig.ask(PATH, body(items, **fields))
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    assert [(message.role, message.text) for message in request.messages] == [
        (Role.SYSTEM, "Be brief."),
        (Role.SYSTEM, "Be kind."),
        (Role.USER, "Look."),
        (Role.ASSISTANT, "Well."),
        (Role.ASSISTANT, '{"name": "find", "arguments": {"n": 1}}'),
        (Role.USER, "Result of find: one"),
    ]
    assert [len(message.images) for message in request.messages] == [0, 0, 1, 0, 0, 0]
    assert (request.images, request.reasoning) == ((IMAGE_BYTES,), True)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
    kinds = [item["type"] for item in answer.json["output"]]
    assert kinds == ["reasoning", "message"]
    assert answer.json["output"][0]["content"] == [{"type": "reasoning_text", "text": "A bird."}]
    assert (answer.json["instructions"], answer.json["max_output_tokens"]) == ("Be brief.", 7)


async def test_the_items_of_an_answer_are_taken_back_as_they_are(rig: HttpServing):
    look, more = ({"role": "user", "content": text} for text in ("Look.", "And?"))
    reasoning, message = (await rig.ask(PATH, body([look], reasoning={"enabled": True}))).json["output"]
    assert (await rig.ask(PATH, body([look, reasoning, message, more]))).status == 200
    *_, request = rig.engine.requests
    assert isinstance(request, Chat)
    assert [turn.text for turn in request.messages] == ["Look.", message["content"][0]["text"], "And?"]


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint(json_schema='{"type": "object"}')),
        (
            {"type": "json_schema", "name": "n", "strict": True, "schema": {"enum": [1]}},
            Constraint(json_schema='{"enum": [1]}'),
        ),
    ],
)
async def test_a_format_is_a_constraint(rig: HttpServing, given: Any, constraint: Constraint | None):
    answer = await rig.ask(PATH, body(text={"format": given, "verbosity": "low"}))
    (request,) = rig.engine.requests
    assert isinstance(request, Query)
    assert request.constraint == constraint
    assert answer.json["text"]["format"] == given


def events_of(answer: Any) -> list[Any]:
    """The events of a stream, each of which has a name."""
    return [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]


def rebuilt(events: Sequence[Any]) -> list[Any]:
    """The items that a client puts together from the events of a stream, which it checks."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        else:
            assert kind == "output_item.done"
            assert {**event["item"], "status": None} == {**item, "status": None}
            items[event["output_index"]] = event["item"]
    assert items == events[-1]["response"]["output"]
    return items


@pytest.mark.parametrize("reasons", [False, True])
async def test_a_response_is_streamed(rig: HttpServing, reasons: bool):
    answer = await rig.ask(PATH, body(stream=True, reasoning={"enabled": reasons, "effort": "low"}))
    events = events_of(answer)
    names = [line.removeprefix(b"event: ") for line in answer.body.split(b"\n") if line.startswith(b"event: ")]
    assert [name.decode() for name in names] == [event["type"] for event in events]
    *thought, message = rebuilt(events)
    assert message["content"][0]["text"] == "a kestrel"
    assert [item["content"][0]["text"] for item in thought] == (["A bird."] if reasons else [])
    last = events[-1]
    assert (last["type"], last["response"]["status"], last["response"]["store"]) == (
        "response.completed",
        "completed",
        False,
    )
    assert last["response"]["usage"]["total_tokens"] == 738


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("tools", "pieces"),
    [([FIND], ['{"n"', ": 1}"]), ([COUNT, FIND], ['{"name": "find", "argum', 'ents": {"n": 1', "}}"])],
)
async def test_a_forced_call_is_an_item(tools: Any, pieces: Any, is_streamed: bool):
    async with serving_http(FakeEngine(saying(*pieces))) as rig:
        answer = await rig.ask(PATH, body(tools=tools, tool_choice="required", stream=is_streamed))
        (request,) = rig.engine.requests
    assert isinstance(request, Query)
    assert request.constraint is not None
    (item,) = rebuilt(events_of(answer)) if is_streamed else answer.json["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "find", '{"n": 1}')
    assert (item["status"], item["call_id"][:5]) == ("completed", "call_")


async def test_a_failure_inside_of_a_stream_is_an_event_that_clients_know():
    def breaks(request: Any) -> list[object]:
        return [*answers(request)[:2], Overloaded(3, 0.25)]

    async with serving_http(FakeEngine(breaks)) as rig:
        answer = await rig.ask(PATH, body(stream=True))
    events = events_of(answer)
    assert answer.status == 200
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error = events[-1].pop("error")
    assert b"\nevent: error\n" in answer.body
    # OpenAI documents the fields of the event itself; its clients raise an error of the object.
    assert events[-1] == {
        "type": "error",
        "sequence_number": len(events) - 1,
        "code": "queue_full",
        "message": error["message"],
        "param": None,
    }
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


async def test_a_named_function_is_forced_and_an_optional_one_is_not(rig: HttpServing):
    for choice in ({"type": "function", "name": "find"}, "auto"):
        assert (await rig.ask(PATH, body(tools=[FIND, COUNT], tool_choice=choice))).status == 200
    forced, free = rig.engine.requests
    assert isinstance(forced, Query)
    assert isinstance(free, Query)
    assert forced.constraint is not None
    assert json.loads(forced.constraint.json_schema or "") == SHAPE
    assert free.constraint is None


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("tools", [[], [COUNT, FIND]])
async def test_an_answer_that_is_cut_off_is_incomplete(tools: Any, is_streamed: bool):
    fields = {"tools": tools, "tool_choice": "required"} if tools else {}
    async with serving_http(FakeEngine(saying('{"na', reason=FinishReason.LENGTH))) as rig:
        answer = await rig.ask(PATH, body(stream=is_streamed, **fields))
    response = events_of(answer)[-1]["response"] if is_streamed else answer.json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ([] if tools else ["incomplete"])


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"top_logprobs": 3},
        {"n": 2},
    ],
)
async def test_what_needs_a_memory_is_refused_by_its_name(rig: HttpServing, fields: dict[str, Any]):
    answer = await rig.ask(PATH, body(**fields))
    assert rig.engine.requests == []
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, *fields, "unsupported_parameter")


@pytest.mark.parametrize(
    ("sent", "param", "described"),
    [
        ({"model": "fake"}, "input", "is required"),
        (body([]), "input", "must not be empty"),
        (body(" "), "input", "must not be empty"),
        (body([{"role": "user", "content": " "}]), "input[0].content", "must not be empty"),
        (
            body([{"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}]),
            "input[0].content[0].type",
            "of reasonings only",
        ),
        (body([{"role": "user"}]), "input[0].content", "is required"),
        (body([{"content": "x"}]), "input[0].role", "is required"),
        (body([{"type": "item_reference", "id": "x"}]), "input[0].type", "must be one of"),
        (body([{"type": "function_call", "call_id": "c", "name": "f"}]), "input[0].arguments", "is required"),
        (
            body([{"type": "function_call_output", "call_id": "c", "output": "x"}]),
            "input[0].call_id",
            "is not the id of an earlier call",
        ),
        (body(asked({"type": "input_image", "file_id": "f"})), "input[0].content[0].file_id", "is not supported"),
        (body(asked({"type": "input_file"})), "input[0].content[0].type", "must be one of"),
        (body(asked({"type": "input_text"})), "input[0].content[0].text", "is required"),
        (body(asked({"type": "input_image"})), "input[0].content[0].image_url", "is required"),
        (body(asked(*[PICTURE] * 17)), "input[0].content[16]", "at most 16 images"),
        (
            body([{"role": "assistant", "content": [PICTURE]}, *asked({"type": "input_text", "text": "x"})]),
            "input[0].content[0]",
            "of the user only",
        ),
        (
            body([*asked({"type": "input_text", "text": "x"}), {"role": "system", "content": "y"}]),
            "input[1].role",
            "",
        ),
        (body([{"role": "user", "content": "x"}, {"role": "user", "content": ""}]), "input[1].content", "empty"),
        (body(instructions="x", max_output_tokens=0), "max_output_tokens", "must be from 1"),
        (body(text={"format": {"type": "json_schema", "name": "n"}}), "text.format.schema", "is required"),
        (body(text={"format": {"type": "json_schema", "schema": {"if": {}}}}), "text.format.schema", "/if"),
        (body(tools=[{"type": "web_search"}]), "tools[0].name", "is required"),
        (
            body(tools=[FIND], tool_choice={"type": "function", "name": "fnd"}),
            "tool_choice.name",
            "did you mean find",
        ),
        (body(tool_choice="required"), "tool_choice", "needs tools"),
        *(
            (body(metadata=given), "metadata", described)
            for given, described in (
                ("x", "must be an object"),
                ({str(number): "" for number in range(17)}, "at most 16 texts"),
                ({"a": 1}, "at most 16 texts"),
                ({"a": "x" * 513}, "at most 512 characters"),
                ({"a": "x" * 70_000}, "at most 512 characters"),
                ({"a" * 65: ""}, "names of at most 64"),
            )
        ),
        (body(max_tokns=1), "max_tokns", "did you mean max_tokens"),
    ],
)
async def test_mistakes_name_their_place(rig: HttpServing, sent: Any, param: str, described: str):
    answer = await rig.ask(PATH, sent)
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert described in answer.json["error"]["message"]


async def test_all_mistakes_are_named_at_once(rig: HttpServing):
    sent = body([{"role": "user"}, *asked({"type": "input_image", "file_id": "f"})], background=True, top_p=7)
    message = (await rig.ask(PATH, sent)).json["error"]["message"]
    for place in ("input[0].content", "input[1].content[0].file_id", "background", "top_p"):
        assert place in message


async def test_a_picture_by_address_is_refused_where_none_is_fetched(rig: HttpServing):
    picture = {"type": "input_image", "image_url": "https://example.com/a.png"}
    answer = await rig.ask(PATH, body(asked({"type": "input_text", "text": "?"}, picture)))
    assert (answer.status, answer.json["error"]["param"]) == (400, "input[0].content[1].image_url")
