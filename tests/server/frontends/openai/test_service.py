"""OpenAI's routes over HTTP: shapes of requests, answers, chunks and errors."""

import base64
import json
from typing import Any

import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InternalError, InvalidRequest, Overloaded, Violation
from kestrel_runtime.api.events import (
    Finished,
    FinishReason,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from kestrel_runtime.api.requests import Chat, ChatMessage, Query, Role
from kestrel_runtime.api.sampling_params import SamplingParams
from tests.fakes import HOLD, TIMING, FakeEngine, answers
from tests.over_sockets import BOTH_CHANNELS
from tests.server.http_calls import IMAGE_BYTES, IMAGE_URL, HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

CHAT = "/v1/chat/completions"
TEXT = {"role": "user", "content": "What is it?"}
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
REFUSAL = {"type": "refusal", "refusal": "No."}
TEXT_PARTS = [{"type": "text", "text": "What is it?"}]
SEEN: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}
USAGE = {
    "prompt_tokens": 735,
    "completion_tokens": 3,
    "total_tokens": 738,
    "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 729, "text_tokens": 6},
}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": list(messages), **fields}


async def test_a_chat_is_answered(rig: HttpServing):
    answer = await rig.ask(CHAT, chat(SEEN), headers={"X-Request-Id": "mine"})
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    assert (query.question, query.image) == ("What is it?", IMAGE_BYTES)
    found = answer.json
    assert (answer.status, found["id"], found["object"], found["model"]) == (
        200,
        "chatcmpl-mine",
        "chat.completion",
        "fake",
    )
    assert found["usage"] == USAGE
    message = {"role": "assistant", "content": "a kestrel", "refusal": None}
    assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def said(rig: HttpServing) -> list[tuple[Role, str]]:
    """The messages that reached the engine."""
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    return [(message.role, message.text) for message in request.messages]


async def test_turns_reach_the_engine_with_their_roles(rig: HttpServing):
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        SEEN,
        {"role": "assistant", "content": "A bird.", "refusal": None},
        {"role": "user", "content": "Which?"},
    )
    assert (await rig.ask(CHAT, chat(*messages, reasoning=True, max_tokens=7))).status == 200
    assert said(rig) == [
        (Role.SYSTEM, "Be brief."),
        (Role.SYSTEM, "Be\nkind."),
        (Role.USER, "What is it?"),
        (Role.ASSISTANT, "A bird."),
        (Role.USER, "Which?"),
    ]
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    assert [message.images for message in request.messages] == [(), (), (IMAGE_BYTES,), (), ()]
    assert (request.reasoning, request.sampling.max_tokens) == (True, 7)


async def test_images_reach_the_engine_in_their_messages(rig: HttpServing):
    urls = (f"data:image/png;base64,{base64.b64encode(name).decode()}" for name in (b"1", b"2", b"3"))
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    question = {"type": "text", "text": "What differs?"}
    seen = {"role": "user", "content": [pictures[0], question, pictures[1]]}
    later = {"role": "user", "content": [pictures[2], {"type": "text", "text": "And here?"}]}
    assert (await rig.ask(CHAT, chat(seen))).status == 200
    assert (await rig.ask(CHAT, chat(seen, {"role": "assistant", "content": "Nothing."}, later))).status == 200
    alone, turns = rig.engine.requests
    assert isinstance(alone, Chat)
    assert isinstance(turns, Chat)
    assert alone.messages == (ChatMessage(Role.USER, "What differs?", (b"1", b"2")),)
    assert [message.images for message in turns.messages] == [(b"1", b"2"), (), (b"3",)]


async def test_every_image_that_cannot_be_read_is_named(rig: HttpServing):
    bad = [{"type": "image_url", "image_url": {"url": url}} for url in ("!", "https://a.example/1.png")]
    answer = await rig.ask(CHAT, chat({"role": "user", "content": [bad[0], PICTURE, bad[0], *TEXT_PARTS]}))
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert "messages[0].content[2].image_url.url: is not base64" in answer.json["error"]["message"]
    answer = await rig.ask(CHAT, chat(TEXT, {"role": "user", "content": [bad[1], PICTURE, bad[1], *TEXT_PARTS]}))
    message = answer.json["error"]["message"]
    assert "messages[1].content[0].image_url.url: this server fetches no images" in message
    assert "messages[1].content[2].image_url.url: this server fetches no images" in message


