"""Matches names of modules with the keys of PEFT's `alpha_pattern` and `rank_pattern`.

A key is a regular expression and matches a name as in PEFT: `(.*\\.)?(KEY)$`, from the beginning of the name. Keys
come from the files of adapters, and Python's `re` takes exponential time for some expressions. So `re` matches only
keys without repetitions and choices; all others are matched by Rust's regular expressions, which take linear time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Generic, TypeVar

from pydantic import StringConstraints, TypeAdapter, ValidationError

Value = TypeVar("Value")

MAX_KEYS = 2000
MAX_EXPRESSIONS = 64
"""The most keys with more than names in them: compiling each may take some 50 ms."""
MAX_KEY_CHARS = 256
MAX_REPETITIONS = 100
"""Bounds the counts in braces, multiplied with each other: a compiled expression grows with them."""

_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)+\$?", re.ASCII)
# Python and Rust mean the same by these. Without `=` and `!` there is no look-around, without digits behind a
# backslash no reference to a group.
_CHARACTERS = re.compile(r"(?:[\w .^$*+?()|\[\]{},:-]|\\[dDwWsSbBA.^$*+?()|\[\]{}-])+", re.ASCII)
# What Rust reads otherwise, or not at all: possessive repetitions, and sets within sets.
_OTHERWISE_IN_RUST = re.compile(r"(?<!\\)[*+?}]\+|\[[^\]]*\[|\[[^\]]*--|\\b\{")
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class PatternError(ValueError):
    """A key that is not served; the message says why, without the key."""


class NamePatterns(Generic[Value]):
    """Values by key. Of several keys that match a name the first in the file counts."""

    def __init__(self, values: Mapping[str, Value], problems: list[str], field: str) -> None:
        """Adds to `problems` what is wrong with the keys of `field`."""
        self._field = field
        self._entries: list[tuple[str, Callable[[str], bool], Value]] = []
        if len(values) > MAX_KEYS:
            problems.append(f"{field}: has more than {MAX_KEYS} keys")
            return
        num_expressions = 0
        for key, value in values.items():
            is_plain = _PLAIN.fullmatch(key) is not None
            num_expressions += not is_plain
            if num_expressions > MAX_EXPRESSIONS:
                problems.append(f"{field}: more than {MAX_EXPRESSIONS} keys are more than names")
                return
            try:
                self._entries.append((key, _plain(key) if is_plain else _expression(key), value))
            except PatternError as error:
                problems.append(f"{field}: {key[:MAX_KEY_CHARS]!r} {error}")

    def first(self, name: str) -> Value | None:
        """Returns the value of the first key that matches a name; None if none does."""
        return next((value for _, matches, value in self._entries if matches(name)), None)

    def check_use(self, names: Iterable[str], problems: list[str]) -> None:
        """Adds each key that matches none of the names to `problems`."""
        names = tuple(names)
        for key, matches, _ in self._entries:
            if not any(map(matches, names)):
                problems.append(f"{self._field}: {key!r} matches no module of the adapter")


def _plain(key: str) -> Callable[[str], bool]:
    if len(key) > MAX_KEY_CHARS:
        raise PatternError(f"has more than {MAX_KEY_CHARS} characters")
    match = re.compile(_whole(key)).match
    return lambda name: match(name) is not None


def _expression(key: str) -> Callable[[str], bool]:
    if len(key) > MAX_KEY_CHARS:
        raise PatternError(f"has more than {MAX_KEY_CHARS} characters")
    if _CHARACTERS.fullmatch(key) is None or _OTHERWISE_IN_RUST.search(key):
        raise PatternError("has characters or constructs that are not served in the name of a module")
    counts = (max(int(text or 1) for text in found) for found in _COUNT.findall(key))
    if math.prod(max(count, 1) for count in counts) > MAX_REPETITIONS:
        raise PatternError(f"repeats something more than {MAX_REPETITIONS} times")
    try:
        re.compile(_whole(key))
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=f"^{_whole(key)}")])
    except Exception:  # among them one of the library's core, which the library does not export
        raise PatternError("is no regular expression that is served") from None

    def matches(name: str) -> bool:
        try:
            adapter.validate_python(name)
        except ValidationError:
            return False
        return True

    return matches


def _whole(key: str) -> str:
    return rf"(.*\.)?({key})$"
