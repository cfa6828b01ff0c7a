"""How large a regular expression is once its repetitions are written out. It is only measured, not compiled."""

from __future__ import annotations

MAX_REGEX_CHARS = 2_048
MAX_WRITTEN_OUT = 1_000
"""Characters and classes of an expression with repetitions written out. What `?` and `*` follow counts twice."""
MAX_GROUP_DEPTH = 16
_CLASS_SIZES = {"p": 8, "P": 8, "w": 4, "W": 4}


def regex_violation(pattern: str) -> str | None:
    """The violation of the size limit by an expression, or None. Its syntax is checked elsewhere."""
    if len(pattern) > MAX_REGEX_CHARS:
        return f"must be at most {MAX_REGEX_CHARS} characters long"
    try:
        size = _written_out(pattern)
    except _TooDeepError:
        return f"must have groups at most {MAX_GROUP_DEPTH} levels deep"
    if size > MAX_WRITTEN_OUT:
        return f"must be at most {MAX_WRITTEN_OUT} characters and classes long with its repetitions written out"
    return None


class _TooDeepError(Exception):
    pass


def _written_out(pattern: str) -> int:
    """Sizes of open groups are on a stack; `last` is the size of what a repetition that follows repeats."""
    totals, last, place = [0], 0, 0
    while place < len(pattern):
        character = pattern[place]
        place += 1
        if character == "{":
            most, after = _repetition(pattern, place)
            if most is not None:
                totals[-1] += last * max(most - 1, 0)
                last, place = last * max(most, 1), after
                continue
        if character == "(":
            if len(totals) > MAX_GROUP_DEPTH:
                raise _TooDeepError
            totals.append(0)
            last = 0
        elif character == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif character in "*?":
            totals[-1] += last
        elif character not in "+|":
            last = 1
            if character == "\\":
                last = _CLASS_SIZES.get(pattern[place : place + 1], 1)
                place = _after_escape(pattern, place)
            elif character == "[":
                place = _after_class(pattern, place)
            totals[-1] += last
    return sum(totals)


def _repetition(pattern: str, start: int) -> tuple[int | None, int]:
    """The most repetitions of `{m}`, `{m,}` or `{m,n}` whose inside begins at `start`, and where it ends."""
    end = pattern.find("}", start)
    least, comma, most = pattern[start:end].replace(" ", "").partition(",") if end > 0 else ("", "", "")
    if not least.isdecimal() or (most and not most.isdecimal()):
        return None, start
    # A number with more digits is too large in any case, and `int` takes its time for very long ones.
    return int((most if comma and most else least)[:9]), end + 1


def _after_escape(pattern: str, start: int) -> int:
    """Where the escape ends whose letter is at `start`: that of a property or a code point may have braces."""
    if pattern[start : start + 1] in ("p", "P", "x", "u", "U") and pattern[start + 1 : start + 2] == "{":
        return pattern.find("}", start) + 1 or len(pattern)
    return start + 1


def _after_class(pattern: str, start: int) -> int:
    """Where the class ends whose inside begins at `start`. Classes may be nested."""
    depth, place = 1, start
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    while place < len(pattern) and depth:
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
        place += 1
    return place
