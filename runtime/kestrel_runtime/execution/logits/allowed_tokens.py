"""Masks of allowed tokens, one for each row of the request state: which tokens the next one may be.

Unlike the rules of a `Grammar`, which the device follows by itself, masks come from the host for each token. The
mask of a row without a constraint allows every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kestrel_runtime.execution.transfer import host_buffer, to_device

_BITS = 32
EVERY_TOKEN = -1
"""A word of a mask with all bits set."""


class AllowedTokens:
    """The table of masks on the device. Host side: engine thread only."""

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
        """Memory on the device."""
        return num_rows * num_words(vocab_size) * torch.int32.itemsize

    def write(self, rows: Sequence[int], masks: Sequence[NDArray[np.int32] | None]) -> None:
        """Write the masks [words] of rows, in stream order; None allows every token."""
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
        """Logits float32 [B, vocabulary] of rows int64 [B], those of tokens that are not allowed at -inf."""
        bits = (self._masks[rows][:, :, None] >> self._bits) & 1
        return logits.masked_fill(bits.flatten(1)[:, : self._vocab_size] == 0, float("-inf"))


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // _BITS)
