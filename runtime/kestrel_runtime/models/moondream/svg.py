"""Converts the path words that the model generates to SVG path text over the unit square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

UNITS_PER_SIDE = 960
"""The integer that stands for the full side of the box."""

_NUM_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_ARC_UNSCALED = {2, 3, 4}  # the rotation and the two flags of an arc are not lengths


def svg_path(words: Sequence[str]) -> str:
    """Join command letters and integers ("-" negates the next) into a path scaled to [0, 1].

    Parsing stops at the first word that is neither, at a first command that is no move, and at an arc whose flags
    are not 0 or 1. An incomplete last group of arguments is dropped. So the result is always valid.
    """
    parts: list[str] = []
    command = ""
    arguments: list[int] = []
    is_first_group = True
    for word in _integers_and_letters(words):
        if isinstance(word, str):
            if not parts and word not in "Mm":
                break
            command, arguments = word, []
            if command in "Zz":
                parts.append(command)
            is_first_group = True
        elif not command or command in "Zz":
            break
        else:
            arguments.append(word)
            if len(arguments) == _NUM_ARGUMENTS[command.upper()]:
                if command in "Aa" and not {0, 1}.issuperset(arguments[3:5]):
                    break
                # A repeated group has no letter. After M it draws lines, as in SVG.
                parts += [command] * is_first_group
                parts += _scaled(command, arguments)
                arguments, is_first_group = [], False
    return " ".join(parts)


def _integers_and_letters(words: Sequence[str]) -> Iterator[str | int]:
    sign = 1
    for word in words:
        digits = word.removeprefix("-")
        if len(digits) < len(word):
            sign = -1
        if digits.isdecimal() and digits.isascii():
            yield sign * int(digits)
            sign = 1
        elif sign == 1 and len(word) == 1 and word.upper() in _NUM_ARGUMENTS:
            yield word
        elif digits:
            return


def _scaled(command: str, arguments: list[int]) -> Iterator[str]:
    for place, value in enumerate(arguments):
        if command in "Aa" and place in _ARC_UNSCALED:
            yield str(value)
        else:
            yield f"{value / UNITS_PER_SIDE:.3f}".rstrip("0").rstrip(".")
