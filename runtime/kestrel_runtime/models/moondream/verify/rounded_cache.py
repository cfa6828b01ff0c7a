"""A float32 cache that rounds to the grid of a shorter type, which is scaled at random for each channel.

Rounding errors of a cache are not independent: positions with nearly equal keys or values, such as those of a plain
background, have nearly equal errors, which attention does not average out. Independent noise would not show this.
So numbers are rounded, each channel at a random scale: equal numbers have equal errors, and errors of different
channels and simulations are independent.
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
    """For plain paths. As on a path with a cache of type `rounded_to`, chunks attend to their own keys and values
    unrounded, and decoded tokens attend to rounded ones."""

    def __init__(
        self, config: TextConfig, num_pages: int, page_size: int, rounded_to: torch.dtype, chance: torch.Generator
    ) -> None:
        super().__init__(config, num_pages, page_size, chance.device, torch.float32)
        self._rounded_to = rounded_to
        # Scales of keys and of values. A factor of 2 maps the grid to itself, so scales from 1 to 2 are enough.
        shape = (2, config.n_layers, config.n_kv_heads, config.head_dim)
        self._grids = torch.exp2(torch.rand(shape, device=chance.device, generator=chance) - 0.5)

    def rounded(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache stores them, [T, key/value heads, head dimension] float32."""
        keys, values = self._grids[:, layer]
        return (
            rounded_to_grid(key / keys, self._rounded_to) * keys,
            rounded_to_grid(value / values, self._rounded_to) * values,
        )

    def prefill(self, plan: PackedChunks) -> PrefillAttention:
        """As in the base class; stored keys and values are rounded."""
        return _RoundedPrefill(self, plan)

    def decode(self, positions: Tensor, page_table: Tensor) -> DecodeAttention:
        """As in the base class; stored keys and values are rounded before they are read."""
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
    """float32 values rounded to the nearest values of `dtype`, as if its exponents had no upper limit.

    Numbers beyond the largest of `dtype` are not clipped: clipping is a fault, which tolerances must not cover.
    """
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(values)  # |value| < 2 ** exponent
    _, smallest = math.frexp(info.smallest_normal)
    step = torch.ldexp(torch.full_like(values, info.eps / 2), exponents.clamp_min(smallest))
    return (values / step).round() * step
