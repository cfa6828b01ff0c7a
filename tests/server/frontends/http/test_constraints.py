"""Constraints in JSON: what becomes of each field, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrel_grpc.frontends.http.constraints import (
    CONSTRAINT,
    RESPONSE_FORMAT,
    read_constraint,
    read_response_format,
)
from kestrel_grpc.frontends.http.fields import read
from kestrel_runtime.api.constraints import MAX_CHOICES, Constraint
from kestrel_runtime.api.errors import Violation


def read_one(document: dict[str, Any]) -> tuple[Constraint | None, list[Violation]]:
    violations: list[Violation] = []
    values = read((CONSTRAINT, RESPONSE_FORMAT), document, violations)
    if "response_format" in document:
        return read_response_format(values.get("response_format"), violations), violations
    return read_constraint(values.get("constraint"), violations), violations


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Constraint()),
        ({"choices": ["a", "b"]}, Constraint(choices=("a", "b"))),
        ({"regex": "a+"}, Constraint(regex="a+")),
        ({"json_schema": {"b": 1, "a": "é"}}, Constraint(json_schema='{"b": 1, "a": "é"}')),
        ({"regex": "a", "choices": ["b"]}, Constraint(choices=("b",), regex="a")),
    ],
)
def test_each_field_reaches_the_constraint(given: dict[str, Any], expected: Constraint) -> None:
    assert read_one({"constraint": given}) == (expected, [])


def test_no_constraint_is_none() -> None:
    assert read_one({}) == (None, [])
    assert read_one({"response_format": {"type": "text"}}) == (None, [])


def test_choices_that_are_no_texts_are_named() -> None:
    _, violations = read_one({"constraint": {"choices": ["a", 1, "b", None]}})
    assert [item.field for item in violations] == ["constraint.choices[1]", "constraint.choices[3]"]


def test_of_too_many_choices_no_more_are_read_than_show_it() -> None:
    found, _ = read_one({"constraint": {"choices": ["a"] * 5000}})
    assert found is not None
    assert len(found.choices) == MAX_CHOICES + 1


def test_a_schema_that_is_nested_too_deeply_is_refused_by_the_constraint() -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    found, _ = read_one({"constraint": {"json_schema": schema}})
    assert found is not None
    (violation,) = found.violations()
    assert "levels deep" in violation.description


def test_a_json_object_is_any_object() -> None:
    found, _ = read_one({"response_format": {"type": "json_object"}})
    assert found is not None
    assert json.loads(found.json_schema or "") == {"type": "object"}
