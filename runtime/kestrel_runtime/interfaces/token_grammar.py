"""The tokens that a sequence may continue with: a small automaton over tokens.

Every rule's successor is known from the token drawn alone, so that a step can be begun before the tokens of the
last one have been read. Plain data; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kestrel_runtime.interfaces.tokens import TokenRule


class GrammarState(NamedTuple):
    """The rule of one token, and the state after it: that of `on`, else of `exhausted`, else `then`."""

    rule: TokenRule
    then: int
    on: tuple[int, int] | None = None
    """(token id, the state after that token)."""
    exhausted: int | None = None
    """The state after the token that spends the budget, and after any later one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """States by number; every sequence begins in the first."""

    states: tuple[GrammarState, ...]

    def after(self, state: int, token_id: int, *, is_exhausted: bool) -> int:
        """The state that follows `token_id`; `is_exhausted`: whether the budget is spent, this token counted."""
        _, then, on, exhausted = self.states[state]
        if on is not None and token_id == on[0]:
            return on[1]
        return exhausted if is_exhausted and exhausted is not None else then

    @property
    def rules(self) -> tuple[TokenRule, ...]:
        return tuple(state.rule for state in self.states)
