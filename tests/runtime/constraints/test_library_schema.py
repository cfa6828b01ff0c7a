"""Schemas as libraries write them, and the numbers that answers under a schema may have."""

import json
import lzma
import random
import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.exact_grammar import whole_numbers
from tests.runtime.constraints.vocabularies import END_ID, TOKENIZER, new_compiler

WRITTEN_BY_LIBRARIES: dict[str, dict[str, list[Any]]] = json.loads(
    lzma.decompress(Path(__file__).with_name("schemas_of_libraries.json.xz").read_bytes())
)
"""By library and version, and by the name of a type: the schema that it writes, and a value of the type."""


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return new_compiler()


def compiled(compiler: ConstraintCompiler, schema: Any) -> llguidance.LLMatcher:
    constraint = Constraint(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    violations = list(constraint.violations())
    if violations:
        raise InvalidRequest(tuple(violations))
    return compiler.compiled(constraint, END_ID).library


def takes(library: llguidance.LLMatcher, answer: str) -> bool:
    """Returns whether the answer can come."""
    tokens, copied = TOKENIZER.encode(answer), library.deep_copy()
    return copied.try_consume_tokens(tokens) == len(tokens) and copied.is_accepting()


def refusal(compiler: ConstraintCompiler, schema: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiled(compiler, schema)
    return "; ".join(violation.description for violation in caught.value.violations)


# Schemas as libraries write them


@pytest.mark.parametrize("library", WRITTEN_BY_LIBRARIES)
def test_every_type_of_pydantic_and_zod_is_served(compiler: ConstraintCompiler, library: str):
    for name, (schema, value) in WRITTEN_BY_LIBRARIES[library].items():
        assert takes(compiled(compiler, schema), json.dumps(value, ensure_ascii=False)), (name, schema)


def test_the_values_in_the_table_are_valid():
    for library, schemas in WRITTEN_BY_LIBRARIES.items():
        for name, (schema, value) in schemas.items():
            if "openapi" not in library and name != "emoji":  # which Python knows nothing of
                jsonschema.validate(value, schema)


PET = {
    "$defs": {
        "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}},
        "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "lives": {"type": "integer"}}},
    },
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
WRONG: list[tuple[Any, Any]] = [
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "integer"}}, {"b": 1}),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "integer"}}, {"a": "x"}),
    ({"type": "object", "propertyNames": {"pattern": "^x-"}}, {"y": 1}),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, {"abc": 1}),
    ({"type": "object", "propertyNames": False}, {"a": 1}),
    ({"type": "string", "nullable": False}, None),
    ({"type": "string", "format": "uuid"}, "x"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, 6),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, "-."),
    (PET, {"lives": 3}),
    (PET, {"kind": "cow", "lives": 3}),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}], "anyOf": [{"type": "string"}, {"type": "null"}]}, 3),
]


@pytest.mark.parametrize(("schema", "value"), WRONG)
def test_what_a_rewritten_schema_excludes_cannot_come(compiler: ConstraintCompiler, schema: Any, value: Any):
    assert not takes(compiled(compiler, schema), json.dumps(value))


KEYWORDS = (
    "format",
    "enum",
    "const",
    "minimum",
    "title",
    "default",
    "discriminator",
    "not",
    "oneOf",
    "$ref",
    "x-a",
)


def test_properties_that_are_named_like_keywords_stay(compiler: ConstraintCompiler):
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "title": "dropped", "format": "int32"} for name in KEYWORDS},
        "required": list(KEYWORDS),
        "additionalProperties": False,
    }
    library = compiled(compiler, schema)
    assert takes(library, json.dumps(dict.fromkeys(KEYWORDS, 3)))
    assert not takes(library, json.dumps(dict.fromkeys(KEYWORDS, "x")))


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_data_that_look_like_schemas_stay(compiler: ConstraintCompiler, keyword: str):
    value = {
        "title": "t",
        "format": "color",
        "oneOf": [1],
        "enum": [2**40],
        "exclusiveMinimum": 0,
        "nullable": True,
    }
    schema = {keyword: value if keyword == "const" else [value], "default": {"minimum": "x"}, "examples": [value]}
    assert takes(compiled(compiler, schema), json.dumps(value))


NESTED = (
    "items",
    "additionalProperties",
    "properties",
    "patternProperties",
    "prefixItems",
    "allOf",
    "anyOf",
    "$ref",
)


