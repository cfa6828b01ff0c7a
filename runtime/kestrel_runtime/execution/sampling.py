"""Samples token ids on the device, under the settings of each sequence and the rules of its grammar state.

Logits go through these steps, each of which only runs where a row of the batch needs it: penalties and biases
(`LogitAdjustments`), the tokens that the rule forbids, those that a constraint does not allow (`AllowedTokens`),
temperature, top-k, min-p and nucleus (`sample`).

Random numbers are counter-based: those of a token follow from the request's seed and the number of tokens before
it, so that they do not depend on the batch, on preemption, or on failed steps. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_ops import Kernels, sample
from kestrel_runtime.api.sampling_params import MAX_LOGPROBS
from kestrel_runtime.execution.request_state import DrawSettings, RequestState, RowState, SampleNeeds
from kestrel_runtime.output.output_parser import Grammar, TokenRule

_MAX_STATES = 64
_NEVER = -1


class TokenRules:
    """Token grammars as tensors on the device: which tokens each state forbids, and which state follows.

    One row for each state of every grammar used so far. Rows never move.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._first_row: dict[Grammar, int] = {}
        self._num_rows = 0
        self.forbidden = torch.zeros(_MAX_STATES, vocab_size, dtype=torch.bool, device=device)
        """[states, vocabulary]: whether the token is forbidden."""
        self.is_spatial = torch.zeros(_MAX_STATES, dtype=torch.bool, device=device)
        """[states]: whether tokens with values are sampled with their values."""
        # Per state: the row that follows, the token that leads elsewhere and that row, and the row when exhausted.
        self.successors = torch.full((_MAX_STATES, 4), _NEVER, dtype=torch.int64, device=device)
        # Padding steps in a row that no grammar has, if none is known yet, and must find one again.
        self.successors[:, 0] = torch.arange(_MAX_STATES, device=device)

    def row(self, grammar: Grammar, state: int) -> int:
        """Returns the row of a state; a grammar is added when it is first used."""
        if grammar not in self._first_row:
            self._add(grammar)
        return self._first_row[grammar] + state

    def _add(self, grammar: Grammar) -> None:
        first, self._num_rows = self._num_rows, self._num_rows + len(grammar.states)
        assert self._num_rows <= _MAX_STATES, "skills have a few states each"
        self._first_row[grammar] = first
        for row, (rule, then, on, exhausted) in enumerate(grammar.states, start=first):
            self._forbid(row, rule)
            self.is_spatial[row] = rule.is_spatial
            token, special = (_NEVER, _NEVER) if on is None else (on[0], first + on[1])
            last = _NEVER if exhausted is None else first + exhausted
            self.successors[row] = torch.tensor((first + then, token, special, last))

    def _forbid(self, row: int, rule: TokenRule) -> None:
        if rule.allowed is not None:
            self.forbidden[row] = True
            self.forbidden[row, list(rule.allowed)] = False
        if rule.suppressed:
            self.forbidden[row, list(rule.suppressed)] = True


class TokenSampler:
    """Samples for rows of the request state in one step: `ids` first, then further choices of the same tokens."""

    def __init__(
        self,
        state: RequestState,
        rules: TokenRules,
        rows: Tensor,  # [B] int64
        needs: SampleNeeds,
        kernels: Kernels,
    ) -> None:
        self._state = state
        self._rules = rules
        self._rows = rows
        self._before: RowState = state.read(rows)
        self._needs = needs
        self._kernels = kernels
        self._logprobs: Tensor | None = None
        self._is_finite: Tensor | None = None
        self._random: tuple[DrawSettings, Tensor] | None = None
        if needs.is_random:
            numbers = kernels.philox_uniform(self._before.seeds, self._before.num_sampled)
            self._random = (state.draw_settings(rows), numbers)

    @property
    def is_spatial(self) -> Tensor:
        """Returns bool [B]: True where a token with values is sampled with its values."""
        return self._rules.is_spatial[self._before.rules]

    def finite(self, hidden: Tensor) -> Tensor:
        """Returns hidden states [B, dim] with zeros in place of rows from which no token can be sampled.

        Those are rows with numbers that are not finite, or so large that the sum of their squares, which a norm
        needs, is not. `write` returns `OVERFLOWED` for them, and the request state gets a token that does no harm.
        """
        self._is_finite = hidden.float().square().sum(dim=-1) < float("inf")  # false for NaN too
        return torch.where(self._is_finite[:, None], hidden, 0.0)

    def ids(self, logits: Tensor) -> Tensor:
        """Samples token ids int64 [B] from logits [B, vocabulary]."""
        ids = self._ids(logits)
        if self._needs.with_logprobs:
            self._logprobs = _logprobs(logits, ids)
        return ids

    def _ids(self, logits: Tensor) -> Tensor:
        needs, rules = self._needs, self._before.rules
        if not (needs.is_random or needs.is_controlled or needs.is_restricted):
            return self._kernels.pick_allowed(logits, self._rules.forbidden, rules)
        logits = logits.float()
        if needs.is_controlled:
            settings = self._state.adjustment_settings(self._rows)
            logits = self._state.adjustments.apply(logits, self._rows, settings)
        # Masks come last: no penalty or bias brings a forbidden token back.
        logits = logits.masked_fill(self._rules.forbidden[rules], float("-inf"))
        if needs.is_restricted:
            logits = self._state.allowed.apply(logits, self._rows)
        if self._random is None or not needs.is_controlled:
            return self.pick(logits, 0)
        settings, uniform = self._random
        return sample(logits, settings.temperature, settings.top_p, uniform[:, 0], settings.top_k, settings.min_p)

    def pick(self, logits: Tensor, number: int) -> Tensor:
        """Samples indices int64 [B] of logits float32 [B, choices], by the uniform number 0 to 3 of the token."""
        if self._random is None:
            return logits.argmax(dim=-1)
        settings, uniform = self._random
        return sample(logits, settings.temperature, settings.top_p, uniform[:, number])

    def preference(self, logits: Tensor, token_id: int, other_id: int) -> Tensor:
        """Returns float32 [B]: the probability of one token of logits [B, vocabulary] if these two were the only
        ones, at temperature 1. It is 1 where the rule forbids the other token."""
        is_forced = self._rules.forbidden[:, other_id][self._before.rules]
        other = logits[:, other_id].float().masked_fill(is_forced, float("-inf"))
        return (logits[:, token_id].float() - other).sigmoid()

    def write(
        self,
        ids: Tensor,
        num_values: Tensor | None = None,
        values: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Writes what was sampled to the rows: ids, num_values int64 [B]; values float32 [B, V]. Without
        `values` no token has any. `scores` float32 [B, 1] has the confidence in tokens with values, None for a
        family that makes none.

        Returns float32 [B, 3 + V]: id, or `OVERFLOWED`, number of values, the values, and the score, -1 without.
        With logprobs [B, 4 + V + 2 * T], where T is at most `MAX_LOGPROBS`: behind these the id's logprob, the T
        most likely ids, and their logprobs.
        """
        if self._needs.is_controlled:
            self._state.adjustments.count(self._rows, ids)
        sampled = self._kernels.advance_rows(
            *self._state.sampled_columns,
            self._rules.successors,
            self._rows,
            ids,
            num_values,
            values,
            scores,
            self._is_finite,
        )
        return sampled if self._logprobs is None else torch.cat((sampled, self._logprobs), dim=1)


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns columns of `TokenSampler.write`, from unadjusted logits [B, vocabulary]."""
    logprobs = logits.float().log_softmax(dim=-1)
    most, places = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return torch.cat((logprobs.gather(1, ids[:, None]), places.float(), most), dim=1)
