"""Follows the tokens of one constrained answer."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.interfaces.tokens import Token


class AnswerMatcher:
    """A `TokenMatcher`. What comes before the answer is free."""

    def __init__(self, compiled: llguidance.LLMatcher, end_id: int, opens_answer: int | None) -> None:
        """`opens_answer`: the token before the answer; None where the answer comes first. `end_id` ends it."""
        self.library = compiled
        self._end_id = end_id
        self._opens_answer = opens_answer
        self._num_taken = 0
        self.is_in_answer = opens_answer is None
        """Whether the next token belongs to the answer."""

    def take(self, generated: Sequence[Token]) -> None:
        """Follow the sequence. Where tokens were taken back, it is followed anew from its beginning."""
        if len(generated) < self._num_taken:
            self.library.reset()
            self._num_taken, self.is_in_answer = 0, self._opens_answer is None
        while self._num_taken < len(generated):
            token_id = generated[self._num_taken].id
            self._num_taken += 1
            if not self.is_in_answer:
                self.is_in_answer = token_id == self._opens_answer
            elif token_id != self._end_id and not self.library.consume_token(token_id):
                raise ConstraintFailed