@pytest.mark.parametrize("place", NESTED)
def test_schemas_are_rewritten_wherever_they_stand(compiler: ConstraintCompiler, place: str):
    inner = {"type": "integer", "format": "int64", "example": 1, "minimum": -(2**63), "maximum": 2**63 - 1}
    schema: dict[str, Any] = {
        "items": {"type": "array", "items": inner},
        "additionalProperties": {"type": "object", "additionalProperties": inner},
        "properties": {"type": "object", "properties": {"a": inner}},
        "patternProperties": {"type": "object", "patternProperties": {"^a": inner}},
        "prefixItems": {"type": "array", "prefixItems": [inner]},
        "allOf": {"allOf": [inner, {"title": "t"}]},
        "anyOf": {"anyOf": [inner, {"type": "null", "x-a": 1}]},
        "$ref": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": inner}},
    }[place]
    value: Any = [5] if "tems" in place else {"a": 5} if "roperties" in place else 5
    assert takes(compiled(compiler, schema), json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"minItems": 3, "maxItems": 2, "type": "array"},
            "/p cannot be used: minItems (3) is greater than maxItems (2)",
        ),
        (
            {"pattern": "(?=a)b", "type": "string"},
            "/p/pattern cannot be used: the expression is refused: look-around",
        ),
        (
            {"pattern": "a(b", "type": "string"},
            "/p/pattern cannot be used: the expression is refused: unclosed group",
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "/p/oneOf cannot be used: its parts must exclude each other",
        ),
        ({"type": "colour"}, "/p cannot be used: Invalid type: colour"),
        ({"$ref": "#/$defs/missing"}, "/p cannot be used: $ref points to nothing"),
        ({"items": {"type": "array", "minItems": -1}}, "/p/items cannot be used: Expected positive integer"),
        (
            {"type": "number", "multipleOf": 0.07},
            "/p/multipleOf is a number that the grammar cannot express exactly",
        ),
        (
            {"allOf": [{"enum": [3, 2**62 + 1]}, {"type": "integer"}]},
            "/p/allOf/0/enum/1 is a number that the grammar cannot express exactly",
        ),
        (
            {"type": "integer", "minimum": 2**62 + 1, "maximum": 2**62 + 2, "multipleOf": 5},
            "/p/maximum is a number",
        ),
        ({"minimum": 2**64, "type": "integer"}, "/p/minimum is a number that"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "/p/propertyNames is one rule of names"),
        ({"uniqueItems": True}, "/p/uniqueItems is not supported"),
    ],
)
def test_a_refusal_names_the_place_and_the_cause(compiler: ConstraintCompiler, schema: Any, said: str):
    schema = {"type": "object", "properties": {"o": {"type": "null"}, "p": schema}, "required": ["p"]}
    assert refusal(compiler, schema).startswith(f"/properties{said}")


def test_a_refusal_in_a_definition_names_the_definition(compiler: ConstraintCompiler):
    schema = {"$defs": {"a/b": {"type": "string", "minLength": 3, "maxLength": 2}}, "$ref": "#/$defs/a~1b"}
    assert refusal(compiler, schema) == "/$defs/a~1b cannot be used: minLength (3) is greater than maxLength (2)"


