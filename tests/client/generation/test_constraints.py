"""Constraints of queries, from arguments to messages."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel_client import InvalidRequest
from kestrel_client.generation.constraints import constraint
from kestrel_client.v1 import generation_pb2


def test_what_is_left_out_is_no_constraint() -> None:
    assert constraint(None, None, None) is None


def test_each_argument_is_a_kind() -> None:
    choices = generation_pb2.Choices(values=["a", "b"])
    assert constraint(["a", "b"], None, None) == generation_pb2.Constraint(choices=choices)
    assert constraint(None, "a+", None) == generation_pb2.Constraint(regex="a+")
    assert constraint(None, None, "{}") == generation_pb2.Constraint(json_schema="{}")
    assert constraint(None, None, {"b": 1, "a": [True]}) == generation_pb2.Constraint(
        json_schema='{"b": 1, "a": [true]}'
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((["a"], "a", None), "regex"),
        ((["a"], "a", {}), "regex"),
        ((None, "a", {}), "json_schema"),
        (("yes", None, None), "choices"),
        (([1], None, None), "choices"),
        ((None, None, {"const": object()}), "json_schema"),
        ((None, None, {"const": float("nan")}), "json_schema"),
    ],
)
def test_arguments_that_are_wrong_are_named(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(*given)
    assert [violation.field for violation in caught.value.violations] == [field]
