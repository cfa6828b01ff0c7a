"""Random contexts in pages and a token to decode for each: what parts of a decode step are timed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.harness.prefill_inputs import PAGE_SIZE, new_cache
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.text.decoder import rotary_tables

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Contexts:
    """A batch whose contexts' lengths lie evenly between two, the ends included; one alone has the middle."""

    batch: int
    shortest: int
    longest: int

    def positions(self, device: torch.device) -> Tensor:
        """[B] int64: where the new tokens stand."""
        if self.batch == 1:
            return torch.tensor([(self.shortest + self.longest) // 2], device=device)
        return torch.linspace(self.shortest, self.longest, self.batch).long().to(device)

    def num_positions(self) -> int:
        """All positions that are attended to, the tokens' own included."""
        return int((self.positions(torch.device("cpu")) + 1).sum())

    def page_table(self, device: torch.device) -> Tensor:
        """[B, pages of the longest] int32: pages that lie anywhere."""
        most = self.longest // PAGE_SIZE + 1
        torch.manual_seed(self.batch)
        return torch.randperm(self.batch * most).view(self.batch, most).int().to(device)

    def filled_cache(self, config: TextConfig, device: torch.device, dtype: torch.dtype) -> KVCache:
        """Keys and values of deviation 1 in every page of every layer."""
        torch.manual_seed(self.longest)
        cache = new_cache(config, self.batch * (self.longest // PAGE_SIZE + 1), device, dtype)
        for layer in range(config.n_layers):
            pages = cache.layer(layer)
            for rows, scale in ((pages.key_pages, pages.key_scale), (pages.value_pages, pages.value_scale)):
                random = torch.randn(rows.shape, device=device, dtype=torch.bfloat16)
                rows.copy_(random if scale is None else random / scale)
        return cache


def dequantised(cache: KVCache, config: TextConfig) -> KVCache:
    """The same keys and values in float32."""
    wide = KVCache(config, cache.num_pages, cache.page_size, cache.device, torch.float32)
    for layer in range(config.n_layers):
        pages, own = cache.layer(layer), wide.layer(layer)
        own.key_pages.copy_(pages.key_pages.float() * (1.0 if pages.key_scale is None else pages.key_scale))
        own.value_pages.copy_(pages.value_pages.float() * (1.0 if pages.value_scale is None else pages.value_scale))
    return wide


class AttentionInputs:
    """One layer's attention: new tokens, pages, and workspace."""

    def __init__(
        self, config: TextConfig, contexts: Contexts, cache: KVCache, dtype: torch.dtype, num_parts: int
    ) -> None:
        device, batch = cache.device, contexts.batch
        self.cosine, self.sine = rotary_tables(config.rotary_dim, config.max_context, config.rope_theta, device)
        self.qkv = torch.randn(batch, config.qkv_dim, device=device).to(dtype)
        self.positions, self.page_table = contexts.positions(device), contexts.page_table(device)
        self.out = torch.full((batch, config.dim), torch.nan, device=device, dtype=dtype)
        self.partials = torch.empty(batch, config.n_heads, num_parts, config.head_dim + 2, device=device)
        self.counters = torch.zeros(batch, config.n_heads, dtype=torch.int32, device=device)
        self.cache = cache

    def run(self, operation: Callable[..., Any], layer: int = 0, **options: Any) -> tuple[Tensor, ...]:
        """What is attended to in one layer, [B, H * D]."""
        pages = self.cache.layer(layer)
        operation(
            self.qkv,
            self.positions,
            self.cosine,
            self.sine,
            pages.key_pages,
            pages.value_pages,
            self.page_table,
            self.out,
            pages.key_scale,
            pages.value_scale,
            None,
            None,
            self.partials,
            self.counters,
            **options,
        )
        return (self.out,)
