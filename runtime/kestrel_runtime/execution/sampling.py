"""Draws next tokens on the device: under the rule of each sequence's state, with the values of places and sizes.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kestrel_ops import sample
from kestrel_runtime.execution.request_state import COORDINATE, SIZE, Slots
from kestrel_runtime.execution.token_rules import RuleTable
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.scheduling.sequence import UNIFORMS_PER_TOKEN, Sequence

SETTINGS_PER_SEQUENCE = 2 + UNIFORMS_PER_TOKEN
"""Numbers that a draw takes of each sequence: temperature, top-p and fresh randomness."""


class DrawNeeds(NamedTuple):
    """What a batch's draws may come to; what cannot come is not computed."""

    coordinates: bool
    sizes: bool
    randomness: bool


class Sampler:
    """Draws the next token of each sequence and writes it to its slot."""

    def __init__(self, model: Moondream, rules: RuleTable, slots: Slots) -> None:
        self._text = model.text
        self._region = model.region
        self._coordinate_id = model.config.tokenizer.coord_id
        self._size_id = model.config.tokenizer.size_id
        self._rules = rules
        self._slots = slots

    def needs(self, sequences: list[Sequence]) -> DrawNeeds:
        """What draws of `sequences` may come to."""
        is_random = any(sequence.temperature > 0 for sequence in sequences)
        return DrawNeeds(*self._slots.may_draw(sequences), is_random)

    def settings(self, sequences: list[Sequence]) -> np.ndarray:
        """Temperature, top-p and the randomness of the next token of each sequence, which is spent by this.

        A sequence spends the same per token in any batch, so its draws do not depend on company; at temperature 0
        it needs none. Returns float32 [B, SETTINGS_PER_SEQUENCE].
        """
        settings = np.zeros((len(sequences), SETTINGS_PER_SEQUENCE), dtype=np.float32)
        settings[:, 1] = 1
        for row, sequence in enumerate(sequences):
            if sequence.temperature > 0:
                uniforms = [sequence.random.random() for _ in range(UNIFORMS_PER_TOKEN)]
                settings[row] = (sequence.temperature, sequence.top_p, *uniforms)
        return settings

    def draw(self, hidden: Tensor, slots: Tensor, settings: Tensor, needs: DrawNeeds) -> Tensor:
        """Draw a token for each slot and write it there.

        hidden: [B, dim] of each sequence's newest token, before the final LayerNorm; slots: [B] int64; settings:
        [B, SETTINGS_PER_SEQUENCE] float32. Returns float32 [B, 4]: id, kind and two values.
        """
        rows = self._slots.numbers[slots, 2]
        hidden = hidden.to(self._text.wte.dtype)
        logits = self._text.logits(hidden).float()
        ids = self._pick(logits.masked_fill(self._rules.forbidden[rows], float("-inf")), settings, 0, needs)
        kinds = torch.zeros_like(ids)
        values = torch.zeros(len(ids), 2, device=hidden.device)
        is_spatial = self._rules.is_spatial[rows]
        if needs.coordinates:
            logits = self._region.coordinate_logits(hidden).float()
            found = self._region.coordinates(self._pick(logits, settings, 1, needs), logits.shape[-1])
            is_coordinate = is_spatial & (ids == self._coordinate_id)
            kinds = torch.where(is_coordinate, COORDINATE, kinds)
            values[:, 0] = torch.where(is_coordinate, found, values[:, 0])
        if needs.sizes:
            logits = self._region.size_logits(hidden).float()
            bins = [self._pick(logits[:, axis], settings, 1 + axis, needs) for axis in range(2)]
            found = self._region.sizes(torch.stack(bins, dim=1), logits.shape[-1])
            is_size = is_spatial & (ids == self._size_id)
            kinds = torch.where(is_size, SIZE, kinds)
            values = torch.where(is_size[:, None], found, values)
        self._slots.advance(slots, ids, kinds, values)
        # Ids lie far below 2^24, up to where float32 holds every whole number.
        return torch.cat((torch.stack((ids, kinds), dim=1).float(), values), dim=1)

    @staticmethod
    def _pick(logits: Tensor, settings: Tensor, column: int, needs: DrawNeeds) -> Tensor:
        if not needs.randomness:
            return logits.argmax(dim=-1)
        return sample(logits, settings[:, 0], settings[:, 1], settings[:, 2 + column])