def called(*calls: tuple[str, str, str], **fields: Any) -> dict[str, Any]:
    """A message of the assistant with these calls: id, name and arguments of each."""
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ],
        **fields,
    }


async def test_calls_and_results_of_tools_are_texts_of_the_conversation(rig: HttpServing):
    messages = (
        TEXT,
        called(("call_1", "find", '{"n": 1}'), ("call_2", "count", "{}"), content=None),
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "three"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|endoftext|>"},
        called(("call_1", "find", "{}"), content="Once more."),
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    )
    assert (await rig.ask(CHAT, chat(*messages))).status == 200
    assert said(rig) == [
        (Role.USER, "What is it?"),
        (Role.ASSISTANT, '{"name": "find", "arguments": {"n": 1}}\n{"name": "count", "arguments": {}}'),
        (Role.USER, "Result of count: three"),
        (Role.USER, "Result of find: <|endoftext|>"),
        (Role.ASSISTANT, 'Once more.\n{"name": "find", "arguments": {}}'),
        (Role.USER, "Result of find: "),
    ]


async def test_every_field_reaches_the_engine(rig: HttpServing):
    body = chat(TEXT, temperature=0.5, top_p=0.25, max_tokens=1, max_completion_tokens=7, seed=9, reasoning=True)
    answer = await rig.ask(CHAT, body)
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    sampling = query.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.25, 7, 9)
    assert answer.json["choices"][0]["message"]["reasoning"] == "A bird."


@pytest.mark.parametrize("includes_usage", [False, True])
async def test_a_chat_is_streamed(rig: HttpServing, includes_usage):
    body = chat(TEXT, stream=True, reasoning=True, stream_options={"include_usage": includes_usage})
    answer = await rig.ask(CHAT, body)
    *chunks, done = answer.events
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert done == "[DONE]"
    if includes_usage:
        *chunks, last = chunks
        assert (last["choices"], last["usage"]) == ([], USAGE)
    assert all(("usage" in chunk) is includes_usage for chunk in chunks)
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(chunks[0]["id"], "chat.completion.chunk")}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "a kestrel"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "A bird."
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


