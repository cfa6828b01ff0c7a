"""Counter-based random numbers: the same for a key and a counter on every device, in any batch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Philox 4x32 with ten rounds.
"""

import torch
from torch import Tensor

NUM_UNIFORMS = 4
"""Numbers of one key and counter."""
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox_uniform(
    seeds: Tensor,  # [B] int64: the key
    counters: Tensor,  # [B] int64 in [0, 2**32)
) -> Tensor:  # [B, 4] float32 in [0, 1), multiples of 2**-24
    """Four uniform numbers for each pair of a seed and a counter."""
    zeros = torch.zeros_like(counters)
    words = philox(seeds, (counters, zeros, zeros, zeros))
    return (torch.stack(words, dim=1) >> 8).float() * 2.0**-24


def philox(seeds: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four 32-bit words of the generator, as int64 tensors [B]."""
    first, second, third, fourth = counters
    low_key, high_key = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(_NUM_ROUNDS):
        high, low = _product(first, _MULTIPLIERS[0])
        other_high, other_low = _product(third, _MULTIPLIERS[1])
        first, second = other_high ^ second ^ low_key, other_low
        third, fourth = high ^ fourth ^ high_key, low
        low_key, high_key = (low_key + _KEY_STEPS[0]) & _MASK, (high_key + _KEY_STEPS[1]) & _MASK
    return first, second, third, fourth


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product; int64 keeps its bits although the sign is lost."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK
