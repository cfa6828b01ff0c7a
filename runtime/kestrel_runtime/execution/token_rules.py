"""Token grammars as tensors on the device: which tokens each state forbids, and which state follows."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_runtime.interfaces.token_grammar import Grammar
from kestrel_runtime.interfaces.tokens import TokenRule

_MAX_STATES = 64
_NEVER = -1


class TokenRules:
    """One row for each state of every grammar used so far. Rows never move."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._first_row: dict[Grammar, int] = {}
        self._num_rows = 0
        self.forbidden = torch.zeros(_MAX_STATES, vocab_size, dtype=torch.bool, device=device)
        """[states, vocabulary]: whether the token is forbidden."""
        self.is_spatial = torch.zeros(_MAX_STATES, dtype=torch.bool, device=device)
        """[states]: whether tokens with values are sampled with their values."""
        # Per state: the row that follows, the token that leads elsewhere and that row, and the row when exhausted.
        self._successors = torch.full((_MAX_STATES, 4), _NEVER, dtype=torch.int64, device=device)

    def row(self, grammar: Grammar, state: int) -> int:
        """The row of a state; a grammar is added when it is first used."""
        if grammar not in self._first_row:
            self._add(grammar)
        return self._first_row[grammar] + state

    def after(self, rows: Tensor, ids: Tensor, is_exhausted: Tensor) -> Tensor:
        """The rows that follow: rows, ids int64 [B], is_exhausted bool [B] → int64 [B]."""
        then, token, special, exhausted = self._successors[rows].unbind(1)
        then = torch.where(is_exhausted & (exhausted != _NEVER), exhausted, then)
        return torch.where(ids == token, special, then)

    def _add(self, grammar: Grammar) -> None:
        first, self._num_rows = self._num_rows, self._num_rows + len(grammar.states)
        assert self._num_rows <= _MAX_STATES, "skills have a few states each"
        self._first_row[grammar] = first
        for row, (rule, then, on, exhausted) in enumerate(grammar.states, start=first):
            self._forbid(row, rule)
            self.is_spatial[row] = rule.is_spatial
            token, special = (_NEVER, _NEVER) if on is None else (on[0], first + on[1])
            last = _NEVER if exhausted is None else first + exhausted
            self._successors[row] = torch.tensor((first + then, token, special, last))

    def _forbid(self, row: int, rule: TokenRule) -> None:
        if rule.allowed is not None:
            self.forbidden[row] = True
            self.forbidden[row, list(rule.allowed)] = False
        if rule.suppressed:
            self.forbidden[row, list(rule.suppressed)] = True
