"""Follows the tokens of one constrained answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llguidance

from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.constraints.json_answer import JsonAnswer, JsonTokens, Mask
from kestrel_runtime.interfaces.tokens import Token


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """What a constraint has been compiled to, for any number of answers."""

    library: llguidance.LLMatcher
    """At the start of an answer, to be copied for each."""
    end_id: int
    json: JsonTokens | None = None
    """None where the answer is no JSON."""
    rest_tokens: int = 0
    min_text_tokens: int = 0
    """The two as `JsonAnswer` says."""

    def new_json(self, max_tokens: int) -> JsonAnswer | None:
        """The start of an answer of at most `max_tokens`."""
        if self.json is None:
            return None
        return JsonAnswer(self.json, max_tokens, self.rest_tokens, self.min_text_tokens)


class AnswerMatcher:
    """A `TokenMatcher`. What comes before the answer is free."""

    def __init__(self, compiled: CompiledConstraint, opens_answer: int | None, max_tokens: int) -> None:
        """`opens_answer`: the token before the answer; None where the answer comes first.

        `max_tokens`: that the sequence generates.
        """
        self.library = compiled.library.deep_copy()
        self._compiled = compiled
        self._opens_answer = opens_answer
        self._max_tokens = max_tokens
        self._restart()

    def _restart(self) -> None:
        self._num_taken = 0
        self.is_in_answer = self._opens_answer is None
        """Whether the next token belongs to the answer."""
        self._json = self._compiled.new_json(self._max_tokens) if self.is_in_answer else None

    def take(self, generated: Sequence[Token]) -> None:
        """Follow the sequence. Where tokens were taken back, it is followed anew from its beginning."""
        if len(generated) < self._num_taken:
            self.library.reset()
            self._restart()
        while self._num_taken < len(generated):
            token_id = generated[self._num_taken].id
            self._num_taken += 1
            if not self.is_in_answer:
                self.is_in_answer = token_id == self._opens_answer
                if self.is_in_answer:
                    self._json = self._compiled.new_json(self._max_tokens - self._num_taken)
            elif token_id != self._compiled.end_id:
                if not self.library.consume_token(token_id):
                    raise ConstraintFailed
                if self._json is not None:
                    self._json.follow(token_id)

    def narrow(self, mask: Mask) -> None:
        """Remove from the tokens that the constraint allows what keeps the answer from its end."""
        if self._json is not None:
            self._json.narrow(mask)
