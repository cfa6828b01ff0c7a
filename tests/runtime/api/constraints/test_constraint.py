"""What may be asked of an answer, checked before anything is compiled."""

from __future__ import annotations

import json

import pytest

from kestrel_runtime.api.constraints.constraint import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_CHOICES_CHARS,
    Constraint,
)


def problems(constraint: Constraint) -> list[tuple[str, str]]:
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


def test_choices_are_bounded_together() -> None:
    assert problems(Constraint(choices=("x" * 65,) * MAX_CHOICES)) == [
        ("constraint.choices", f"must be at most {MAX_CHOICES_CHARS} characters long together")
    ]


def test_too_many_choices_are_one_breach() -> None:
    assert [field for field, _ in problems(Constraint(choices=("",) * (MAX_CHOICES + 1)))] == ["constraint.choices"]