async def test_a_completion_is_answered_and_streamed(rig: HttpServing):
    body = {"model": "fake", "prompt": "Why?", "max_tokens": 5}
    whole = (await rig.ask("/v1/completions", body)).json
    *chunks, done = (await rig.ask("/v1/completions", {**body, "stream": True})).events
    query = rig.engine.requests[0]
    assert isinstance(query, Query)
    assert (query.question, query.image, query.sampling.max_tokens) == ("Why?", None, 5)
    assert (whole["object"], whole["choices"][0]["text"], whole["usage"]) == ("text_completion", "a kestrel", USAGE)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a kestrel"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_the_model_is_listed(rig: HttpServing):
    listed = (await rig.ask("/v1/models")).json
    one = await rig.ask("/v1/models/fake")
    none = await rig.ask("/v1/models/gull/2")
    assert [model["id"] for model in listed["data"]] == ["fake", "colours", "shapes@200"]
    assert one.json == listed["data"][0]
    assert (none.status, none.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("name", "answers_as"),
    [
        ("fake", "fake"),
        ("moondream3-preview", "fake"),
        ("colours", "colours"),
        ("fake/colours", "colours"),
        ("moondream3-preview/colours", "colours"),
        ("colours@7", "colours@7"),
        ("fake/shapes@200", "shapes@200"),
    ],
)
async def test_a_name_that_requests_take_is_found_and_answers_name_what_answered(
    rig: HttpServing, name: str, answers_as: str
):
    found = await rig.ask(f"/v1/models/{name}")
    escaped = await rig.ask(f"/v1/models/{name.replace('/', '%2F').replace('@', '%40')}")
    parent = {} if answers_as == "fake" else {"parent": "fake"}
    assert (found.status, {**found.json, "created": 0}) == (
        200,
        {"id": name, "object": "model", "created": 0, "owned_by": "kestrel", **parent},
    )
    assert escaped.body == found.body
    body = {**chat(TEXT), "model": name}
    whole = await rig.ask(CHAT, body)
    streamed = await rig.ask(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    text = await rig.ask("/v1/completions", {"model": name, "prompt": "?"})
    texts = await rig.ask("/v1/completions", {"model": name, "prompt": "?", "stream": True})
    answers = [whole.json, text.json, *streamed.events[:-1], *texts.events[:-1]]
    assert {answer["model"] for answer in answers} == {answers_as}


@pytest.mark.parametrize("name", ["", "fake/", "gull", "fake/gull", "gull/colours", "colours/", "Fake"])
async def test_a_name_of_no_model_is_not_found(rig: HttpServing, name: str):
    answer = await rig.ask(f"/v1/models/{name}")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "find"}),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("web_search_options", {}),
    ],
)
async def test_what_is_not_built_is_refused_by_its_name(rig: HttpServing, field, value):
    answer = await rig.ask(CHAT, chat(TEXT, **{field: value}))
    assert rig.engine.requests == []
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_the_model_has_the_names_that_the_operator_gives_it():
    async with serving_http(served_model_name=("gpt-4o", "birds/best")) as rig:
        listed = (await rig.ask("/v1/models")).json
        one = await rig.ask("/v1/models/birds/best")
        own = [await rig.ask(f"/v1/models/{name}") for name in ("fake", "gpt-4o/colours", "birds/best/colours")]
        adapter = await rig.ask(CHAT, {**chat(TEXT), "model": "birds/best/colours"})
        answers = [
            await rig.ask(CHAT, {**chat(TEXT), "model": name})
            for name in ("gpt-4o", "birds/best", "fake", "moondream3-preview", "gpt-5")
        ]
        rest = await rig.ask("/v1/query", {"question": "?", "model": "gpt-4o"})
        served = {request.options.model for request in rig.engine.requests}
    names = [model["id"] for model in listed["data"]]
    assert (names[:2], "fake" in names) == (["gpt-4o", "birds/best"], False)
    assert one.json == listed["data"][1]
    assert [(answer.status, answer.json.get("parent")) for answer in own] == [(200, None), *([(200, "gpt-4o")] * 2)]
    assert adapter.json["model"] == "colours"
    assert [answer.status for answer in (*answers, rest)] == [200, 200, 200, 200, 404, 200]
    assert answers[1].json["model"] == "gpt-4o"
    assert served == {"fake"}


