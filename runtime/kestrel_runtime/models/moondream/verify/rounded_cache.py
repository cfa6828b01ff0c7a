"""A float32 cache that holds only what a shorter type can hold, on a grid that is shifted at random.

Rounding errors of a cache are not independent: positions whose keys or values are nearly equal, as those of a
plain background, are rounded alike, and attention does not average that away. Independent noise would miss it. So
numbers are really rounded here, each channel at a random scale: equal numbers have equal errors, and the errors of
channels and of simulations are independent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kestrel_ops import write_kv
from kestrel_runtime.execution.kv_cache import DecodeAttention, KVCache, PrefillAttention
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.config import TextConfig


class RoundedCache(KVCache):
    """For plain paths. Chunks attend to their own keys and values as they are, decoded tokens to rounded ones,
    as a path with a cache of `rounded_to` does."""

    def __init__(
        self, config: TextConfig, num_pages: int, page_size: int, rounded_to: torch.dtype, chance: torch.Generator
    ) -> None:
        super().__init__(config, num_pages, page_size, chance.device, torch.float32)
        self._rounded_to = rounded_to
        # Of keys and of values. A factor of 2 moves all numbers by one exponent, and so a grid onto itself.
        shape = (2, config.n_layers, config.n_kv_heads, config.head_dim)
        self._grids = torch.exp2(torch.rand(shape, device=chance.device, generator=chance) - 0.5)

    def rounded(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache keeps of both [T, key/value heads, head dimension] float32."""
        keys, values = self._grids[:, layer]
        return (
            rounded_to_grid(key / keys, self._rounded_to) * keys,
            rounded_to_grid(value / values, self._rounded_to) * values,
        )

    def prefill(self, plan: PackedChunks) -> PrefillAttention:
        """As the base class says; what is kept is rounded."""
        return _RoundedPrefill(self, plan)

    def decode(self, positions: Tensor, page_table: Tensor) -> DecodeAttention:
        """As the base class says; what is kept is rounded before it is read."""
        return _RoundedDecode(self, positions, page_table)


class _RoundedPrefill(PrefillAttention):
    def __init__(self, cache: RoundedCache, plan: PackedChunks) -> None:
        super().__init__(cache, plan)
        self._rounded_cache = cache
        self._slots = plan.slots

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = super().__call__(layer, query, key, value)
        cache = self._rounded_cache
        write_kv(*cache.rounded(layer, key, value), cache.key_pages[layer], cache.value_pages[layer], self._slots)
        return attended


class _RoundedDecode(DecodeAttention):
    def __init__(self, cache: RoundedCache, positions: Tensor, page_table: Tensor) -> None:
        super().__init__(cache, positions, page_table)
        self._rounded_cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().__call__(layer, query, *self._rounded_cache.rounded(layer, key, value))


def rounded_to_grid(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values, each the nearest that `dtype` has, if its exponents had no upper end.

    Numbers beyond the largest of `dtype` are not cut off: that would be no rounding, so that it is to be found.
    """
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(values)  # |value| < 2 ** exponent
    _, smallest = math.frexp(info.smallest_normal)
    step = torch.ldexp(torch.full_like(values, info.eps / 2), exponents.clamp_min(smallest))
    return (values / step).round() * step
