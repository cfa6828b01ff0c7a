"""Penalties and biases: what the device keeps of the sequences that ask for them, and how logits are adjusted.

Definitions, in the order in which they are applied to a token's logit:
  repetition_penalty  a positive logit is divided by it, another multiplied, if the token has been generated or is
                      in the prompt. The first token of the prompt does not count: models end by the same token.
  frequency_penalty   is subtracted as many times as the token has been generated.
  presence_penalty    is subtracted once if the token has been generated.
  logit_bias          is added.

A sequence that asks for none has settings that change nothing: whatever its row holds, its logits keep their bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.scheduling import sequence as scheduling

_IN_PROMPT = 1 << 24
"""Added to the count of a token that is in the prompt. More tokens than that are never generated."""
NUM_SETTINGS = 4
NEUTRAL = (1.0, 0.0, 0.0, 0.0)
"""The columns of `AdjustmentSettings` that change nothing."""


def settings_of(controls: SamplingParams) -> tuple[float, float, float, float]:
    """The columns of `AdjustmentSettings` of a sequence."""
    repetition = 1.0 if controls.repetition_penalty is None else controls.repetition_penalty
    return (
        repetition,
        controls.frequency_penalty or 0.0,
        controls.presence_penalty or 0.0,
        1.0 if controls.logit_bias else 0.0,
    )


class AdjustmentSettings(NamedTuple):
    """float32 [B] each."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    has_bias: Tensor
    """1 where the row's biases apply, else 0."""


class LogitAdjustments:
    """Counts and biases of each row of the request state, for every token of the vocabulary."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        """[rows, vocabulary]: how often each token has been generated, plus `_IN_PROMPT`."""
        self._biases = torch.zeros(num_rows, vocab_size, device=device)

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int) -> int:
        """Memory on the device."""
        return num_rows * vocab_size * (torch.int32.itemsize + torch.float32.itemsize)

    def open(self, sequences: Sequence[scheduling.Sequence], rows: Sequence[int]) -> None:
        """Write the rows of sequences that start their prompt, from the tokens that they have. In stream order."""
        counts: list[tuple[int, int, int]] = []
        biases: list[tuple[int, int, float]] = []
        for row, sequence in zip(rows, sequences, strict=True):
            ids = [token.id for token in sequence.tokens]
            counted = Counter(ids[sequence.num_prompt_tokens :])
            counted.update(dict.fromkeys(ids[1 : sequence.num_prompt_tokens], _IN_PROMPT))
            counts += [(row, token_id, count) for token_id, count in counted.items()]
            assert sequence.controls is not None, "others have no row here"
            biases += [(row, token_id, bias) for token_id, bias in sequence.controls.logit_bias]
        own = to_device(rows, torch.int64, self._device)
        for table, entries in ((self._counts, counts), (self._biases, biases)):
            table.index_fill_(0, own, 0)
            if entries:
                places = to_device([entry[:2] for entry in entries], torch.int64, self._device)
                values = to_device([entry[2] for entry in entries], table.dtype, self._device)
                table[places[:, 0], places[:, 1]] = values

    def apply(self, logits: Tensor, rows: Tensor, settings: AdjustmentSettings) -> Tensor:
        """Adjusted logits of rows int64 [B]: float32 [B, vocabulary]."""
        repetition, frequency, presence, has_bias = (column[:, None] for column in settings)
        counts = self._counts[rows]
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, penalised, logits)
        generated = counts & (_IN_PROMPT - 1)
        logits = logits - generated * frequency - (generated > 0) * presence
        return logits + self._biases[rows] * has_bias

    def count(self, rows: Tensor, ids: Tensor) -> None:
        """The tokens ids int64 [B] have been generated; rows int64 [B] differ, but for padding."""
        self._counts[rows, ids] = self._counts[rows, ids] + 1
