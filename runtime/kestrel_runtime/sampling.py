"""From hidden states to tokens: rules, temperatures and randomness of each row, and the values of places.

Wraps `kestrel_ops.sample`, which does the drawing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_ops import sample
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.sequence import UNIFORMS_PER_TOKEN, Sequence
from kestrel_runtime.tokens import Token


class Sampler:
    """Draws the next token of each sequence; coordinate and size tokens come with their values."""

    def __init__(self, model: Moondream) -> None:
        self._text = model.text
        self._region = model.region
        self._coord_id = model.config.tokenizer.coord_id
        self._size_id = model.config.tokenizer.size_id

    def draw(self, hidden: Tensor, sequences: list[Sequence]) -> dict[int, Token]:
        """hidden: [B, dim] of each sequence's newest token, before the final LayerNorm → token by sequence id.

        Each sequence spends the same randomness per step in any batch, so its draws do not depend on company.
        """
        settings = _Settings(sequences, hidden.device)
        ids = settings.draw(self._masked_logits(hidden, sequences), 0).tolist()
        values: list[tuple[float, ...]] = [()] * len(ids)
        spatial = [place for place, sequence in enumerate(sequences) if sequence.reader.rule.is_spatial]
        self._read_coordinates(hidden, settings, [p for p in spatial if ids[p] == self._coord_id], values)
        self._read_sizes(hidden, settings, [p for p in spatial if ids[p] == self._size_id], values)
        return {
            sequence.id: Token(token, value) for sequence, token, value in zip(sequences, ids, values, strict=True)
        }

    def _masked_logits(self, hidden: Tensor, sequences: list[Sequence]) -> Tensor:
        logits = self._text.logits(hidden).float()
        for row, sequence in enumerate(sequences):
            rule = sequence.reader.rule
            if rule.allowed is not None:
                allowed = torch.tensor(rule.allowed, device=logits.device)
                kept = logits[row, allowed]
                logits[row] = float("-inf")
                logits[row, allowed] = kept
            if rule.suppressed:
                logits[row, list(rule.suppressed)] = float("-inf")
        return logits

    def _read_coordinates(
        self, hidden: Tensor, settings: _Settings, places: list[int], values: list[tuple[float, ...]]
    ) -> None:
        if places:
            logits = self._region.coordinate_logits(hidden[places])
            bins = settings.draw(logits, 1, places)
            for place, value in zip(places, self._region.coordinates(bins, logits.shape[-1]).tolist(), strict=True):
                values[place] = (value,)

    def _read_sizes(
        self, hidden: Tensor, settings: _Settings, places: list[int], values: list[tuple[float, ...]]
    ) -> None:
        if places:
            logits = self._region.size_logits(hidden[places])
            bins = torch.stack(
                (settings.draw(logits[:, 0], 1, places), settings.draw(logits[:, 1], 2, places)), dim=1
            )
            for place, size in zip(places, self._region.sizes(bins, logits.shape[-1]).tolist(), strict=True):
                values[place] = tuple(size)


class _Settings:
    """Sampling settings and fresh randomness of a batch: a column for the token and two for its value."""

    def __init__(self, sequences: list[Sequence], device: torch.device) -> None:
        self._temperature = torch.tensor([sequence.temperature for sequence in sequences], device=device)
        self._top_p = torch.tensor([sequence.top_p for sequence in sequences], device=device)
        self._uniform = torch.tensor(
            [[sequence.random.random() for _ in range(UNIFORMS_PER_TOKEN)] for sequence in sequences], device=device
        )

    def draw(self, logits: Tensor, column: int, places: list[int] | None = None) -> Tensor:
        rows = slice(None) if places is None else places
        return sample(logits, self._temperature[rows], self._top_p[rows], self._uniform[rows, column])
