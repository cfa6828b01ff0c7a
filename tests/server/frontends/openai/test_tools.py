"""Tools in chats: which answers are constrained, how calls are written, and what is refused."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jsonschema
import pytest

from kestrel_grpc.frontends.openai.tools import MAX_TOOLS, CallReader
from kestrel_runtime.api.events import (
    Event,
    Finished,
    FinishReason,
    QueryOutput,
    Reasoning,
    Started,
    TextChannel,
    TextDelta,
    TokenLogprob,
    Usage,
)
from kestrel_runtime.api.requests import Query, Request
from kestrel_runtime.api.sampling_params import SamplingParams
from tests.fakes import TIMING, FakeEngine
from tests.over_sockets import BOTH_CHANNELS
from tests.server.http_calls import HttpServing, serving_http

pytestmark = [pytest.mark.asyncio(loop_scope="module"), BOTH_CHANNELS]

CHAT = "/v1/chat/completions"
TEXT = {"role": "user", "content": "What is it?"}
SHAPE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "find"}}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


LISTED = {"n": {"type": "integer"}}
OPEN = {"type": "object", "properties": LISTED, "additionalProperties": {"type": "null"}}
FIND, COUNT = tool("find", SHAPE, description="Finds it.", strict=True), tool("count")


def chat(*tools: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [TEXT], "tools": list(tools), **fields}


def saying(
    *pieces: str, reason: FinishReason = FinishReason.STOP, thought: str | None = None
) -> Callable[[Request], Sequence[Event]]:
    """A script: an answer in these pieces, each of one token."""

    def script(request: Request) -> Sequence[Event]:
        has_logprobs = request.sampling.logprobs is not None
        logs = [(TokenLogprob(1, piece, piece.encode(), -0.5, ()),) if has_logprobs else () for piece in pieces]
        deltas = [
            TextDelta(piece, TextChannel.ANSWER, number, 1, logs[number]) for number, piece in enumerate(pieces)
        ]
        reasoned = [] if thought is None else [TextDelta(thought, TextChannel.REASONING, 0, 1)]
        logprobs = tuple(log for given in logs for log in given) if has_logprobs else None
        reasoning = None if thought is None else Reasoning(thought, ())
        output = QueryOutput("".join(pieces), reasoning, logprobs)
        usage = Usage(10, 0, num_output_tokens=len(pieces))
        return [Started(Usage(10, 0)), *reasoned, *deltas, Finished(output, reason, usage, TIMING)]

    return script


def joined(chunks: Iterable[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that a client puts together from the chunks of one sample, and the reason of its end."""
    message: dict[str, Any] = {"content": None}
    reason = None
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = dict(choice["delta"])
        reason = choice["finish_reason"] or reason
        for call in delta.pop("tool_calls", ()):
            if "id" in call:
                message.setdefault("tool_calls", []).append({**call, "function": dict(call["function"])})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, value in delta.items():
            message[name] = (message.get(name) or "") + value if value is not None else message.get(name)
    return message, reason


def constraint_of(rig: HttpServing) -> Any:
    request = rig.engine.requests[-1]
    assert isinstance(request, Query)
    return None if request.constraint is None else json.loads(request.constraint.json_schema or "")


@pytest.mark.parametrize(
    "choice", [None, "none", "auto", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}]
)
async def test_tools_whose_use_is_optional_change_nothing(rig: HttpServing, choice: Any):
    fields = {} if choice is None else {"tool_choice": choice}
    answer = await rig.ask(CHAT, chat(FIND, COUNT, parallel_tool_calls=True, **fields))
    assert answer.json["choices"][0]["message"]["content"] == "a kestrel"
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert constraint_of(rig) is None


