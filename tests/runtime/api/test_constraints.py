"""What may be asked of an answer, checked before anything is compiled."""

import json
from typing import Any

import pytest

from kestrel_runtime.api.constraints import (
    MAX_ALL_OF,
    MAX_ALTERNATIVES,
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_CHOICES_CHARS,
    MAX_ENUM_VALUES,
    MAX_GROUP_DEPTH,
    MAX_LITERAL_CHARS,
    MAX_NAME_CHARS,
    MAX_PROPERTIES,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_NODES,
    MAX_WRITTEN_OUT,
    Constraint,
    regex_violation,
    schema_problems,
)


def violations_of(constraint: Constraint) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in constraint.violations()]


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(choices=("a",)),
        Constraint(choices=("x" * MAX_CHOICE_CHARS,) * 32),
        Constraint(choices=("x" * 64,) * MAX_CHOICES),
        Constraint(regex="a{1,20}"),
        Constraint(json_schema="{}"),
        Constraint(json_schema=json.dumps({"enum": list(range(1000))})),
    ],
)
def test_one_kind_within_its_bounds_is_taken(constraint: Constraint):
    assert violations_of(constraint) == []


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(),
        Constraint(choices=("a",), regex="a"),
        Constraint(regex="a", json_schema="{}"),
        Constraint(choices=("a",), regex="a", json_schema="{}"),
    ],
)
def test_none_and_several_kinds_are_refused(constraint: Constraint):
    assert violations_of(constraint) == [("constraint", "must be exactly one of choices, regex and json_schema")]


def test_every_breach_is_told_at_once():
    wrong = Constraint(choices=("", "a", "x" * (MAX_CHOICE_CHARS + 1)), regex="", json_schema="[")
    assert [field for field, _ in violations_of(wrong)] == [
        "constraint",
        "constraint.choices[0]",
        "constraint.choices[2]",
        "constraint.regex",
        "constraint.json_schema",
    ]


def test_choices_are_bounded_together():
    assert violations_of(Constraint(choices=("x" * 65,) * MAX_CHOICES)) == [
        ("constraint.choices", f"must be at most {MAX_CHOICES_CHARS} characters long together")
    ]


def test_too_many_choices_are_one_breach():
    assert [field for field, _ in violations_of(Constraint(choices=("",) * (MAX_CHOICES + 1)))] == [
        "constraint.choices"
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        "a" * 500,
        "[a-z]{500}",
        "(ab|c){100}",
        "a{,9999}",  # the braces are characters
        "a{x}" * 20,
        r"\{999999\}",
        "[{}999999]{3}",
        "[]{9999}]",
        "[^]{9999}]",
        r"[\]{9999}]",
        "(" * MAX_GROUP_DEPTH + "a" + ")" * MAX_GROUP_DEPTH,
        "a)))",  # wrong, but small
        "a{3",
        "[a",
        r"\p{L",
        r"\p{Letter}{60}",
        "\\",
        "",
    ],
)
def test_a_small_expression_is_taken(pattern: str):
    assert regex_violation(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "a{10000}",
        "a?" * 501,
        r"\x{41}{1001}",
        "a{1,10000}",
        "a{10000,}",
        "a{" + "9" * 1000 + "}",
        "(((a{1000}){1000}){1000})",
        "(a?){5000}a{5000}",
        "((ab|cd){40}x){40}",
        "[^a]{60000}",
        r"\p{L}{1000}",
        "(?:a{100}){100}",
        "(?i)(a{100}b){100}",
        r"[[:alpha:]\]]{9999}",
        "(a{0,100}){0,100}",
    ],
)
def test_repetitions_are_counted(pattern: str):
    told = regex_violation(pattern)
    assert told is not None
    assert str(MAX_WRITTEN_OUT) in told


def test_long_and_deep_expressions_are_refused():
    assert regex_violation("a" * (MAX_REGEX_CHARS + 1)) == f"must be at most {MAX_REGEX_CHARS} characters long"
    assert f"{MAX_GROUP_DEPTH} levels" in (regex_violation("(" * 1000) or "")


