"""Defines grammars, which say which tokens may follow, and parsers, which turn tokens into events for the caller.

A grammar is a small automaton over tokens. The state after a token depends on that token alone, so that a step can
begin before the tokens of the last step have been read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kestrel_runtime.api.events import FinishReason, Output, Piece

OVERFLOWED = -1
"""The id of a token that could not be sampled, because numbers of the model are not finite."""


class Token(NamedTuple):
    """A sampled token. `value` is empty for text, one coordinate in [0, 1] for a coordinate, (width, height) for a
    size."""

    id: int
    value: tuple[float, ...] = ()
    logprob: float | None = None
    """Natural logarithm of the token's probability; None if no sequence of its step asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and logprobs of the most likely tokens, the most likely first; empty without `logprob`."""
    score: float | None = None
    """The confidence in a token with values, from 0 to 1; None for text, and where the model family makes none."""


class TokenRule(NamedTuple):
    """The tokens that may follow in a sequence.

    `allowed` None allows every token except the `suppressed` ones. With `is_spatial` the region heads read a
    coordinate or size token; without, it is a token like any other.
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    is_spatial: bool = False

    def lets_pass(self, token_id: int) -> bool:
        """Returns True if the token is allowed."""
        return token_id not in self.suppressed and (self.allowed is None or token_id in self.allowed)


class GrammarState(NamedTuple):
    """The rule of one token, and the state after it: that of `on`, else of `exhausted`, else `then`."""

    rule: TokenRule
    then: int
    on: tuple[int, int] | None = None
    """A token id, and the state after that token."""
    exhausted: int | None = None
    """The state after the token that spends the budget, and after any later one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """An automaton: states by number. Every sequence begins in state 0."""

    states: tuple[GrammarState, ...]

    def after(self, state: int, token_id: int, *, is_exhausted: bool) -> int:
        """Returns the state after `token_id`; `is_exhausted`: True if the budget is spent, this token included."""
        _, then, on, exhausted = self.states[state]
        if on is not None and token_id == on[0]:
            return on[1]
        return exhausted if is_exhausted and exhausted is not None else then

    @property
    def rules(self) -> tuple[TokenRule, ...]:
        return tuple(state.rule for state in self.states)


class OutputParser(ABC):
    """Parses the tokens of one sequence. `grammar` says which tokens are allowed, `consume` takes the sampled ones.

    After `finish_reason` is set no further token is consumed, and `output` is the whole answer. A worker makes the
    parser; then it belongs to the thread of the engine's loop.
    """

    grammar: Grammar
    budget: int | None = None
    """The number of tokens after which the grammar's exhausted states apply; None for no limit."""
    max_tokens: int | None = None
    """The most tokens before the parser sets `finish_reason`, so that no further tokens need be sampled; None if
    only the context limits them."""
    end_id: int | None = None
    """The token that ends the answer; None for answers that cannot have a constraint."""
    opens_answer: int | None = None
    """The token that ends reasoning and begins the answer; None if the answer begins at once."""
    state: int = 0
    """The state of the grammar for the next token."""
    num_consumed: int = 0
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    """The stop string that ended the answer, or None."""

    @property
    def rule(self) -> TokenRule:
        """The rule of the next token."""
        return self.grammar.states[self.state].rule

    def consume(self, token: Token) -> Sequence[Piece]:
        """Takes the next token; returns the pieces of the answer that it completes."""
        self.num_consumed += 1
        _, then, on, exhausted = self.grammar.states[self.state]
        if on is None and exhausted is None:  # most often
            self.state = then
        else:
            is_exhausted = self.budget is not None and self.num_consumed >= self.budget
            self.state = self.grammar.after(self.state, token.id, is_exhausted=is_exhausted)
        return self.parse(token)

    @abstractmethod
    def parse(self, token: Token) -> Sequence[Piece]:
        """Interprets the next token; returns the pieces of the answer that it completes."""

    def truncate(self) -> Sequence[Piece]:
        """Ends the answer here because the context is full; returns the pieces that were held back."""
        self.finish_reason = FinishReason.LENGTH
        return []

    @abstractmethod
    def output(self) -> Output:
        """Returns the answer as far as it has been parsed."""