async def test_parameters_that_cannot_change_an_answer_are_taken(rig: HttpServing):
    body = chat(
        {
            "role": "user",
            "content": [
                {**SEEN["content"][0], "cache_control": {"type": "ephemeral"}},
                {
                    "type": "image_url",
                    "image_url": {"url": IMAGE_URL, "detail": "high", "format": "image/png"},
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                    "prompt_cache_breakpoint": {"mode": "explicit"},
                },
            ],
            "name": "ann",
            "cache_control": {"type": "ephemeral"},
        },
        metadata={"run": "7"},
        parallel_tool_calls=False,
        prediction={"type": "content", "content": "a"},
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        reasoning_effort="high",
        safety_identifier="s",
        service_tier="flex",
        store=True,
        user="u",
        verbosity="low",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        moderation={"model": "omni-moderation-latest"},
    )
    assert (await rig.ask(CHAT, body)).status == 200
    shared = ("metadata", "prompt_cache_key", "prompt_cache_options", "moderation", "service_tier", "store", "user")
    text = {"model": "fake", "prompt": "?", **{name: body[name] for name in shared}}
    assert (await rig.ask("/v1/completions", text)).status == 200
    wrong = await rig.ask(CHAT, chat(TEXT, reasoning_effort=7))
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Constraint(("yes", "no"))),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+")),
        ({"structured_outputs": {"json": {"type": "null"}}}, Constraint(json_schema='{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, Constraint(json_schema='{"type": "object"}')),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"constraint": {"choices": ["yes", "no"]}}, Constraint(("yes", "no"))),
        ({"constraint": {"regex": "a+"}, "response_format": {"type": "text"}}, Constraint(regex="a+")),
    ],
)
@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
async def test_an_answer_is_constrained_in_vllms_words_or_in_ours(
    rig: HttpServing, route: str, fields: dict[str, Any], constraint: Constraint | None
):
    body = chat(TEXT, **fields) if route == CHAT else {"model": "fake", "prompt": "?", **fields}
    if route != CHAT:
        body.pop("response_format", None)
    assert (await rig.ask(route, body)).status == 200
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    assert query.constraint == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar"),
        ({"constraint": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"constraint": {"choices": []}, "response_format": {"type": "json_object"}}, "constraint"),
    ],
)
async def test_constraints_that_make_no_sense_are_refused_by_their_name(
    rig: HttpServing, fields: dict[str, Any], param: str
):
    answer = await rig.ask(CHAT, chat(TEXT, **fields))
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("includes_usage", [False, True])
async def test_the_chunks_of_several_samples_have_their_numbers(includes_usage: bool):
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    async with serving_http() as rig:
        stream = await rig.ask(CHAT, chat(TEXT, n=3, seed=4, stream=True, **options))
        whole = (await rig.ask(CHAT, chat(TEXT, n=3, seed=4))).json
    async with serving_http(FakeEngine(with_logprobs)) as rig:
        body = {"model": "fake", "prompt": "?", "n": 2, "seed": 4, "stream": True, "logprobs": 0}
        texts = await rig.ask("/v1/completions", body)
    *chunks, done = stream.events
    assert done == "[DONE]"
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usages == ([whole["usage"]] if includes_usage else [])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in whole["choices"]:
        own = [choice for choice in choices if choice["index"] == expected["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == expected["message"]["content"]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in texts.events[:-1]:
        for choice in chunk["choices"]:
            offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    for first, *others in offsets.values():
        # The text of the fake's first piece is longer than its token, and pieces may come as one.
        assert first == 0
        assert others in ([2, 2], [3, 3])
    assert texts.events.count("[DONE]") == 1


async def test_a_reader_that_leaves_a_stream_of_several_samples_cancels_all_of_them():
    async with serving_http(FakeEngine(lambda request: [*answers(request)[:2], HOLD])) as rig:
        async with rig.connect() as connection:
            await connection.send(CHAT, chat(TEXT, n=3, stream=True))
            assert (await connection.head())[0] == 200
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 3


async def test_parameters_at_the_value_that_asks_for_nothing_are_taken(rig: HttpServing):
    body = chat(
        TEXT,
        n=1,
        stop=None,
        logprobs=False,
        tools=[],
        response_format={"type": "text"},
        frequency_penalty=0.0,
        presence_penalty=0,
        user="me",
    )
    assert (await rig.ask(CHAT, body)).status == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "any"}}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": ["é", 1]}}},
            {"enum": ["é", 1]},
        ),
    ],
)
async def test_a_response_format_is_a_constraint(rig: HttpServing, given: Any, expected: Any):
    assert (await rig.ask(CHAT, chat(TEXT, response_format=given))).status == 200
    (query,) = rig.engine.requests
    assert isinstance(query, Query)
    if expected is None:
        assert query.constraint is None
    else:
        assert query.constraint is not None
        assert json.loads(query.constraint.json_schema or "") == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "grammar"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"if": {}}}},
            "response_format.json_schema.schema",
        ),
        ("json_object", "response_format"),
    ],
)
async def test_a_response_format_that_cannot_be_used_is_refused(rig: HttpServing, given: Any, param: str):
    answer = await rig.ask(CHAT, chat(TEXT, response_format=given))
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_a_refusal_of_the_assistant_is_no_text_of_its_message(rig: HttpServing):
    said = {"role": "assistant", "content": [REFUSAL, {"type": "text", "text": "Sorry."}]}
    assert (await rig.ask(CHAT, chat(TEXT, said, TEXT))).status == 200
    (request,) = rig.engine.requests
    assert isinstance(request, Chat)
    assert request.messages[1].text == "Sorry."


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "model", "messages: is required"),
        (chat(), "messages", "must not be empty"),
        (chat(*[TEXT] * 257), "messages", "must have at most 256 items"),
        (chat("x"), "messages[0]", "must be an object"),
        (chat({"role": "function", "content": "x"}), "messages[0].role", "must be one of"),
        (chat(TEXT, {"role": "tool", "content": "x"}), "messages[1].tool_call_id", "is required"),
        (
            chat(TEXT, called(("a", "f", "{}")), {"role": "tool", "content": "x", "tool_call_id": "b"}),
            "messages[2].tool_call_id",
            "is not the id of an earlier call",
        ),
        (chat({**TEXT, "tool_call_id": "a"}), "messages[0].tool_call_id", "of messages of tools only"),
        (chat(TEXT, {"role": "assistant"}, TEXT), "messages[1].content", "is required"),
        (chat(TEXT, {"role": "system", "content": "x"}, TEXT), "messages[1].role", "must precede all messages"),
        (chat(TEXT, {"role": "user", "content": " "}), "messages[1].content", "must not be empty"),
        (chat(*[{"role": "user", "content": "x" * 33_000}] * 2), "messages", "65536 bytes long together"),
        (chat({"role": "user"}), "messages[0].content", "is required"),
        (chat(TEXT, {"role": "assistant", "content": "x"}), "messages[1].role", "must be user"),
        (chat({"role": "user", "content": ""}), "messages[0].content", "must not be empty"),
        (chat({"role": "user", "content": [REFUSAL]}), "messages[0].content[0].type", "of the assistant only"),
        (chat({"role": "user", "content": [{"type": "refusal"}]}), "messages[0].content[0].type", "is required"),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "x", "refusal": "x"}]}),
            "messages[0].content[0].refusal",
            "is not a field of a part of type text",
        ),
        (chat({"role": "user", "content": [{"type": "input_audio"}]}), "messages[0].content[0].type", "must be"),
        (
            chat({"role": "user", "content": [PICTURE] * 9}, {"role": "user", "content": [PICTURE] * 8}),
            "messages[1].content[7]",
            "at most 16 images",
        ),
        (chat(SEEN, SEEN, skill="detect"), "messages", "must have one image"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}),
            "messages[0].content",
            "must not be empty",
        ),
        (chat({"role": "system", "content": [PICTURE]}, TEXT), "messages[0].content[0]", "of the user only"),
        (
            chat({"role": "assistant", "content": "x", "tool_calls": [{}]}, TEXT),
            "messages[0].tool_calls[0].id",
            "is required",
        ),
        (chat({**TEXT, "refusal": "x"}), "messages[0].refusal", "is not a field of this request"),
        (chat({"role": "system", "content": "x", "reasoning": "y"}, TEXT), "messages[0].reasoning", "not a field"),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "x", "image_url": PICTURE["image_url"]}]}),
            "messages[0].content[0].image_url",
            "is not a field of a part of type text",
        ),
        (
            chat({"role": "user", "content": [{**PICTURE, "text": "x"}]}),
            "messages[0].content[0].text",
            "is not a field of a part of type image_url",
        ),
        (
            chat({"role": "user", "content": [{"type": "text"}, PICTURE]}),
            "messages[0].content[0].text",
            "is required",
        ),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}),
            "messages[0].content[1].image_url",
            "is required",
        ),
        (chat(TEXT, max_completion_tokens=0), "max_completion_tokens", "must be from 1"),
        (chat(TEXT, temperature="warm"), "temperature", "must be a number"),
        (chat(TEXT, colour="red"), "colour", "is not a field of this request"),
        (chat(TEXT, max_tokns=3), "max_tokns", "is not a field of this request; did you mean max_tokens?"),
    ],
)
async def test_other_violations_name_their_place(rig: HttpServing, body, param, told):
    answer = await rig.ask(CHAT, body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param)
    assert told in error["message"]


