"""How large expressions are once written out."""

from __future__ import annotations

import pytest

from kestrel_runtime.api.constraints.regex_size import (
    MAX_GROUP_DEPTH,
    MAX_REGEX_CHARS,
    MAX_WRITTEN_OUT,
    regex_violation,
)


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
def test_a_small_expression_is_taken(pattern: str) -> None:
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
def test_repetitions_are_counted(pattern: str) -> None:
    told = regex_violation(pattern)
    assert told is not None
    assert str(MAX_WRITTEN_OUT) in told


def test_long_and_deep_expressions_are_refused() -> None:
    assert regex_violation("a" * (MAX_REGEX_CHARS + 1)) == f"must be at most {MAX_REGEX_CHARS} characters long"
    assert f"{MAX_GROUP_DEPTH} levels" in (regex_violation("(" * 1000) or "")
