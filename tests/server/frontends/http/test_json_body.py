"""The JSON of a body: what is no Unicode or too long is named."""

import json
from decimal import Decimal
from typing import Any

import pytest

from kestrel_grpc.frontends.http.fields import Sampling, new_constraint
from kestrel_grpc.frontends.http.json_body import HALF, MAX_TEXTS, LongText, parse_json
from kestrel_runtime.api.errors import InvalidRequest
from tests.server.http_calls import serving_http


def refuse(place: str, problem: str) -> None:
    pytest.fail(f"{place} {problem}")


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize(
    ("document", "places"),
    [
        ({"\ud800": 1}, {"\\ud800"}),
        ({"a": "\udfffb"}, {"a"}),
        ({"a": [{}, {"b\ud800": ["", "\udc00\ud800"]}]}, {"a[1].b\\ud800", "a[1].b\\ud800[1]"}),
        ({"\ud83d": {"\udc00": 2}, "c": "\ud83d\ude00"}, {"\\ud83d", "\\ud83d.\\udc00"}),
        ({"c\ud83d\ude00": "\ud83d\ude00"}, set()),
    ],
)
def test_each_half_of_a_surrogate_pair_has_a_place(document: dict[str, Any], places: set[str]):
    found: dict[str, str] = {}
    parsed = parse_json(json.dumps(document).encode(), found.__setitem__)
    assert found == dict.fromkeys(places, HALF)
    json.dumps(parsed, ensure_ascii=False).encode()  # what is left is Unicode
    assert len(parsed) == len(document)


def test_json_that_is_nested_too_deeply_is_refused_with_halves_too():
    with pytest.raises(InvalidRequest, match="nested"):
        parse_json(b'{"\\ud800":' + b"[" * 900 + b"]" * 900 + b"}", lambda path, description: None)


@pytest.mark.parametrize("after", ["", "x" * 200_000], ids=["small", "with a long text"])
def test_whole_numbers_have_a_limited_number_of_digits(after: str):
    def body(num_digits: int) -> bytes:
        return json.dumps({"text": after, "numbers": [10**num_digits - 1]}).encode()

    assert parse_json(body(400), refuse)["numbers"] == [10**400 - 1]
    with pytest.raises(InvalidRequest, match="a number of more than 400 digits"):
        parse_json(body(401), refuse)


def test_numbers_of_a_schema_are_those_that_the_caller_wrote():
    numbers = [
        "0.1234567890123456789",
        "9007199254740993.0",
        "9007199254740993",
        "0.30000000000000004",
        "1.5",
        "-2e-7",
        "1e-400",
        "4.35e-322",
        "1e400",
        "-0.0",
        "0e-400",
    ]
    body = f'{{"schema": {{"enum": [{", ".join(numbers)}], "maximum": {numbers[0]}}}, "temperature": {numbers[0]}}}'
    document = parse_json(body.encode(), lambda path, description: None)
    written = new_constraint(json_schema=document["schema"]).json_schema
    assert written is not None
    found = json.loads(written, parse_float=Decimal)
    assert found == {"enum": [Decimal(number) for number in numbers], "maximum": Decimal(numbers[0])}
    assert Sampling.model_validate({"temperature": document["temperature"]}).temperature == float(numbers[0])


FIELDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("query", {"question": "?", "\ud800": 1}, "\\ud800"),
    ("query", {"question": "\ud800"}, "question"),
    ("query", {"question": "?", "settings": {"stop": ["\ud800"]}}, "settings.stop[0]"),
    ("query", {"question": "?", "settings": {"\ud800": 1}}, "settings.\\ud800"),
    ("query", {"question": "?", "constraint": {"choices": ["a", "\ud800"]}}, "constraint.choices[1]"),
    (
        "query",
        {"question": "?", "constraint": {"json_schema": {"properties": {"\ud800": {}}}}},
        "constraint.json_schema.properties.\\ud800",
    ),
    ("query", {"question": "?", "image_url": "\ud800"}, "image_url"),
    ("caption", {"image_url": "AAAA", "length": "\ud800"}, "length"),
    ("point", {"image_url": "AAAA", "object": "\ud800"}, "object"),
    ("detect", {"image_url": "AAAA", "object": "a", "\ud800": {}}, "\\ud800"),
    ("segment", {"image_url": "AAAA", "object": "\ud800"}, "object"),
    ("chat/completions", {**CHAT, "\ud800": 1}, "\\ud800"),
    ("chat/completions", {**CHAT, "model": "\ud800"}, "model"),
    ("chat/completions", {**CHAT, "user": "\ud800"}, "user"),
    ("chat/completions", {**CHAT, "metadata": {"\ud800": "a"}}, "metadata.\\ud800"),
    ("chat/completions", {**CHAT, "metadata": {"a": "\ud800"}}, "metadata.a"),
    (
        "chat/completions",
        {"model": "fake", "messages": [{"role": "user", "content": "\ud800"}]},
        "messages[0].content",
    ),
    (
        "chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        "tools[0].function.name",
    ),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "\ud800", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    ("completions", {"model": "fake", "prompt": "\ud800"}, "prompt"),
    ("completions", {"model": "fake", "prompt": "?", "\ud800": 1}, "\\ud800"),
)