async def test_an_image_by_address_is_refused_where_none_is_fetched(rig: HttpServing):
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    content = [{"type": "text", "text": "What is it?"}, picture]
    answer = await rig.ask(CHAT, chat({"role": "user", "content": content}))
    assert (answer.status, answer.json["error"]["code"]) == (400, "image_uri_not_allowed")
    assert answer.json["error"]["param"] == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": ["yes", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"regex": "a" * 3000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["yes"], "regex": "y"}}, "structured_outputs"),
        ({"constraint": {"choices": ["yes", ""]}}, "constraint.choices[1]"),
        ({"constraint": {"regex": "a" * 3000}}, "constraint.regex"),
        ({"constraint": {"json_schema": {"if": {}}}}, "constraint.json_schema"),
        ({"constraint": {}}, "constraint"),
        ({"prompt_cache_options": "explicit"}, "prompt_cache_options"),
    ],
)
async def test_errors_name_the_fields_that_were_sent(rig: HttpServing, route: str, fields: Any, param: str):
    body = chat(TEXT, **fields) if route == CHAT else {"model": "fake", "prompt": "?", **fields}
    error = (await rig.ask(route, body)).json["error"]
    assert rig.engine.requests == []
    assert error["param"] == param


@pytest.mark.parametrize(
    ("refusal", "fields", "param"),
    [
        ("sampling.logit_bias[7]", {"logit_bias": {"7": 1}}, "logit_bias[7]"),
        ("constraint", {"response_format": {"type": "json_object"}}, "response_format"),
        ("constraint", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("constraint.regex", {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ("question", {}, "messages[0].content"),
        ("image", {"messages": [SEEN]}, "messages[0].content[1].image_url.url"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_has_the_name_that_was_sent(
    refusal: str, fields: Any, param: str, stream: bool
):
    refused = InvalidRequest((Violation(refusal, "is wrong"),))
    async with serving_http(FakeEngine(lambda _: [refused])) as rig:
        answer = await rig.ask(CHAT, {**chat(TEXT), **fields, "stream": stream})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("given", "seed"),
    [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63), (-2, 2**64 - 2), (-1, None), (None, None)],
)
async def test_a_seed_has_64_bits_with_a_sign(rig: HttpServing, route: str, given: int | None, seed: int | None):
    body = {"model": "fake", "seed": given, **({"messages": [TEXT]} if route == CHAT else {"prompt": "?"})}
    assert (await rig.ask(route, body)).status == 200
    assert rig.engine.requests[-1].sampling.seed == seed


@pytest.mark.parametrize("prompt", ["What is it?", ["What is it?"]])
async def test_a_prompt_is_a_text_or_a_list_of_one(rig: HttpServing, prompt: Any):
    answer = await rig.ask("/v1/completions", {"model": "fake", "prompt": prompt})
    assert (answer.status, rig.engine.requests[-1].text) == (200, "What is it?")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (["a", "b"], "prompt"),
        ([""], "prompt[0]"),
        ("", "prompt"),
        ([1, 2], "prompt[0]"),
        ([["a"]], "prompt[0]"),
        ({}, "prompt"),
        (None, "prompt"),
        (["x" * 70_000], "prompt[0]"),
    ],
)
async def test_another_prompt_is_refused(rig: HttpServing, prompt: Any, param: str):
    answer = await rig.ask("/v1/completions", {"model": "fake", "prompt": prompt})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert rig.engine.requests == []


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/batches"])
async def test_other_routes_of_openai_are_refused_by_their_name(rig: HttpServing, path):
    answer = await rig.ask(path, {"model": "fake"})
    assert answer.status == 404
    assert path in answer.json["error"]["message"]


async def test_a_failure_behind_the_first_chunk_is_an_error_in_the_stream():
    def breaks(request: Any) -> list[object]:
        return [*answers(request)[:2], Overloaded(3, 0.25)]

    async with serving_http(FakeEngine(breaks)) as rig:
        answer = await rig.ask(CHAT, chat(TEXT, stream=True))
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "queue_full"


# Sampling

LOGPROBS = (
    TokenLogprob(5, "a ", b"a ", -0.5, (TopLogprob(5, "a ", b"a ", -0.5), TopLogprob(6, "the", b"the", -1.5))),
    TokenLogprob(7, "\ufffd", "é".encode()[:1], -0.25, ()),
    TokenLogprob(8, "\ufffd", "é".encode()[1:], -0.125, ()),
)


def with_logprobs(request: Any) -> list[Any]:
    """An answer whose pieces and result have logprobs; the number of its seed is its first character."""
    text = f"{request.sampling.seed}a é"
    pieces = [
        TextDelta(text[:3], TextChannel.ANSWER, 0, 1, LOGPROBS[:1]),
        TextDelta("é", TextChannel.ANSWER, 1, 2, LOGPROBS[1:]),
    ]
    end = Finished(
        QueryOutput(text, None, LOGPROBS), FinishReason.STOP_SEQUENCE, Usage(735, 729, 3), TIMING, "stop"
    )
    return [Started(Usage(735, 729)), *pieces, end]


async def test_settings_of_sampling_reach_the_engine(rig: HttpServing):
    body = chat(
        TEXT,
        stop="end",
        include_stop=True,
        top_k=5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"17": -100, "4": 1.5},
        logprobs=True,
        top_logprobs=2,
    )
    assert (await rig.ask(CHAT, body)).status == 200
    (query,) = rig.engine.requests
    assert query.sampling == SamplingParams(
        stop=("end",),
        include_stop=True,
        top_k=5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias=((4, 1.5), (17, -100)),
        logprobs=2,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": 40_000}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]"),
        ({"logit_bias": {"1": "1"}}, "logit_bias[1]"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"logit_bias": {"9" * 11: 1}}, "logit_bias[9999999999]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"n": 17}, "n"),
        ({"top_k": 10**30}, "top_k"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
    ],
)
async def test_sampling_out_of_bounds_is_refused_by_its_name(rig: HttpServing, fields: dict[str, Any], param: str):
    answer = await rig.ask(CHAT, chat(TEXT, **fields))
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_every_breach_of_sampling_is_told_at_once(rig: HttpServing):
    body = chat(TEXT, stop=[1], logit_bias={"x": 1}, n=17, top_k=0, min_p=2, top_logprobs=1)
    message = (await rig.ask(CHAT, body)).json["error"]["message"]
    for name in ("stop[0]", "logit_bias[x]", "n:", "top_k", "min_p", "top_logprobs"):
        assert name in message


