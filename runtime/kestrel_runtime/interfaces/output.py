"""Parses the sampled tokens of one answer to events for the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kestrel_runtime.api.events import FinishReason, Output, Piece
from kestrel_runtime.interfaces.token_grammar import Grammar
from kestrel_runtime.interfaces.tokens import Token, TokenRule


class OutputParser(ABC):
    """Parses the tokens of one sequence. `grammar` says which tokens may come, `consume` takes those that came.

    After `finish_reason` is set no further token is consumed, and `output` is the whole answer. A worker makes it;
    then it belongs to the engine loop thread.
    """

    grammar: Grammar
    budget: int | None = None
    """Number of tokens after which the grammar's exhausted states apply; None for no limit."""
    max_tokens: int | None = None
    """`finish_reason` is set by this many tokens at the latest, so that no further ones need be sampled; None where
    only the context limits them."""
    end_id: int | None = None
    """The token that ends the answer; None where no constraint can be put on it."""
    opens_answer: int | None = None
    """The token after which the answer begins, behind reasoning; None where it begins at once."""
    state: int = 0
    """The state of the grammar that rules the next token."""
    num_consumed: int = 0
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    """The stop string that ended the answer, if one did."""

    @property
    def rule(self) -> TokenRule:
        """The rule of the next token."""
        return self.grammar.states[self.state].rule

    def consume(self, token: Token) -> Sequence[Piece]:
        """Take the next token; returns the pieces of the answer that it completes."""
        self.num_consumed += 1
        is_exhausted = self.budget is not None and self.num_consumed >= self.budget
        self.state = self.grammar.after(self.state, token.id, is_exhausted=is_exhausted)
        return self.parse(token)

    @abstractmethod
    def parse(self, token: Token) -> Sequence[Piece]:
        """Interpret the next token; returns the pieces of the answer that it completes."""

    def truncate(self) -> Sequence[Piece]:
        """End the answer here because the context is full; returns the pieces that were still held back."""
        self.finish_reason = FinishReason.LENGTH
        return []

    @abstractmethod
    def output(self) -> Output:
        """The answer as far as it has been parsed."""