def problems(schema: Any) -> list[str]:
    return schema_problems(schema if isinstance(schema, str) else json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"\ud800": 1}, ["/\\ud800"]),
        ({"properties": {"\udfff": {"const": "\ud800"}}}, ["/properties/\\udfff", "/properties/\\udfff/const"]),
        ({"enum": ["a", "\ud800b"], "title": "\ud800"}, ["/enum/1", "/title"]),
        ({"type": "string", "pattern": "\ud800"}, ["/pattern"]),
        ({"enum": ["\U0001f600"]}, []),
    ],
)
def test_a_schema_is_unicode(schema, expected):
    assert problems(schema) == [f"{place} holds half of a surrogate pair" for place in expected]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("no json", "must be JSON"),
        ("[]", "must be an object"),
        ('{"const": NaN}', "must be JSON"),
        ('{"a": 1' + "0" * 5000 + "}", "must be JSON"),
        ("x" * (MAX_SCHEMA_BYTES + 1), f"must be at most {MAX_SCHEMA_BYTES} bytes long"),
        ("é" * (MAX_SCHEMA_BYTES // 2 + 1), f"must be at most {MAX_SCHEMA_BYTES} bytes long"),
        ("[" * 5000, f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep"),
        ('{"items":' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH, "levels deep"),
        ({"examples": [1] * MAX_SCHEMA_NODES}, f"must have at most {MAX_SCHEMA_NODES} names and values"),
    ],
)
def test_a_schema_that_is_too_large_is_one_breach(schema: Any, told: str):
    (problem,) = problems(schema)
    assert told in problem


def test_each_keyword_that_is_not_supported_is_named_where_it_stands():
    schema = {
        "if": {},
        "properties": {"a": {"not": {"type": "null"}}, "if": {"items": {"anyOf": [{}, {"uniqueItems": True}]}}},
        "patternProperties": {"^x" + "y" * 40: {"dependentRequired": {}}},
        "$defs": {"b": 3},
        "default": {"if": 1},
        "enum": [{"not": 1}],
    }
    assert problems(schema) == [
        "/if is not supported",
        "/properties/a/not is not supported, but for {} and booleans",
        "/properties/if/items/anyOf/1/uniqueItems is not supported, unless it is false",
        f"/patternProperties/^x{'y' * 30}…/dependentRequired is not supported",
        "/$defs/b must be an object or a boolean",
    ]


def test_the_parts_of_a_schema_that_cost_work_are_bounded():
    schema = {
        "$defs": {"a": {"enum": list(range(MAX_ENUM_VALUES + 1))}},
        "properties": {"a": {"pattern": "(a{1000}){1000}"}, "b": {"$ref": "https://example.com/schema"}},
        "patternProperties": {"(a{1000}){1000}": {}},
    }
    found = problems(schema)
    assert {problem.split()[0] for problem in found} == {
        "/$defs/a/enum",
        "/properties/a/pattern",
        "/properties/b/$ref",
        "/patternProperties/(a{1000}){1000}",
    }


def any_of(count: int, name: str = "anyOf") -> dict[str, Any]:
    return {name: [{"const": number} for number in range(count)]}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"enum": list(range(MAX_ENUM_VALUES))},
        {"properties": {f"p{number}": True for number in range(MAX_PROPERTIES)}},
        any_of(MAX_ALTERNATIVES),
        {"allOf": [{}] * MAX_ALL_OF},
        {"allOf": [any_of(8), any_of(8)]},
        {"properties": {"a": any_of(8), "b": any_of(200)}},
        {"const": ["x" * MAX_LITERAL_CHARS], "properties": {"x" * MAX_NAME_CHARS: True}},
        {"multipleOf": 0.01},
        {"multipleOf": 10**30},
        {
            "minimum": 5e-324,
            "maximum": 1.7976931348623157e308,
            "not": False,
            "uniqueItems": False,
            "x-a": {"if": 1},
        },
        {"multipleOf": 1000},
        {"multipleOf": 5e30},
        {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
        {"$defs": {"a/b~c": any_of(8)}, "allOf": [{"$ref": "#/$defs/a~1b~0c"}, any_of(8)]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "#/$defs/missing"},
        {"type": ["object", "null"], "title": "t", "description": "d", "$comment": "c", "examples": [{"not": 1}]},
    ],
)
def test_a_schema_within_the_bounds_is_taken(schema: Any):
    assert problems(schema) == []