async def test_samples_are_choices_and_their_output_is_summed():
    async with serving_http(FakeEngine(with_logprobs)) as rig:
        answer = await rig.ask(CHAT, chat(TEXT, n=3, seed=4))
        seeds = [query.sampling.seed for query in rig.engine.requests]
    assert seeds[0] == 4
    assert len(set(seeds)) == 3
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in choices] == [f"{seed}a é" for seed in seeds]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert answer.json["usage"]["prompt_tokens"] == 735
    assert answer.json["usage"]["completion_tokens"] == 9


async def test_logprobs_of_a_chat():
    first = {"token": "a ", "logprob": -0.5, "bytes": [97, 32]}
    content = [
        {**first, "top_logprobs": [first, {"token": "the", "logprob": -1.5, "bytes": [116, 104, 101]}]},
        {"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -0.125, "bytes": [0xA9], "top_logprobs": []},
    ]
    async with serving_http(FakeEngine(with_logprobs)) as rig:
        whole = await rig.ask(CHAT, chat(TEXT, seed=4, logprobs=True, top_logprobs=2))
        stream = await rig.ask(CHAT, chat(TEXT, seed=4, logprobs=True, top_logprobs=2, stream=True))
    assert whole.json["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    chunks = [chunk["choices"][0] for chunk in stream.events[:-1]]
    told = [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"]["content"]]
    assert told == content


async def test_logprobs_of_a_completion():
    body = {"model": "fake", "prompt": "What?", "logprobs": 2, "seed": 4}
    async with serving_http(FakeEngine(with_logprobs)) as rig:
        whole = await rig.ask("/v1/completions", body)
        stream = await rig.ask("/v1/completions", {**body, "stream": True})
    wanted = {
        "tokens": ["a ", "\ufffd", "\ufffd"],
        "token_logprobs": [-0.5, -0.25, -0.125],
        "top_logprobs": [{"a ": -0.5, "the": -1.5}, {}, {}],
        "text_offset": [0, 2, 2],
    }
    assert whole.json["choices"][0]["logprobs"] == wanted
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream.events[:-1] if chunk["choices"]]
    assert [token for chunk in chunks if chunk for token in chunk["tokens"]] == wanted["tokens"]


async def test_no_sample_runs_where_there_is_no_place_for_all_of_them():
    engine = FakeEngine(max_queued_requests=2)
    async with serving_http(engine) as rig:
        answer = await rig.ask(CHAT, chat(TEXT, n=3))
        assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
        assert not engine.requests


async def test_the_failure_of_a_sample_ends_the_others():
    def script(request: Any) -> list[object]:
        is_first = request.sampling.seed == 1
        return [InternalError(ValueError())] if is_first else [*answers(request)[:1], HOLD]

    engine = FakeEngine(script)
    async with serving_http(engine) as rig:
        assert (await rig.ask(CHAT, chat(TEXT, n=3, seed=1))).status == 500
        await engine.is_idle.wait()
        assert engine.num_cancelled == 2
