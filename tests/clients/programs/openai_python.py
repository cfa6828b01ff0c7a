"""OpenAI's Python package against our routes: answers, streams, and its classes of errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import openai  # installed in an environment of its own

FACTS = json.loads(sys.argv[1])
DOCUMENTS = Path(FACTS["picture"]).parents[1] / "docs"
URL = "data:image/png;base64," + base64.b64encode(Path(FACTS["picture"]).read_bytes()).decode()
SEEN: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is in this image?"},
            {"type": "image_url", "image_url": {"url": URL}},
        ],
    }
]


def client(token: str = "alice", **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{FACTS['http']}/v1", api_key=FACTS.get(token, token), **options)


def main() -> None:
    alice = client(max_retries=0)
    (model,) = [model.id for model in alice.models.list()]
    assert alice.models.retrieve(model).owned_by == "kestrel"
    print("models")
    check_examples()

    sampling: Any = {"model": model, "messages": SEEN, "temperature": 0, "max_tokens": 16}
    whole = alice.chat.completions.create(**sampling)
    text = whole.choices[0].message.content
    assert "star" in text, text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    print("chat with an image")

    # Without an encoding the package asks for base64.
    embedded = [
        alice.embeddings.create(model=model, input=URL, **how) for how in ({}, {"encoding_format": "float"})
    ]
    vectors = [answer.data[0].embedding for answer in embedded]
    assert len(vectors[0]) == len(vectors[1]) > 100
    assert all(abs(one - other) < 1e-6 for one, other in zip(*vectors, strict=True))
    assert abs(sum(number * number for number in vectors[0]) - 1) < 1e-4
    print("embeddings of an image")

    chunks = list(alice.chat.completions.create(**sampling, stream=True, stream_options={"include_usage": True}))
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert joined == text, (joined, text)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    print("streamed chat")

    check_tools(alice, model)
    check_responses(alice, model)

    turns: Any = [
        {"role": "system", "content": "Be brief."},
        *SEEN,
        whole.choices[0].message.model_dump(),
        {"role": "user", "content": "Which colour has it?"},
    ]
    one = alice.chat.completions.create(model=model, messages=turns, max_tokens=16)
    assert one.choices[0].message.content
    two = alice.chat.completions.create(model=model, messages=[*turns, *SEEN], max_tokens=16)
    assert two.choices[0].message.content
    counts: Any = [answer.usage.prompt_tokens_details.model_dump()["image_tokens"] for answer in (one, two)]
    assert counts[1] == 2 * counts[0] > 0, counts
    print("several turns")

    drawn = {**sampling, "temperature": 5.0, "seed": 7}
    first, second = (alice.chat.completions.create(**drawn).choices[0].message.content for _ in range(2))
    assert first == second
    print("seed")

    several = alice.chat.completions.create(**{**drawn, "n": 3}).choices
    assert [choice.index for choice in several] == [0, 1, 2]
    assert len({choice.message.content for choice in several}) > 1
    chunks = list(alice.chat.completions.create(**{**drawn, "n": 3}, stream=True))
    for whole in several:
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == whole.index]
        assert "".join(choice.delta.content or "" for choice in own) == whole.message.content
    print("several samples")

    chosen = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert alice.chat.completions.create(**sampling, extra_body=chosen).choices[0].message.content in ("yes", "no")
    ours = {"constraint": {"regex": "[0-9]{3}"}}
    assert len(alice.chat.completions.create(**sampling, extra_body=ours).choices[0].message.content) == 3
    without_effect: Any = {"metadata": {"run": "7"}, "store": True, "reasoning_effort": "high", "user": "u"}
    plain = alice.chat.completions.create(**sampling, **without_effect, prompt_cache_key="k", verbosity="low")
    assert plain.choices[0].message.content == text
    print("structured outputs, and parameters without effect")

    told = alice.chat.completions.create(**sampling, logprobs=True, top_logprobs=2).choices[0]
    pieces = told.logprobs.content
    assert "".join(piece.token for piece in pieces).strip() == told.message.content == text
    assert all(piece.logprob <= 0 and len(piece.top_logprobs) == 2 for piece in pieces)
    # A temperature of 0 takes the most likely token.
    assert all(piece.token == piece.top_logprobs[0].token for piece in pieces)
    print("logprobs")

    stopped = alice.chat.completions.create(**sampling, stop=[" star", "never"]).choices[0]
    assert stopped.message.content == text.partition(" star")[0]
    assert stopped.finish_reason == "stop"
    print("stop")

    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "count": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "shapes", "schema": schema, "strict": True}}
    shaped = alice.chat.completions.create(**{**sampling, "max_tokens": 64}, response_format=asked).choices[0]
    found = json.loads(shaped.message.content)
    assert (shaped.finish_reason, list(found)) == ("stop", ["colour", "count"])
    assert found["colour"] in ("red", "blue")
    assert found["count"] in range(100)
    pieces = alice.chat.completions.create(**{**sampling, "max_tokens": 64}, response_format=asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == shaped.message.content
    any_object = {"type": "json_object"}
    cut = alice.chat.completions.create(**{**sampling, "max_tokens": 2}, response_format=any_object).choices[0]
    assert cut.message.content.startswith("{")
    assert (
        alice.chat.completions.create(**sampling, response_format={"type": "text"}).choices[0].message.content
        == text
    )
    error = refuse(
        openai.BadRequestError,
        lambda: alice.chat.completions.create(
            **sampling,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}},
        ),
        "invalid_request",
    )
    assert error.param == "response_format.json_schema.schema", error.param
    print("response formats")

    done = alice.completions.create(model=model, prompt="What is a star?", max_tokens=8, temperature=0)
    pieces = alice.completions.create(
        model=model, prompt="What is a star?", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text
    print("completions")

    with alice.chat.completions.create(model=model, messages=SEEN, temperature=5.0, stream=True) as stream:
        next(iter(stream))
    print("a stream that is closed early")

    async def at_once() -> None:
        async with openai.AsyncOpenAI(base_url=f"{FACTS['http']}/v1", api_key=FACTS["alice"]) as many:
            answers = await asyncio.gather(*(many.chat.completions.create(**sampling) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {text}

    asyncio.run(at_once())
    print("eight at once, with asyncio")

    refuse(openai.AuthenticationError, lambda: client("wrong", max_retries=0).models.list(), "invalid_api_key")
    refuse(
        openai.PermissionDeniedError,
        lambda: client("operator", max_retries=0).chat.completions.create(**sampling),
        "scope_required",
    )
    refuse(
        openai.NotFoundError,
        lambda: alice.chat.completions.create(model="gull", messages=SEEN),
        "model_not_found",
    )
    refuse(openai.BadRequestError, lambda: alice.embeddings.create(model=model, input="hi"), "invalid_request")
    for unsupported in (
        {"functions": [{"name": "f"}]},
        {"web_search_options": {"search_context_size": "low"}},
    ):
        (name,) = unsupported
        error = refuse(
            openai.BadRequestError,
            lambda fields=unsupported: alice.chat.completions.create(**sampling, **fields),
            "unsupported_parameter",
        )
        assert error.param == name, error.param
    print("classes of errors")

    limited = client("limited", max_retries=0)
    limited.models.list()
    error = refuse(openai.RateLimitError, lambda: limited.models.list(), "rate_limit_exceeded")
    assert int(error.response.headers["retry-after-ms"]) <= 500
    client("limited", max_retries=3).models.list()
    print("rate limit, and a retry that succeeds")


SCHEMA: Any = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["color", "count"],
    "additionalProperties": False,
}


def check_tools(alice: Any, model: str) -> None:
    """Checks forced calls, whole and streamed, and a turn with the result of one."""
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
        for name in ("paint", "draw")
    ]
    asked: Any = {"model": model, "messages": SEEN, "temperature": 0, "max_tokens": 64}
    named = {"type": "function", "function": {"name": "draw"}}
    for choice, names in ((named, {"draw"}), ("required", {"paint", "draw"})):
        whole = alice.chat.completions.create(**asked, tools=tools, tool_choice=choice).choices[0]
        with alice.chat.completions.stream(**asked, tools=tools, tool_choice=choice) as stream:
            streamed = stream.get_final_completion().choices[0]
        for found in (whole, streamed):
            (call,) = found.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert found.finish_reason == "tool_calls", found
            assert call.function.name in names
            assert (arguments["color"] in ("red", "blue"), type(arguments["count"])) == (True, int), arguments
        first, second = (found.message.tool_calls[0].function for found in (whole, streamed))
        assert (first.name, first.arguments) == (second.name, second.arguments)
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "done"}
    turns = [*SEEN, whole.message.model_dump(exclude_none=True), result]
    second = alice.chat.completions.create(**{**asked, "messages": turns}, tools=tools).choices[0]
    assert second.message.content, second
    print("tools")


def check_responses(alice: Any, model: str) -> None:
    """Checks responses with an image, whole and streamed, formats and calls."""
    content = [
        {"type": "input_text", "text": "What is in this image?"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    asked: Any = {"model": model, "input": [{"role": "user", "content": content}], "temperature": 0}
    whole = alice.responses.create(**asked, store=True)
    assert "star" in whole.output_text, whole
    assert (whole.status, whole.store) == ("completed", False)
    with alice.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed"), kinds
    shaped = alice.responses.create(
        **asked,
        text={"format": {"type": "json_schema", "name": "shape", "schema": SCHEMA, "strict": True}},
        max_output_tokens=64,
    )
    assert json.loads(shaped.output_text)["color"] in ("red", "blue")
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in ("a", "b")]
    forced: Any = {**asked, "tools": tools, "tool_choice": "required", "max_output_tokens": 64}
    (call,) = alice.responses.create(**forced).output
    with alice.responses.stream(**forced) as stream:
        (same,) = stream.get_final_response().output
    assert (call.type, call.name, call.arguments) == ("function_call", same.name, same.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [*asked["input"], call.model_dump(exclude_none=True), result]
    assert alice.responses.create(**{**asked, "input": turns}).output_text
    assert alice.responses.create(**{**asked, "input": [*turns, *asked["input"]]}).output_text  # two pictures
    for fields in ({"background": True}, {"previous_response_id": whole.id}):
        refuse(
            openai.BadRequestError,
            lambda fields=fields: alice.responses.create(**asked, **fields),
            "unsupported_parameter",
        )
    check_failing_stream(alice, asked)
    print("responses")


def check_failing_stream(alice: Any, asked: Any) -> None:
    """Checks the error of a response that runs out of time after its first event."""
    schema = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 1000, "maxItems": 1000}
    shape = {"format": {"type": "json_schema", "name": "bits", "schema": schema}}
    endless: Any = {**asked, "text": shape, "max_output_tokens": 2000}
    for timeout_s in (0.25, 0.5, 1.0, 2.0, 4.0):  # the first ones are too short for slow machines
        events: list[Any] = []
        headers = {"X-Request-Timeout": str(timeout_s)}
        with contextlib.suppress(openai.APIStatusError):  # before the first event
            stream = alice.responses.create(**endless, stream=True, extra_headers=headers)
            error = error_of(lambda stream=stream, events=events: events.extend(stream), openai.APIError)
            assert events[0].type == "response.created"
            assert (error.code, error.type) == ("deadline_exceeded", "server_error"), error.body
            return
    raise AssertionError("no response began in time")


def check_examples() -> None:
    """The examples of the documentation, with another address and a token."""
    whole, streamed = printed_by_example("http.md").splitlines()
    assert whole == streamed, (whole, streamed)
    assert "star" in whole, whole
    parsed = printed_by_example("constraints.md")
    assert parsed.startswith("shapes=["), parsed
    print("the examples of the documentation")


def printed_by_example(name: str) -> str:
    text = (DOCUMENTS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "import OpenAI" in block]
    for ours, theirs in (
        ("http://localhost:8000", FACTS["http"]),
        ("a token, or anything where none is asked for", FACTS["alice"]),
        ("kestrel_grpc/demo_picture.png", FACTS["picture"]),
    ):
        block = block.replace(ours, theirs)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, name, "exec", dont_inherit=True), {})  # our annotations are texts, a reader's are not
    return printed.getvalue()


def refuse(kind: type[Any], call: Any, code: str) -> Any:
    """The error of a call that must fail with this class and code."""
    error = error_of(call, kind)
    assert error.code == code, (error.code, str(error))
    assert error.request_id, "no id to look for in the server's log"
    return error


def error_of(call: Any, kind: Any) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


main()
