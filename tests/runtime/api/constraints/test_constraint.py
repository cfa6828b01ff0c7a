"""What may be asked of an answer, checked before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrel_runtime.api.constraints.constraint import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_ENUM_VALUES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_NODES,
    Constraint,
)


def problems(constraint: Constraint) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in constraint.violations()]


def schema_problems(schema: Any) -> list[str]:
    found = problems(Constraint(json_schema=schema if isinstance(schema, str) else json.dumps(schema)))
    assert {field for field, _ in found} <= {"constraint.json_schema"}
    return [description for _, description in found]


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(choices=("a",)),
        Constraint(choices=("x" * MAX_CHOICE_CHARS,) * MAX_CHOICES),
        Constraint(regex="a{1,20}"),
        Constraint(json_schema="{}"),
        Constraint(json_schema=json.dumps({"enum": list(range(MAX_ENUM_VALUES))})),
    ],
)
def test_one_kind_within_its_bounds_is_taken(constraint: Constraint) -> None:
    assert problems(constraint) == []


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(),
        Constraint(choices=("a",), regex="a"),
        Constraint(regex="a", json_schema="{}"),
        Constraint(choices=("a",), regex="a", json_schema="{}"),
    ],
)
def test_none_and_several_kinds_are_refused(constraint: Constraint) -> None:
    assert problems(constraint) == [("constraint", "must be exactly one of choices, regex and json_schema")]


def test_every_breach_is_told_at_once() -> None:
    wrong = Constraint(choices=("", "a", "x" * (MAX_CHOICE_CHARS + 1)), regex="", json_schema="[")
    assert [field for field, _ in problems(wrong)] == [
        "constraint",
        "constraint.choices[0]",
        "constraint.choices[2]",
        "constraint.regex",
        "constraint.json_schema",
    ]


def test_too_many_choices_are_one_breach() -> None:
    assert [field for field, _ in problems(Constraint(choices=("",) * (MAX_CHOICES + 1)))] == ["constraint.choices"]


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
def test_a_schema_that_is_too_large_is_one_breach(schema: Any, told: str) -> None:
    (problem,) = schema_problems(schema)
    assert told in problem


def test_each_keyword_that_is_not_supported_is_named_where_it_stands() -> None:
    schema = {
        "if": {},
        "properties": {"a": {"not": {}}, "if": {"items": {"anyOf": [{}, {"uniqueItems": True}]}}},
        "patternProperties": {"^x" + "y" * 40: {"dependentRequired": {}}},
        "$defs": {"b": 3},
        "default": {"if": 1},
        "enum": [{"not": 1}],
    }
    assert schema_problems(schema) == [
        "/if is not supported",
        "/properties/a/not is not supported",
        "/properties/if/items/anyOf/1/uniqueItems is not supported",
        f"/patternProperties/^x{'y' * 30}…/dependentRequired is not supported",
        "/$defs/b must be an object or a boolean",
    ]


def test_the_parts_of_a_schema_that_cost_work_are_bounded() -> None:
    schema = {
        "$defs": {"a": {"enum": list(range(MAX_ENUM_VALUES + 1))}},
        "properties": {"a": {"pattern": "(a{1000}){1000}"}, "b": {"$ref": "https://example.com/schema"}},
        "patternProperties": {"(a{1000}){1000}": {}},
    }
    found = schema_problems(schema)
    assert [problem.split()[0] for problem in found] == [
        "/$defs/a/enum",
        "/properties/a/pattern",
        "/properties/b/$ref",
        "/patternProperties/(a{1000}){1000}",
    ]
