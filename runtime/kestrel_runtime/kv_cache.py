"""The tensors that hold keys and values, and how a batch of tokens writes and reads them.

`PagePool` decides which page belongs to whom; here pages are only numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_ops import decode_attention, prefill_attention, write_kv
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class LayerPages:
    """What one layer's operations read and write; the scales stand where the pages are float8."""

    key_pages: Tensor
    """[pages, key/value heads, slots, head dimension]."""
    value_pages: Tensor
    """As the keys."""
    key_scale: Tensor | None
    """One float32: key = stored * scale."""
    value_scale: Tensor | None
    """One float32: value = stored * scale."""


class KVCache:
    """Keys and values of every layer: each [layers, pages, key/value heads, slots, head dimension].

    With a float8 type a layer's keys are stored divided by its scale, and its values likewise. The scales are 1 at
    first: what float8 holds well is wider than what keys and values usually are.
    """

    def __init__(
        self, config: TextConfig, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
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

    def layer(self, index: int) -> LayerPages:
        """The pages of one layer."""
        own = slice(index, index + 1)
        return LayerPages(
            self.key_pages[index],
            self.value_pages[index],
            None if self.key_scales is None else self.key_scales[own],
            None if self.value_scales is None else self.value_scales[own],
        )

    def renew(self) -> None:
        """Let the tensors go and make them anew, zeroed."""
        shape, dtype = self.key_pages.shape, self.key_pages.dtype
        self.key_pages = self.value_pages = torch.empty(0)  # gone before their successors need the memory
        self.key_pages = torch.zeros(shape, device=self.device, dtype=dtype)
        self.value_pages = torch.zeros(shape, device=self.device, dtype=dtype)

    @staticmethod
    def bytes_per_page(config: TextConfig, page_size: int, dtype: torch.dtype) -> int:
        """Memory that one page takes over all layers, keys and values."""
        return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize

    def prefill(self, chunks: list[Chunk]) -> PrefillAttention:
        """How the packed tokens of `chunks` attend."""
        return PrefillAttention(self, chunks)

    def decode(self, sequences: list[Sequence]) -> DecodeAttention:
        """How the newest token of each of `sequences` attends."""
        return DecodeAttention(self, sequences)

    def slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Places of `positions` in a sequence that owns `pages`: page * slots + place, int64."""
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size


class PrefillAttention:
    """Attention of prompt chunks of several sequences, packed one after the other."""

    def __init__(self, cache: KVCache, chunks: list[Chunk]) -> None:
        self._cache = cache
        self._ranges = [(chunk.start, chunk.end) for chunk in chunks]
        self._prefix_lengths = [chunk.sequence.prefix_length for chunk in chunks]
        self._pages: list[Tensor] = []
        positions, slots = [], []
        for chunk in chunks:
            pages = torch.tensor(chunk.sequence.pages, device=cache.device)
            self._pages.append(pages[: -(-chunk.end // cache.page_size)])
            chunk_positions = torch.arange(chunk.start, chunk.end, device=cache.device)
            positions.append(chunk_positions)
            slots.append(cache.slots(pages, chunk_positions))
        self.positions = torch.cat(positions)
        self._slots = torch.cat(slots)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_pages, value_pages = self._cache.key_pages[layer], self._cache.value_pages[layer]
        write_kv(key, value, key_pages, value_pages, self._slots)
        return prefill_attention(query, key_pages, value_pages, self._pages, self._ranges, self._prefix_lengths)


class DecodeAttention:
    """Attention of one new token per sequence."""

    def __init__(self, cache: KVCache, sequences: list[Sequence]) -> None:
        self._cache = cache
        most_pages = max(len(sequence.pages) for sequence in sequences)
        table = [
            sequence.pages + [sequence.pages[0]] * (most_pages - len(sequence.pages)) for sequence in sequences
        ]
        self._page_table = torch.tensor(table, device=cache.device)
        # The newest token is not in the cache yet; its position is the number of those that are.
        self.positions = torch.tensor([sequence.num_cached for sequence in sequences], device=cache.device)
        own_page = self._page_table.gather(1, (self.positions // cache.page_size)[:, None])[:, 0]
        self._slots = own_page * cache.page_size + self.positions % cache.page_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pages = self._cache.layer(layer)
        scales = (pages.key_scale, pages.value_scale)
        write_kv(key, value, pages.key_pages, pages.value_pages, self._slots, *scales)
        lengths = self.positions + 1
        return decode_attention(query, pages.key_pages, pages.value_pages, self._page_table, lengths, *scales)