def test_an_expression_that_is_refused_says_why(compiler: ConstraintCompiler):
    for regex, said in (
        (r"(a)\1", "backreferences"),
        ("a(b", "unclosed group"),
        ("[z-a]", "character class range"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            compiler.compiled(Constraint(regex=regex), END_ID)


# Numbers

BOUNDS = (
    *("0", "1", "-1", "0.5", "-0.5", "0.75", "0.1", "2.5", "10", "999", "1e3", "1.5e-3", "-2.25", "1.0", "-0.0"),
    *("0.99", "100.25", "1e-7", "-1e-9", "5e-324", "0.30000000000000004", "0.1000000000000000055511151231257827"),
    *("9007199254740991", "9007199254740993", "-9007199254740993", "1234567890123456789", "1e18", "-1e18"),
    *("9223372036854775807", "-9223372036854775808", "3.4028234663852886e38", "-1.7976931348623157e308"),
)
STEPS = ("0", "1", "-1", "0.5", "-0.5", "1e-17", "-1e-17", "1e-3", "2", "-2", "64", "-64")


def texts_near(bound: str) -> Iterator[str]:
    for step in STEPS:
        with localcontext(prec=400):
            text = format(Decimal(bound) + Decimal(step), "f")
        if len(text) < 60:
            yield text
            yield text.rstrip("0").rstrip(".") if "." in text else text + ".0"


@pytest.mark.parametrize("seed", range(8))
def test_numbers_that_can_come_are_those_that_jsonschema_allows(compiler: ConstraintCompiler, seed: int):
    """Near the bounds, where doubles and decimals differ."""
    chance, num_taken = random.Random(seed), 0
    for _ in range(60):
        names = chance.sample(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], chance.choice([1, 2, 2, 3])
        )
        bounds = {name: chance.choice(BOUNDS) for name in names}
        kind = chance.choice(['"type": "integer", ', '"type": "number", ', ""])
        step = chance.choice(["", "", "", ', "multipleOf": 0.5', ', "multipleOf": 5'])
        listed = ", ".join(f'"{name}": {bound}' for name, bound in bounds.items())
        text = f"{{{kind}{listed}{step}}}"
        try:
            library = compiled(compiler, text)
        except InvalidRequest:
            continue
        validator = jsonschema.Draft202012Validator(json.loads(text, parse_float=Decimal))
        for number in {near for bound in bounds.values() for near in texts_near(bound)} | {
            "0",
            "-0",
            "0.0",
            "-0.0",
        }:
            if takes(library, number):
                num_taken += 1
                assert validator.is_valid(json.loads(number, parse_float=Decimal)), (text, number)
    assert num_taken > 100


ID = 2**62 + 1
DEEP = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"id": {"const": ID}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["id", "next"],
            "additionalProperties": {"$ref": "#/$defs/name"},
        },
        "name": {"type": "string"},
    },
    "$ref": "#/$defs/node",
}
OPTIONAL = {"type": "object", "properties": {'a/b"c': {"type": "string"}, "id": {"enum": [ID]}}}
UNION = {
    "anyOf": [
        {"const": {"a": [ID, 0.5], "b": {}}},
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"enum": ["x", {"a": 5}]},
        {"type": "integer", "maximum": 9},
    ]
}
TWO_OR_MORE = {"type": "array", "items": {"const": ID}, "minItems": 2}
TUPLE = {"type": "array", "prefixItems": [{"const": ID}, {"type": "string"}], "items": False, "minItems": 2}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": ID}, [ID], [ID - 1, ID + 1, float(ID)]),
        ({"const": 0.30000000000000004}, [0.30000000000000004], [0.3]),
        ({"enum": [ID, ID + 2, "a"], "type": ["integer", "string"]}, [ID, ID + 2, "a"], [ID + 1, 2**62]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, [2**53 + 1], [2**53, 2**53 + 2]),
        (
            {"type": "integer", "minimum": 2**53 + 1, "exclusiveMaximum": 2**60 + 1},
            [2**53 + 1, 2**53 + 3, 2**60 - 1, 2**60],
            [2**53, 2**60 + 1, 0],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": -(2**53) - 1}},
                "required": ["a"],
            },
            [{"a": -(2**53) - 1}, {"a": -(2**53) - 3}, {"a": -(2**62) - 1}],
            [{"a": -(2**53)}, {"a": 0}],
        ),
        ({"type": "integer", "exclusiveMinimum": ID, "exclusiveMaximum": ID + 2}, [ID + 1], [ID, ID + 2]),
        (
            {"type": "integer", "minimum": -(2**63) + 1, "maximum": -(2**63) + 3},
            [-(2**63) + 1, -(2**63) + 3],
            [-(2**63), -(2**63) + 4],
        ),
        ({"type": "integer", "maximum": -(2**63)}, [-(2**63)], [-(2**63) - 1, -(2**63) + 1]),
        ({"type": "integer", "exclusiveMaximum": -(2**63) + 2}, [-(2**63), -(2**63) + 1], [-(2**63) + 2]),
        ({"type": ["integer", "null"], "minimum": 2**63 - 1}, [2**63 - 1, None], [2**63 - 2, 2**63]),
        (OPTIONAL, [{}, {"id": ID}, {'a/b"c': "x", "id": ID, "y": [1]}, {"y": 1}], [{"id": 1}, {"y": 1, "id": 2}]),
        (TWO_OR_MORE, [[ID] * 2, [ID] * 5], [[], [ID], [ID, 1]]),
        ({**TWO_OR_MORE, "maxItems": 2}, [[ID] * 2], [[ID], [ID] * 3]),
        (TUPLE, [[ID, "a"]], [[ID], [ID, "a", 1]]),
        ({"type": "array", "prefixItems": [{"const": ID}]}, [[], [ID, "a"]], [[1]]),
        (
            DEEP,
            [{"id": ID, "next": {"id": ID, "next": None, "x": "y"}}],
            [{"id": ID}, {"id": ID, "next": None, "x": 1}],
        ),
        (UNION, [{"a": [ID, 0.5], "b": {}}, {"a": "s"}, {"b": 1}, "x", {"a": 5}, 7], [{"a": [ID]}, {"a": 6}, ID]),
    ],
)
def test_numbers_that_no_double_is_come_as_they_are(
    compiler: ConstraintCompiler, schema: Any, right: list[Any], wrong: list[Any]
):
    library = compiled(compiler, schema)
    assert [value for value in right if not takes(library, json.dumps(value))] == []
    assert [value for value in wrong if takes(library, json.dumps(value))] == []


def test_bounds_where_only_the_library_reads_the_schema_exclude_numbers_next_to_them_and_allow_no_others(
    compiler: ConstraintCompiler,
):
    own = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**53 + 1}}, "required": ["a"]}
    library = compiled(compiler, {"allOf": [own, {"type": "object", "properties": {"b": {"type": "string"}}}]})
    assert takes(library, json.dumps({"a": 2**53 + 2, "b": "x"}))
    assert not takes(library, json.dumps({"a": 2**53 + 1}))
    assert not takes(library, json.dumps({"a": 2**53}))


@pytest.mark.parametrize("least", [-123, -100, -7, 0, 1, 9, 10, 99, 100, 101])
def test_an_expression_of_whole_numbers_has_those_alone(least: int):
    for most in (least, least + 1, least + 9, least + 10, least + 101, least + 905):
        expression = re.compile(whole_numbers(least, most).strip("/"))
        found = [number for number in range(-1300, 1300) if expression.fullmatch(str(number))]
        assert found == list(range(least, most + 1))
