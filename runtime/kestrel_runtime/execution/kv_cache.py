"""Holds keys and values in pages, and lets a batch of tokens write and read them.

`PageManager` decides which page belongs to whom; in this module pages are only numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kestrel_ops import decode_attention, prefill_attention, write_kv
from kestrel_runtime.execution.step_inputs import PackedChunks


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer, with scales if the pages are float8."""

    key_pages: Tensor
    """[pages, key/value heads, slots, head dimension]."""
    value_pages: Tensor
    """[pages, key/value heads, slots, head dimension]."""
    key_scale: Tensor | None
    """One float32: key = stored * scale."""
    value_scale: Tensor | None
    """One float32: value = stored * scale."""


class AttentionSizes(Protocol):
    """The sizes of a model that determine the size of its cache."""

    @property
    def n_layers(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values of every layer: each [layers, pages, key/value heads, slots, head dimension].

    With a float8 type a layer's keys are stored divided by its scale, and its values likewise. The scales are 1 at
    first: float8 covers a wider range than keys and values usually need.
    """

    def __init__(
        self, config: AttentionSizes, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layers, num_pages, config.n_kv_heads, page_size, config.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.key_pages = torch.zeros(shape, device=device, dtype=dtype)
        self.value_pages = torch.zeros(shape, device=device, dtype=dtype)
        is_scaled = dtype == torch.float8_e4m3fn
        self.key_scales = torch.ones(config.n_layers, device=device) if is_scaled else None
        self.value_scales = torch.ones(config.n_layers, device=device) if is_scaled else None

    @property
    def num_bytes(self) -> int:
        """Returns the memory of all keys and values, in bytes."""
        return self.key_pages.nbytes + self.value_pages.nbytes

    def layer(self, index: int) -> LayerPages:
        """Returns the pages of one layer."""
        own = slice(index, index + 1)
        return LayerPages(
            self.key_pages[index],
            self.value_pages[index],
            None if self.key_scales is None else self.key_scales[own],
            None if self.value_scales is None else self.value_scales[own],
        )

    def renew(self) -> None:
        """Frees the tensors and allocates new ones, zeroed."""
        shape, dtype = self.key_pages.shape, self.key_pages.dtype
        self.key_pages = self.value_pages = torch.empty(0)  # freed before the new tensors are allocated
        self.key_pages = torch.zeros(shape, device=self.device, dtype=dtype)
        self.value_pages = torch.zeros(shape, device=self.device, dtype=dtype)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies pages of all layers: sources and targets int64 [copies], on the device, no page among both."""
        for pages in (self.key_pages, self.value_pages):
            # Torch does not index float8 everywhere.
            bits = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
            bits[:, targets] = bits[:, sources]

    @staticmethod
    def bytes_per_page(config: AttentionSizes, page_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one page over all layers, keys and values."""
        return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize

    def prefill(self, plan: PackedChunks) -> PrefillAttention:
        """Returns the attention of packed tokens that are laid out as `plan` says."""
        return PrefillAttention(self, plan)

    def decode(self, positions: Tensor, page_table: Tensor) -> DecodeAttention:
        """Returns the attention of one new token of each sequence; see `DecodeAttention`."""
        return DecodeAttention(self, positions, page_table)


class PrefillAttention:
    """Attention of prompt chunks of several sequences, packed one after the other."""

    def __init__(self, cache: KVCache, plan: PackedChunks) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan, pages = self._plan, self._cache.layer(layer)
        scales = (pages.key_scale, pages.value_scale)
        write_kv(key, value, pages.key_pages, pages.value_pages, plan.slots, *scales)
        return prefill_attention(
            query,
            key,
            value,
            pages.key_pages,
            pages.value_pages,
            plan.page_table,
            plan.query_starts,
            plan.lengths,
            plan.visible_until,
            plan.max_chunk,
            *scales,
        )


class DecodeAttention:
    """Attention of one new token per sequence.

    positions: [B] int64, the positions of the tokens, up to which the cache is filled; page_table: [B, most pages]
    int32, with any valid page past a sequence's end.
    """

    def __init__(self, cache: KVCache, positions: Tensor, page_table: Tensor) -> None:
        self._cache = cache
        self._page_table = page_table.long()
        self._lengths = positions + 1
        own_page = self._page_table.gather(1, (positions // cache.page_size)[:, None])[:, 0]
        self._slots = own_page * cache.page_size + positions % cache.page_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pages = self._cache.layer(layer)
        scales = (pages.key_scale, pages.value_scale)
        write_kv(key, value, pages.key_pages, pages.value_pages, self._slots, *scales)
        return decode_attention(query, pages.key_pages, pages.value_pages, self._page_table, self._lengths, *scales)
