"""The ways through the decoder: plain, as the model defines it. Each writes the cache and returns hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.models.moondream.text import TextModel
from kestrel_runtime.prefill_plan import PrefillPlan


class TextPath(Protocol):
    """What the runner asks of the decoder. Hidden states are the last block's, before the final LayerNorm."""

    def prefill(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        """Packed tokens [T, dim] → hidden states of `rows` [n] int64: [n, dim]."""
        ...

    def decode(self, embeddings: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        """One token of each sequence [B, dim], at positions [B] int64, pages [B, most pages] int32 → [B, dim]."""
        ...


class PlainText:
    """The decoder block by block, one operation after the other."""

    def __init__(self, text: TextModel, cache: KVCache) -> None:
        self._text = text
        self._cache = cache

    def prefill(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        return self._text(embeddings, plan.positions, self._cache.prefill(plan))[rows]

    def decode(self, embeddings: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        return self._text(embeddings, positions, self._cache.decode(positions, page_table))
