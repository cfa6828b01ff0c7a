"""Answers in JSON end within their tokens, and stay valid, whatever a model would write."""

import json
import random
from collections.abc import Callable
from typing import Any, cast

import jsonschema
import numpy as np
import pytest

from bench.harness.random_schemas import random_schema
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.json_answer import MAX_NESTING, TEXT_SHARE
from kestrel_runtime.constraints.masks import AnswerMatcher, LibraryMasks, MaskRequest
from kestrel_runtime.output.output_parser import Token
from tests.runtime.constraints.vocabularies import END_ID, TOKENIZER, VOCAB_SIZE, new_compiler

Choose = Callable[[list[int]], int]

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "count", "size", "tags"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"value": {}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
UNBOUNDED: list[dict[str, Any]] = [
    {},
    {"type": "integer"},
    {"type": "number"},
    {"type": "number", "maximum": -0.5},
    {"type": "string"},
    {"type": "string", "minLength": 30},
    {"type": "array"},
    {"type": "array", "items": RECORD},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": ["string", "integer"]}}]},
    RECORD,
    TREE,
]


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return new_compiler()


def written(compiler: ConstraintCompiler, schema: dict[str, Any], max_tokens: int, choose: Choose) -> str | None:
    """The answer of a model that chooses so; None where it does not end within `max_tokens`."""
    compiled = compiler.compiled(Constraint(json_schema=json.dumps(schema)), END_ID)
    matcher, generated, maker = (
        AnswerMatcher(compiled, None, max_tokens),
        list[Token](),
        LibraryMasks(VOCAB_SIZE, 1),
    )
    while len(generated) < max_tokens:
        (mask,) = maker.masks([MaskRequest(matcher, generated)])
        assert isinstance(mask, np.ndarray)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        token_id = choose(allowed)
        if token_id == END_ID:
            return TOKENIZER.decode(token.id for token in generated)
        generated.append(Token(token_id))
    return None


def never_ending(seed: int, likes: str) -> Choose:
    """What goes on for as long as it may: any token that ends nothing, those with characters of `likes` first."""
    chance = random.Random(seed)

    def choose(allowed: list[int]) -> int:
        going_on = [token_id for token_id in allowed if not set(TOKENIZER.token_bytes(token_id)) & set(b'"]}')]
        going_on = [token_id for token_id in going_on if token_id != END_ID] or allowed
        liked = [token_id for token_id in going_on if set(TOKENIZER.token_bytes(token_id)) & set(likes.encode())]
        return chance.choice(liked or going_on)

    return choose


@pytest.mark.parametrize("likes", ["", "0123456789", "[{,"])
@pytest.mark.parametrize("schema", UNBOUNDED)
def test_an_answer_ends_whatever_the_model_goes_on_with(
    compiler: ConstraintCompiler, schema: dict[str, Any], likes: str
):
    answer = written(compiler, schema, 120, never_ending(1, likes))
    assert answer is not None
    jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_schema_asks_for_still_comes(compiler: ConstraintCompiler, seed: int):
    schema = random_schema(random.Random(seed))
    for max_tokens in (40, 200):
        answer = written(compiler, schema, max_tokens, never_ending(seed, ""))
        assert answer is not None or max_tokens == 40, schema
        if answer is not None:
            jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {"type": "array", "items": {}}])
def test_numbers_are_those_of_an_int64_or_a_double(compiler: ConstraintCompiler, schema: dict[str, Any]):
    for seed in range(10):
        answer = written(compiler, schema, 100, never_ending(seed, "0123456789.e"))
        assert answer is not None
        numbers: list[str] = []
        json.loads(answer, parse_int=numbers.append, parse_float=numbers.append)
        assert numbers
        for number in numbers:
            assert abs(float(number)) < 1e117
            assert not number.lstrip("-").isdigit() or -(2**63) <= int(number) < 2**63


def test_more_digits_come_where_the_schema_asks_for_them(compiler: ConstraintCompiler):
    for value in (10**30, 1.25e-20, 2**62 + 1, {"ids": [-(2**62) - 1]}):
        answer = written(compiler, {"const": value}, 100, never_ending(1, ""))
        assert answer is not None
        assert json.loads(answer) == value


def one_letter_first(token_id: int) -> tuple[bool, int]:
    spelling = TOKENIZER.token_bytes(token_id)
    return not (len(spelling) == 1 and spelling.isalpha()), token_id


def test_a_text_has_its_share_of_the_tokens_or_what_the_schema_names(compiler: ConstraintCompiler):
    lengths: list[int] = []
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 150}):
        answer = written(compiler, schema, 200, lambda allowed: min(allowed, key=one_letter_first))
        assert answer is not None
        lengths.append(len(json.loads(answer)))
    assert lengths == [200 // TEXT_SHARE, 150]


def nesting(value: Any) -> int:
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    return 1 + max(map(nesting, cast("list[Any]", value)), default=0) if isinstance(value, list) else 0


def test_nesting_is_bounded(compiler: ConstraintCompiler):
    answer = written(compiler, {"type": "array", "items": {"$ref": "#"}}, 200, never_ending(2, "["))
    assert answer is not None
    assert nesting(json.loads(answer)) == MAX_NESTING


def test_tokens_before_the_answer_are_not_the_answers(compiler: ConstraintCompiler):
    opens, compiled = 7, compiler.compiled(Constraint(json_schema='{"type": "string"}'), END_ID)
    maker, thoughts = (
        LibraryMasks(VOCAB_SIZE, 1),
        [Token(token_id) for token_id in TOKENIZER.encode("0 and 1 " * 9)],
    )
    generated = [*thoughts, Token(opens), *map(Token, TOKENIZER.encode('"no'))]
    alone = AnswerMatcher(compiled, None, 40)
    with_thoughts = AnswerMatcher(compiled, opens, 40 + len(thoughts) + 1)
    (expected,) = maker.masks([MaskRequest(alone, generated[len(thoughts) + 1 :])])
    for num_left in (len(thoughts), 0, 0):  # what was taken back is followed anew
        (mask,) = maker.masks([MaskRequest(with_thoughts, generated[: len(generated) - num_left])])
        assert (mask is None) == bool(num_left)
    assert isinstance(mask, np.ndarray)
    assert isinstance(expected, np.ndarray)
    assert mask.tolist() == expected.tolist()
    (late,) = maker.masks([MaskRequest(AnswerMatcher(compiled, opens, len(generated) + 2), generated)])
    assert isinstance(late, np.ndarray)
    assert late.sum() != expected.sum(), "the text ends when the tokens are used up"