def chain_of_refs(count: int, depth: int = 0) -> dict[str, Any]:
    """Schemas that each lead to the next one, behind so many lists."""
    defs: dict[str, Any] = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    for _ in range(depth):
        defs = {name: {"items": schema} for name, schema in defs.items()}
    return {"$defs": {**defs, f"a{count}": {}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {f"p{number}": True for number in range(MAX_PROPERTIES + 1)}}, "512 properties"),
        (any_of(MAX_ALTERNATIVES + 1), "256 alternatives"),
        ({"allOf": [{}] * (MAX_ALL_OF + 1)}, "/allOf must be at most 8 schemas"),
        ({"const": [{"a": ["x" * (MAX_LITERAL_CHARS + 1)]}]}, "/const must have texts of at most 2048"),
        (
            {"items": {"enum": [1, {"x" * (MAX_LITERAL_CHARS + 1): 2}]}},
            "/items/enum must have texts of at most 2048",
        ),
        ({"properties": {"x" * (MAX_NAME_CHARS + 1): {}}}, "/properties must have names of at most 256"),
        ({"required": ["a", "x" * (MAX_NAME_CHARS + 1)]}, "/required must have names of at most 256"),
        ({"multipleOf": 9973}, "/multipleOf must be a number"),
        ({"multipleOf": 10**39 + 1}, "/multipleOf must be a number"),
        ({"enum": [1, [10**309]]}, "/enum must have numbers within the range of a double"),
        ('{"maximum": 1e309}', "/maximum must have numbers within the range of a double"),
        ('{"minimum": 1e-999999999}', "/minimum must have numbers within the range of a double"),
        ('{"maximum": 1e9999999999999999999}', "/maximum must have numbers within the range of a double"),
        ('{"const": [-0.1E-9999999999999999999]}', "/const must have numbers within the range of a double"),
        ({"propertyNames": {"if": {}}}, "/propertyNames/if is not supported"),
        ({"multipleOf": 0.12345}, "/multipleOf must be a number"),
        ({"multipleOf": True}, "/multipleOf must be a number"),
        ({"allOf": [any_of(9), any_of(8)]}, "combine at most 64"),
        ({"allOf": [any_of(9, "oneOf"), {"properties": {"a": any_of(8)}}]}, "combine at most 64"),
        ({**any_of(9), **any_of(8, "oneOf")}, "combine at most 64"),
        (
            {"$defs": {"a": any_of(9)}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
            "combine at most 64",
        ),
        ({"allOf": [any_of(2)] * 7}, "combine at most 64"),
        (chain_of_refs(100), "references that lead to each other"),
        (chain_of_refs(60, 27), "references that lead to each other"),
        ({"items": chain_of_refs(0), "$defs": {}, **chain_of_refs(1000)}, "references that lead to each other"),
    ],
)
def test_what_makes_compiling_expensive_is_bounded(schema: Any, told: str):
    (problem,) = problems(schema)
    assert told in problem


def test_combinations_that_definitions_multiply_are_counted_in_little_time():
    defs: dict[str, Any] = {
        f"a{number}": {"allOf": [any_of(2), {"$ref": f"#/$defs/a{number + 1}"}]} for number in range(40)
    }
    (problem,) = problems({"$defs": {**defs, "a40": {}}, "$ref": "#/$defs/a0"})
    assert "combine at most 64" in problem
