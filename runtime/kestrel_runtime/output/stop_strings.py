"""Finds stop strings in a text that arrives in pieces, and holds back a possible beginning of one.

The text ends where the first of the strings is complete; of strings that are complete at the same place the longest
counts. So the result does not depend on how the text is divided into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Finds stop strings in one text. The time per character does not depend on the number and length of the
    strings.

    Uses the automaton of Aho and Corasick ("Efficient string matching", 1975): there is a state for each beginning
    of a string, and the current state is that of the longest beginning with which the text ends so far.
    """

    def __init__(self, strings: Iterable[str], *, includes_match: bool = False) -> None:
        """Builds the automaton. `strings`: none is empty. `includes_match`: True if the text ends after the found
        string."""
        self._includes_match = includes_match
        self._following: list[dict[str, int]] = [{}]
        self._depths = [0]
        """The length of the beginning, by state."""
        self._found: list[str | None] = [None]
        """The longest string that is complete, by state."""
        for string in strings:
            self._add(string)
        self._shorter = [0] * len(self._depths)
        """The state of the longest shorter beginning with which this one ends, by state."""
        self._link()
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The found string. The text after it is dropped."""

    def push(self, text: str) -> str:
        """Adds text; returns the text that certainly lies before any of the strings, or up to the found string."""
        if self.matched is not None:
            return ""
        num_held, pending = len(self._held), self._held + text
        for index, character in enumerate(text, start=num_held + 1):
            self._state = self._after(self._state, character)
            self.matched = self._found[self._state]
            if self.matched is not None:
                self._held = ""
                return pending[: index if self._includes_match else index - len(self.matched)]
        certain = len(pending) - self._depths[self._state]
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """Ends the text; returns the text that was held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _after(self, state: int, character: str) -> int:
        while state and character not in self._following[state]:
            state = self._shorter[state]
        return self._following[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._following[state]
            if character not in following:
                following[character] = len(self._depths)
                self._following.append({})
                self._depths.append(self._depths[state] + 1)
                self._found.append(None)
            state = following[character]
        self._found[state] = string

    def _link(self) -> None:
        """Sets `_shorter`, for shorter beginnings first, and finds strings that end within longer beginnings."""
        states = deque(self._following[0].values())
        while states:
            state = states.popleft()
            for character, longer in self._following[state].items():
                self._shorter[longer] = self._after(self._shorter[state], character)
                if self._found[longer] is None:
                    self._found[longer] = self._found[self._shorter[longer]]
                states.append(longer)
