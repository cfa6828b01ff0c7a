"""The numbers of complete answers are compared with their schema exactly."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from kestrel_runtime.api.constraints import parse_schema
from kestrel_runtime.constraints.answer_check import AnswerCheck

ID = 2**62 + 1


def miss(schema: Any, answer: str) -> str | None:
    check = AnswerCheck.of(parse_schema(json.dumps(schema)))
    assert check is not None
    return check.miss(answer)


@pytest.mark.parametrize(
    ("schema", "answer", "place"),
    [
        ({"const": ID}, str(ID), None),
        ({"const": ID}, str(ID - 1), ""),
        ({"const": 1}, "true", ""),
        ({"const": 1}, "1.0", None),
        ({"enum": [True, 2]}, "1", ""),
        ({"enum": [[ID]]}, f"[{ID}]", None),
        ({"properties": {"a/b": {"items": {"maximum": 0.1}}}}, '{"a/b": [0.1, 0.10000000000000001]}', "/a~1b/1"),
        ({"exclusiveMinimum": 0}, "-0.0", ""),
        ({"exclusiveMinimum": True, "minimum": 3}, "3", ""),
        ({"minimum": 3, "exclusiveMinimum": False}, "3", None),
        ({"multipleOf": 0.1}, "0.30", None),
        ({"multipleOf": 0.1}, "0.35", ""),
        ({"multipleOf": 3}, f"{3 * ID}", None),
        ({"type": "integer", "maximum": 5}, "1e0", None),
        ({"type": "integer", "maximum": 5}, "1.5", ""),
        ({"type": "integer", "nullable": True, "maximum": 5}, "null", None),
        ({"anyOf": [{"const": 1}, {"minimum": 5}]}, "3", ""),
        ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"maximum": 2}}}, "3", ""),
        ({"prefixItems": [True, {"maximum": 2}], "items": {"maximum": 9}}, "[7, 2, 9, 10]", "/3"),
        ({"items": [{"maximum": 2}], "additionalItems": {"maximum": 9}}, "[2, 10]", "/1"),
        ({"properties": {"a": True}, "additionalProperties": {"maximum": 2}}, '{"a": 3, "b": 3}', "/b"),
        ({"patternProperties": {"^a": True}, "additionalProperties": {"maximum": 2}}, '{"a": 3}', None),
        ({"$ref": "#", "minimum": 2}, "3", None),
        ({"pattern": "^x", "maximum": 3}, '"y"', None),
    ],
)
def test_a_check_names_the_place_of_a_value_that_is_not_allowed(schema: Any, answer: str, place: str | None):
    assert miss(schema, answer) == place


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"enum": ["a"]}, {"properties": {"minimum": True}}])
def test_nothing_is_checked_where_a_schema_bounds_no_number(schema: dict[str, Any]):
    assert AnswerCheck.of(schema) is None


def is_integer(_: object, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and value == int(value)


ExactValidator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
)


def drawn(chance: random.Random, depth: int) -> Any:
    """A schema that is mostly of numbers."""
    number = [0, 1, -2, 7, 2**53 + 1, ID, 0.5, -1.25, 1e20]
    kinds = ["const", "enum", "bounds", "bounds", "steps"]
    kind = chance.choice(kinds if depth == 0 else [*kinds, "object", "array", "anyOf", "allOf", "ref"])
    if kind == "const":
        return {"const": chance.choice(number)}
    if kind == "enum":
        return {"enum": chance.sample(number, 3)}
    if kind == "bounds":
        names = chance.sample(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], 2)
        return {"type": chance.choice(["integer", "number"])} | {name: chance.choice(number) for name in names}
    if kind == "steps":
        return {"multipleOf": chance.choice([0.5, 2, 7, 0.01])}
    if kind == "object":
        return {
            "properties": {name: drawn(chance, depth - 1) for name in "ab"},
            "required": ["a"],
            "additionalProperties": drawn(chance, depth - 1),
        }
    if kind == "array":
        return {"prefixItems": [drawn(chance, depth - 1)], "items": drawn(chance, depth - 1), "maxItems": 3}
    if kind == "ref":
        return {"$ref": "#/$defs/other"}
    return {kind: [drawn(chance, depth - 1) for _ in range(2)]}


def value_of(chance: random.Random, depth: int) -> Any:
    if depth and chance.random() < 0.5:
        if chance.random() < 0.5:
            return {name: value_of(chance, depth - 1) for name in chance.sample("abc", chance.randint(0, 3))}
        return [value_of(chance, depth - 1) for _ in range(chance.randint(0, 4))]
    return chance.choice([0, 1, -2, 7, 14, 2**53, 2**53 + 1, ID, ID - 1, 0.5, -1.25, 1e20, 3.5, True, None, "a"])


def test_a_number_whose_exponent_no_decimal_has_misses_its_bounds():
    check = AnswerCheck.of(parse_schema('{"maximum": 5}'))
    assert check is not None
    assert check.miss("1e9999999999999999999") == ""
    assert check.miss("1e-9999999999999999999") is None
    assert check.miss("0E9999999999999999999") is None


@pytest.mark.parametrize("seed", range(4))
def test_a_check_finds_what_jsonschema_finds(seed: int):
    chance, outcomes = random.Random(seed), set[bool]()
    for _ in range(200):
        schema = {**drawn(chance, 3), "$defs": {"other": drawn(chance, 0)}}
        exact = parse_schema(json.dumps(schema))
        check, validator = AnswerCheck.of(exact), ExactValidator(exact)
        for _ in range(10):
            answer = json.dumps(value_of(chance, 3))
            is_valid = validator.is_valid(json.loads(answer, parse_float=Decimal))
            assert check is not None
            assert (check.miss(answer) is None) == is_valid, (schema, answer)
            outcomes.add(is_valid)
    assert outcomes == {True, False}
