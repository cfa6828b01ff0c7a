"""Samples the tokens of a Moondream: ids from the language head, coordinates and sizes from the region heads."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.sampling import TokenRules, TokenSampler
from kestrel_runtime.models.moondream.config import TokenizerConfig
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.output.output_parser import Grammar

VALUES_PER_TOKEN = 2
"""A coordinate has one value, a size has width and height."""
COORDINATE, SIZE = 1, 2
"""Kinds of tokens with values, by their number of values."""
COORDINATES_BIT, SIZES_BIT = 1 << (COORDINATE - 1), 1 << (SIZE - 1)


def value_kinds(grammar: Grammar, ids: TokenizerConfig) -> int:
    """Returns the kinds of tokens with values that a grammar allows, as bits for `SampleNeeds`."""
    kinds = 0
    for bit, token_id in ((COORDINATES_BIT, ids.coord_id), (SIZES_BIT, ids.size_id)):
        if any(rule.is_spatial and rule.lets_pass(token_id) for rule in grammar.rules):
            kinds |= bit
    return kinds


class MoondreamSampler:
    """Samples the next token of each row and writes it to the request state."""

    def __init__(
        self,
        model: Moondream,
        state: RequestState,
        rules: TokenRules,
        kernels: Kernels,
    ) -> None:
        self._text = model.text
        self._region = model.region
        self._ids = model.config.tokenizer
        self._state = state
        self._rules = rules
        self._kernels = kernels

    def sample(self, hidden: Tensor, rows: Tensor, needs: SampleNeeds) -> Tensor:
        """Samples a token for each row and writes it to the row's request state.

        hidden: [B, dim] after each row's last token, before the final LayerNorm; rows: [B] int64. Returns float32
        [B, 5]: id, number of values, values, score; the id `OVERFLOWED` where numbers of `hidden` are not finite.

        The score of a token with values is the probability of the token over that of the end, where the rule leaves
        the choice, times the probability near each of its values (`RegionModel.mass_near`), all at temperature 1.
        """
        sampler = TokenSampler(self._state, self._rules, rows, needs, self._kernels)
        hidden = sampler.finite(hidden).to(self._text.wte.dtype)
        text_logits = self._text.logits(hidden)
        ids = sampler.ids(text_logits)
        if not needs.value_kinds:
            return sampler.write(ids)
        num_values = torch.zeros_like(ids)
        values = torch.zeros(len(ids), VALUES_PER_TOKEN, device=hidden.device)
        scores = torch.zeros(len(ids), 1, device=hidden.device)
        is_spatial = sampler.is_spatial
        if needs.value_kinds & COORDINATES_BIT:
            logits = self._region.coordinate_logits(hidden).float()
            bins = sampler.pick(logits, 1)
            found = self._region.coordinates(bins, logits.shape[-1])
            is_coordinate = is_spatial & (ids == self._ids.coord_id)
            num_values = torch.where(is_coordinate, COORDINATE, num_values)
            values[:, 0] = torch.where(is_coordinate, found, values[:, 0])
            score = sampler.preference(text_logits, self._ids.coord_id, self._ids.eos_id)
            score = score * self._region.mass_near(logits, bins)
            scores = torch.where(is_coordinate[:, None], score[:, None], scores)
        if needs.value_kinds & SIZES_BIT:
            logits = self._region.size_logits(hidden).float()
            bins = torch.stack([sampler.pick(logits[:, axis], 1 + axis) for axis in range(2)], dim=1)
            found = self._region.sizes(bins, logits.shape[-1])
            is_size = is_spatial & (ids == self._ids.size_id)
            num_values = torch.where(is_size, SIZE, num_values)
            values = torch.where(is_size[:, None], found, values)
            width, height = self._region.mass_near(logits, bins).unbind(1)
            score = sampler.preference(text_logits, self._ids.size_id, self._ids.eos_id) * width * height
            scores = torch.where(is_size[:, None], score[:, None], scores)
        return sampler.write(ids, num_values, values, scores)