@pytest.mark.parametrize(
    ("tools", "choice", "schema"),
    [
        ([FIND], "required", SHAPE),
        ([FIND, COUNT], NAMED, SHAPE),
        ([FIND, COUNT], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, SHAPE),
        ([COUNT], "required", {"type": "object", "properties": {}, "additionalProperties": False}),
        ([tool("any", {})], "required", {"type": "object"}),
        (
            [tool("closed", {"properties": LISTED})],
            "required",
            {"type": "object", "properties": LISTED, "additionalProperties": False},
        ),
        (
            [tool("none", {"type": "object", "properties": {}})],
            "required",
            {"type": "object", "properties": {}, "additionalProperties": False},
        ),
        ([tool("open", OPEN)], "required", OPEN),
    ],
)
async def test_a_forced_call_of_one_function_is_constrained_to_its_parameters(
    rig: HttpServing, tools: Any, choice: Any, schema: Any
):
    assert (await rig.ask(CHAT, chat(*tools, tool_choice=choice))).status == 200
    assert constraint_of(rig) == schema


async def test_a_call_of_one_of_several_functions_is_valid_under_the_parameters_of_that_one(rig: HttpServing):
    tree = {
        "$defs": {
            "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}, "required": ["left"]}
        },
        "type": "object",
        "properties": {"$ref": {"$ref": "#/$defs/Tree"}, "same": {"$ref": "#"}, "text": {"const": "#/$defs/Tree"}},
        "additionalProperties": False,
    }
    answer = await rig.ask(CHAT, chat(FIND, COUNT, tool("grow", tree), tool_choice="required"))
    assert answer.status == 200
    schema = constraint_of(rig)

    def is_valid(name: str, arguments: Any) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid({"name": name, "arguments": arguments})

    assert is_valid("find", {"n": 1})
    assert is_valid("count", {})
    assert is_valid("grow", {"text": "#/$defs/Tree"})
    assert is_valid("grow", {"same": {"text": "#/$defs/Tree"}})
    wrong = [("find", {}), ("count", {"n": 1}), ("other", {}), ("grow", {"$ref": {}}), ("grow", {"same": {"n": 1}})]
    assert [call for call in wrong if is_valid(*call)] == []


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("thought", [None, "hm"])
@pytest.mark.parametrize(
    ("tools", "pieces"),
    [
        ([FIND], ['{"n"', ": 1", "}"]),
        ([COUNT, FIND], ['{"na', 'me": "find", "argu', 'ments": {"n', '": 1}', "}"]),
        ([COUNT, FIND], ['{"name": "find", "arguments": {"n": 1}}']),
        ([tool("fin"), FIND], list('{"name": "find", "arguments": {"n": 1}}')),
    ],
)
async def test_a_forced_call_is_a_call_of_a_tool(tools: Any, pieces: Any, thought: Any, is_streamed: bool):
    async with serving_http(FakeEngine(saying(*pieces, thought=thought))) as rig:
        body = chat(*tools, tool_choice="required", stream=is_streamed, reasoning=thought is not None)
        answer = await rig.ask(CHAT, body)
    if is_streamed:
        assert answer.events[-1] == "[DONE]"
        message, reason = joined(answer.events[:-1])
    else:
        (choice,) = answer.json["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "find", "arguments": '{"n": 1}'})
    assert call["id"].startswith("call_")
    assert (message["content"], reason, message.get("reasoning")) == (None, "tool_calls", thought)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        ([FIND], '{"n": 1', '{"n": 1'),
        ([COUNT, FIND], '{"name": "find", "arguments": {"n": {}', '{"n": {}'),
        ([COUNT, FIND], '{"name": "fin', None),
    ],
)
async def test_a_call_that_ends_too_early_has_what_there_is_of_it(
    tools: Any, text: str, arguments: str | None, is_streamed: bool
):
    async with serving_http(FakeEngine(saying(text, reason=FinishReason.LENGTH))) as rig:
        answer = await rig.ask(CHAT, chat(*tools, tool_choice="required", stream=is_streamed))
    if is_streamed:
        message, reason = joined(answer.events[:-1])
    else:
        message, reason = answer.json["choices"][0]["message"], answer.json["choices"][0]["finish_reason"]
    found = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    assert (found, message["content"], reason) == ([] if arguments is None else [arguments], None, "length")


async def test_each_sample_has_a_call_with_an_id_of_its_own():
    async with serving_http(FakeEngine(saying('{"n": 1}'))) as rig:
        answer = await rig.ask(CHAT, chat(FIND, tool_choice="required", n=3, seed=1))
    calls = [choice["message"]["tool_calls"][0] for choice in answer.json["choices"]]
    assert len({call["id"] for call in calls}) == 3