async def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_its_field():
    async with serving_http() as rig:
        for path, body, field in FIELDS:
            answer = await rig.ask(f"/v1/{path}", body)
            assert answer.status == 400
            assert f"{field}: {HALF}" in answer.json["error"]["message"]
        assert rig.engine.requests == []


LONG = "x" * 140_000  # in a body that is searched for long texts
A_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [LONG]}}}}}
A_FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"const": LONG}}}}
LONG_TEXTS: tuple[tuple[str, Any, str], ...] = (
    ("query", {"question": LONG}, "question"),
    ("query", {"question": "?", "settings": {"stop": ["a", LONG]}}, "settings.stop[1]"),
    ("query", {"question": "?", "constraint": {"choices": [LONG]}}, "constraint.choices[0]"),
    ("query", {"question": "?", "constraint": {"json_schema": {"const": LONG}}}, "constraint.json_schema"),
    ("query", {"question": "?", "constraint": {"json_schema": {"enum": [[LONG]]}}}, "constraint.json_schema"),
    ("completions", {"model": "fake", "prompt": [LONG]}, "prompt[0]"),
    ("chat/completions", {**CHAT, "stop": [LONG]}, "stop[0]"),
    ("chat/completions", {**CHAT, "tools": [A_TOOL]}, "tools"),
    ("chat/completions", {**CHAT, "tools": [A_TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    ("chat/completions", {**CHAT, "structured_outputs": {"json": {"const": LONG}}}, "structured_outputs.json"),
    ("responses", {"model": "fake", "input": "?", "tools": [A_FLAT_TOOL]}, "tools"),
    ("responses", {"model": "fake", "input": "?", "include": [LONG]}, "include[0]"),
    (
        "responses",
        {"model": "fake", "input": "?", "text": {"format": {"type": "text", "schema": {"const": LONG}}}},
        "text.format.schema",
    ),
    (
        "responses",
        {"model": "fake", "input": "?", "text": {"format": {"type": "json_schema", "schema": {"title": LONG}}}},
        "text.format.schema",
    ),
    ("query", {"question": "?", "constraint": {"json_schema": {"properties": {LONG: {}}}}}, "name of more than"),
    ("query", {"question": "?", LONG: 1}, "name of more than"),
)


async def test_a_text_that_is_too_long_is_refused_wherever_it_is():
    async with serving_http() as rig:
        for path, body, named in LONG_TEXTS:
            answer = await rig.ask(f"/v1/{path}", body)
            assert (answer.status, named in answer.json["error"]["message"]) == (400, True), answer.json
        assert rig.engine.requests == []


@pytest.mark.parametrize(
    "filling", ["x" * 20, 'x\\"' * 5, "x\\\\"], ids=["plain", "with quotes", "before a backslash"]
)
@pytest.mark.parametrize("more", [-1, 0, 1, 40_000], ids=["fewer", "the most", "one more", "far more"])
def test_a_large_body_has_a_limited_number_of_texts_whatever_they_hold(filling: str, more: int):
    body = ('{"a": [' + ", ".join([f'"{filling}"'] * (MAX_TEXTS - 1 + more)) + "]}").encode()
    body += b" " * max(0, 2**18 - len(body))  # smaller bodies are not checked
    if more > 0:
        with pytest.raises(InvalidRequest, match=r"more than 20000 texts|more than 1048576 bytes"):
            parse_json(body, refuse)
    else:
        assert len(parse_json(body, refuse)["a"]) == MAX_TEXTS - 1 + more


@pytest.mark.parametrize("length", [2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("before", ["", "x", 'x\\"'])
def test_texts_are_long_from_one_length_on(length: int, before: str):
    text = "y" * length
    others = json.dumps(["z" * 1000] * 140)
    found = parse_json(f'{{"a": "{before}", "b": "{text}", "c": {others}}}'.encode(), refuse)
    assert isinstance(found["b"], LongText) is (length >= 2**16)
    assert found["c"] == ["z" * 1000] * 140
    assert (found["b"].ascii_bytes().decode() if isinstance(found["b"], LongText) else found["b"]) == text
