"""Hashes crops on the device, where they are made, with secret random numbers.

The hash has four functions. Each takes a crop as words s_1 … s_n of 32 bits and has random multipliers m_1 … m_n of
64 bits; it is the sum of m_i × s_i modulo 2^64.

Two different crops have equal hashes with a probability of at most 2^-132. *Proof.* Let the words of two crops
differ in place i, by d = 2^t × u with u odd. Words have 32 bits, so |d| < 2^32 and t ≤ 31. Let all multipliers but
m_i be given. One function is equal for both crops if and only if m_i × d ≡ c modulo 2^64, where c follows from the
others. Since u has an inverse, this determines m_i modulo 2^(64 - t), or has no solution: at most 2^t of the 2^64
values of m_i solve it, a share of 2^(t - 64) ≤ 2^-33. The multipliers of the four functions are independent, so all
four are equal with a probability of at most (2^-33)^4 = 2^-132.

The multipliers are drawn anew at each start, and neither they nor hashes leave the process. Callers can at most see
whether two crops count as equal. While none collide, that follows from the crops alone and says nothing about the
multipliers: a caller who chooses crops by earlier answers gains nothing. Among N crops that a process ever sees a
pair collides with a probability of at most N² / 2 × 2^-132; for 2^40 crops that is 2^-53.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch
from torch import Tensor

_NUM_FUNCTIONS = 4
_WORD_BYTES = 4


class CropHash:
    """Computes the hash of crops of one size, on one device. Does not synchronise."""

    def __init__(
        self, crop_bytes: int, device: torch.device, hash_words: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Draws the multipliers for crops of `crop_bytes`. Takes the operation `hash_words`."""
        self._hash_words = hash_words
        self._num_words = -(-crop_bytes // _WORD_BYTES)
        self._padding = self._num_words * _WORD_BYTES - crop_bytes
        drawn = bytearray(secrets.token_bytes(8 * _NUM_FUNCTIONS * self._num_words))
        multipliers = torch.frombuffer(drawn, dtype=torch.int64).view(_NUM_FUNCTIONS, self._num_words)
        self._multipliers = multipliers.to(device)

    def __call__(self, crops: Tensor) -> Tensor:
        """Returns the hashes int64 [crops, 4] of uint8 crops [crops, side, side, 3], on its device."""
        crop_bytes = crops.to(self._multipliers.device).flatten(1)
        if self._padding:  # crops of one size are padded alike
            crop_bytes = torch.nn.functional.pad(crop_bytes, (0, self._padding))
        # Signed words differ by less than 2^32 too, and sums of int64 are taken modulo 2^64.
        return self._hash_words(crop_bytes.contiguous().view(torch.int32), self._multipliers)

    @staticmethod
    def work_bytes(crop_bytes: int, num_crops: int) -> int:
        """Returns the bytes of the multipliers, and of what is computed for `num_crops` at a time.

        The reference of `hash_words` keeps a product for each word and multiplier.
        """
        num_words = -(-crop_bytes // _WORD_BYTES)
        return 8 * num_words * _NUM_FUNCTIONS * (1 + num_crops)