@pytest.mark.parametrize("includes_usage", [False, True])
async def test_every_logprob_of_a_streamed_call_is_in_a_chunk(includes_usage: bool):
    pieces = ['{"name": "find", ', '"arguments": ', '{"n": ', "1}", "}"]
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    async with serving_http(FakeEngine(saying(*pieces))) as rig:
        body = chat(FIND, COUNT, tool_choice="required", stream=True, logprobs=True, **options)
        *chunks, _ = (await rig.ask(CHAT, body)).events
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logged = [token["token"] for choice in choices for token in (choice["logprobs"] or {"content": ()})["content"]]
    assert "".join(logged) == "".join(pieces)
    assert all(("usage" in chunk) is includes_usage for chunk in chunks)


async def test_a_forced_call_has_no_stop_strings_and_no_response_format(rig: HttpServing):
    fields = {"stop": ["}"], "response_format": {"type": "json_object"}, "max_tokens": 5}
    assert (await rig.ask(CHAT, chat(FIND, tool_choice="required", **fields))).status == 200
    (request,) = rig.engine.requests
    assert request.sampling == SamplingParams(max_tokens=5)
    assert constraint_of(rig) == SHAPE


@pytest.mark.parametrize(
    ("body", "param", "described"),
    [
        (chat(tool_choice="required"), "tool_choice", "needs tools"),
        (chat(FIND, tool_choice="always"), "tool_choice", "must be one of none, auto, required"),
        (chat(FIND, tool_choice={"type": "function"}), "tool_choice", "an object that names a function"),
        (chat(FIND, tool_choice={"type": "custom", "custom": {"name": "find"}}), "tool_choice", "names a function"),
        (
            chat(FIND, tool_choice={"type": "function", "function": {"name": "fnd"}}),
            "tool_choice.function.name",
            "is not the name of a tool; did you mean find?",
        ),
        (chat({"type": "custom", "custom": {}}), "tools[0].type", "must be one of function"),
        (chat(tool("no spaces")), "tools[0].function.name", "must be 1 to 128 letters"),
        (chat(FIND, FIND), "tools[1]", "has the name of an earlier tool"),
        (chat(*[COUNT] * (MAX_TOOLS + 1)), "tools", "must have at most 128 items"),
        (chat(tool("f", {"description": "x" * 65_536}), FIND), "tools", "at most 65536 bytes together"),
        (
            chat(tool("f", {"type": "string"}), tool_choice="required"),
            "tools[0].function.parameters",
            "must be the schema of an object",
        ),
        (
            chat(tool("f", {"type": "object", "if": {}}), tool_choice="required"),
            "tools[0].function.parameters",
            "/if",
        ),
        (chat(tool("f", {"if": {}}), FIND, tool_choice="required"), "tools", "/if"),
        (chat(FIND, tool_choice="required", constraint={"regex": "a"}), "constraint", "forces a call"),
        (chat(FIND, COUNT, tool_choice="required", top_p=7), "top_p", "must be"),
    ],
)
async def test_what_no_call_can_have_is_refused_by_its_place(
    rig: HttpServing, body: Any, param: str, described: str
):
    answer = await rig.ask(CHAT, body)
    assert rig.engine.requests == []
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert described in answer.json["error"]["message"]


async def test_schemas_of_tools_that_are_not_called_need_not_be_usable(rig: HttpServing):
    assert (await rig.ask(CHAT, chat(tool("f", {"if": {}}), FIND, tool_choice=NAMED))).status == 200
    assert constraint_of(rig) == SHAPE


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_arguments_are_the_same_in_pieces_of_any_size(size: int):
    text = '{"name": "a.b", "arguments": {"x": "}\\n\\u00e4", "y": {}}}'
    reader = CallReader(("a", "a.b"))
    found = "".join(reader.push(text[start : start + size]) for start in range(0, len(text), size))
    assert (reader.name, found + reader.end(is_complete=True)) == ("a.b", text[29:-1])
