"""Converts the path words that the model generates to SVG path text over the unit square, as they come."""

from __future__ import annotations

from collections.abc import Iterator

UNITS_PER_SIDE = 960
"""The integer that stands for the full side of the box."""

_NUM_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_ARC_UNSCALED = {2, 3, 4}  # the rotation and the two flags of an arc are not lengths
_MAX_DIGITS = 9
_COMMANDS = frozenset("".join(_NUM_ARGUMENTS) + "".join(_NUM_ARGUMENTS).lower())


class PathWriter:
    """Joins command letters and integers ("-" negates the next) into a path scaled to [0, 1].

    Reading stops at the first word that is neither, at a first command other than a move, at an integer of more
    than 9 digits, and at an arc whose flags are not 0 or 1. A group of arguments is written when it is complete,
    and dropped if another command interrupts it. So what is written is a valid path after every word.
    """

    def __init__(self) -> None:
        self.path = ""
        """The path so far."""
        self._is_at_end = False
        self._has_dropped = False
        self._sign = 1
        self._command = ""
        self._arguments: list[int] = []
        self._is_first_group = True

    @property
    def is_partial(self) -> bool:
        """Returns True if some words are not part of the path, or if the path is empty."""
        return not self.path or self._is_at_end or self._has_dropped or self._is_within_command

    def push(self, word: str) -> str:
        """Adds a word; returns what it adds to the path."""
        if self._is_at_end:
            return ""
        parts = self._read(word)
        text = " ".join([""] * bool(parts and self.path) + parts)
        self.path += text
        return text

    def _read(self, word: str) -> list[str]:
        digits = word.removeprefix("-")
        if len(digits) < len(word):
            self._sign = -1
        if digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS:
            sign, self._sign = self._sign, 1
            return self._take_number(sign * int(digits))
        if self._sign == 1 and word in _COMMANDS:
            return self._take_command(word)
        self._is_at_end = bool(digits)
        return []

    def _take_command(self, letter: str) -> list[str]:
        if not self.path and letter not in "Mm":
            self._is_at_end = True
            return []
        self._has_dropped |= self._is_within_command
        self._command, self._arguments, self._is_first_group = letter, [], True
        return [letter] if letter in "Zz" else []

    def _take_number(self, number: int) -> list[str]:
        command = self._command
        if not command or command in "Zz":
            self._is_at_end = True
            return []
        arguments = self._arguments
        arguments.append(number)
        if len(arguments) < _NUM_ARGUMENTS[command.upper()]:
            return []
        if command in "Aa" and not {0, 1}.issuperset(arguments[3:5]):
            self._is_at_end = True
            return []
        # A repeated group has no letter. After M it draws lines, as in SVG.
        parts = [command] * self._is_first_group + list(_scaled(command, arguments))
        self._arguments, self._is_first_group = [], False
        return parts

    @property
    def _is_within_command(self) -> bool:
        """Returns True if an argument is missing: in an incomplete group, after a minus or after a letter."""
        lacks_first = self._command not in ("", "Z", "z") and self._is_first_group
        return lacks_first or bool(self._arguments) or self._sign == -1


def _scaled(command: str, arguments: list[int]) -> Iterator[str]:
    for place, value in enumerate(arguments):
        if command in "Aa" and place in _ARC_UNSCALED:
            yield str(value)
        else:
            yield f"{value / UNITS_PER_SIDE:.3f}".rstrip("0").rstrip(".")
