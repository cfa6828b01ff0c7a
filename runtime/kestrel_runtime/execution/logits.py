"""Changes the logits of a row: penalties and biases, and the tokens that a constraint allows.

Definitions of penalties and biases, in the order in which they are applied to a token's logit:
  repetition_penalty  a positive logit is divided by it, another multiplied, if the token has been generated or is
                      in the prompt. The first token of the prompt does not count: models end by the same token.
  frequency_penalty   is subtracted as many times as the token has been generated.
  presence_penalty    is subtracted once if the token has been generated.
  logit_bias          is added.

A sequence that asks for none has neutral settings, so its logits keep their bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.execution.transfer import host_buffer, to_device
from kestrel_runtime.scheduling.sequence import TokenSequence

_IN_PROMPT = 1 << 24
"""Added to the count of a token that is in the prompt. More tokens than that are never generated."""
NEUTRAL = (1.0, 0.0, 0.0, 0.0)
"""The columns of `AdjustmentSettings` that change nothing."""
_BITS = 32
EVERY_TOKEN = -1
"""A word of a mask with all bits set."""


def settings_of(controls: SamplingParams) -> tuple[float, float, float, float]:
    """Returns the columns of `AdjustmentSettings` of a sequence."""
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
        """Returns the memory on the device, in bytes."""
        return num_rows * vocab_size * (torch.int32.itemsize + torch.float32.itemsize)

    def open(self, sequences: Sequence[TokenSequence], rows: Sequence[int]) -> None:
        """Writes the rows of sequences that start their prompt, from the tokens that they have. In stream order."""
        counts: list[tuple[int, int, int]] = []
        biases: list[tuple[int, int, float]] = []
        for row, sequence in zip(rows, sequences, strict=True):
            ids = [token.id for token in sequence.tokens]
            counted = Counter(ids[sequence.num_prompt_tokens :])
            counted.update(dict.fromkeys(ids[1 : sequence.num_prompt_tokens], _IN_PROMPT))
            counts += [(row, token_id, count) for token_id, count in counted.items()]
            assert sequence.request.controls is not None, "others have no row here"
            biases += [(row, token_id, bias) for token_id, bias in sequence.request.controls.logit_bias]
        own = to_device(rows, torch.int64, self._device)
        for table, entries in ((self._counts, counts), (self._biases, biases)):
            table.index_fill_(0, own, 0)
            if entries:
                places = to_device([entry[:2] for entry in entries], torch.int64, self._device)
                values = to_device([entry[2] for entry in entries], table.dtype, self._device)
                table[places[:, 0], places[:, 1]] = values

    def apply(self, logits: Tensor, rows: Tensor, settings: AdjustmentSettings) -> Tensor:
        """Returns the adjusted logits of rows int64 [B]: float32 [B, vocabulary]."""
        repetition, frequency, presence, has_bias = (column[:, None] for column in settings)
        counts = self._counts[rows]
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, penalised, logits)
        generated = counts & (_IN_PROMPT - 1)
        logits = logits - generated * frequency - (generated > 0) * presence
        return logits + self._biases[rows] * has_bias

    def count(self, rows: Tensor, ids: Tensor) -> None:
        """Counts generated tokens `ids` int64 [B]; `rows` int64 [B] differ, except those of padding."""
        self._counts[rows, ids] = self._counts[rows, ids] + 1


class AllowedTokens:
    """Masks of allowed tokens, one for each row of the request state. Host side: engine thread only.

    Unlike the rules of a `Grammar`, which the device follows by itself, masks come from the host for each token.
    The mask of a row without a constraint allows every token.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.num_words = num_words(vocab_size)
        self._masks = torch.full((num_rows, self.num_words), EVERY_TOKEN, dtype=torch.int32, device=device)
        """[rows, words] int32: bit t % 32 of word t // 32 is set where the token t may come."""
        self._bits = torch.arange(_BITS, dtype=torch.int32, device=device)
        self._restricted: set[int] = set()  # rows whose mask may forbid a token

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int) -> int:
        """Returns the memory on the device, in bytes."""
        return num_rows * num_words(vocab_size) * torch.int32.itemsize

    def write(self, rows: Sequence[int], masks: Sequence[NDArray[np.int32] | None]) -> None:
        """Writes the masks [words] of rows, in stream order; None allows every token."""
        changed = [place for place, row in enumerate(rows) if masks[place] is not None or row in self._restricted]
        if not changed:
            return
        packed = host_buffer(len(changed) * self.num_words * torch.int32.itemsize, self._device)
        laid_out = packed.numpy().view(np.int32).reshape(len(changed), self.num_words)
        for target, place in zip(laid_out, changed, strict=True):
            mask = masks[place]
            target[:] = EVERY_TOKEN if mask is None else mask
            (self._restricted.discard if mask is None else self._restricted.add)(rows[place])
        own = to_device([rows[place] for place in changed], torch.int64, self._device)
        sent = packed.to(self._device, non_blocking=True).view(torch.int32).view(laid_out.shape)
        self._masks[own] = sent

    def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Returns logits float32 [B, vocabulary] of rows int64 [B], with -inf for tokens that are not allowed."""
        bits = (self._masks[rows][:, :, None] >> self._bits) & 1
        return logits.masked_fill(bits.flatten(1)[:, : self._vocab_size] == 0, float("-inf"))


def num_words(vocab_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocab_size // _BITS)
