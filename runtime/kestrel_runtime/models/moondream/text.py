"""The decoder: parallel attention and MLP blocks over packed tokens.

The caller passes the attention. Sources: the public reference's `text.py`
for Moondream 2 and the published Moondream 3 `text.py` for tau attention.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kestrel_ops import rotary, tau_scales
from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters, RowAdapters
from kestrel_runtime.models.moondream.config import TextConfig
from kestrel_runtime.models.moondream.moe import MixtureOfExperts
from kestrel_runtime.models.moondream.rope import rotary_tables


class Attend(Protocol):
    """Stores a layer's new keys and values, then attends: q [T, H, D], k and v [T, G, D] → [T, H, D]."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class TextModel(nn.Module):
    """Embedding, blocks and head. Parameters carry the names of the hub checkpoints."""

    def __init__(self, config: TextConfig, *, fp8_experts: bool = False) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(_Block(config, layer, fp8_experts) for layer in range(config.n_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        embeddings: Tensor,  # [T, dim]
        positions: Tensor,  # [T] int64
        attend: Attend,
        adapters: RowAdapters | None = None,
    ) -> Tensor:  # [T, dim]: the last block's output, before the final LayerNorm
        """Run the blocks over packed tokens, with the adapter of each token's slot where there are any."""
        if self._tables is None or self._tables[0].device != embeddings.device:
            config = self.config
            self._tables = rotary_tables(
                config.rotary_dim, config.max_context, config.rope_theta, embeddings.device
            )
        cosine, sine = (table[positions] for table in self._tables)
        hidden = embeddings
        by_layer = repeat(None) if adapters is None else adapters.of_layers()
        for layer, (block, own) in enumerate(zip(self.blocks, by_layer, strict=False)):
            hidden = block(hidden, positions, cosine, sine, attend, layer, own)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, dim] from `forward` → [B, vocabulary]."""
        return self.lm_head(self.post_ln(hidden))


class _Block(nn.Module):
    """x + attention(LN x) + mlp(LN x), one LayerNorm for both."""

    def __init__(self, config: TextConfig, layer: int, fp8_experts: bool) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = _Attention(config)
        if config.moe is not None and config.is_moe_layer(layer):
            self.mlp = MixtureOfExperts(config.dim, config.moe, fp8=fp8_experts)
        else:
            self.mlp = Mlp(config.dim, config.ff_dim, config.dim)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cosine: Tensor,
        sine: Tensor,
        attend: Attend,
        layer: int,
        adapters: BlockAdapters | None,
    ) -> Tensor:
        normed = self.ln(hidden)
        attended = self.attn(normed, positions, cosine, sine, attend, layer, adapters)
        return hidden + attended + self.mlp(normed, adapters=adapters)


class _Attention(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.num_heads = config.n_heads
        self.num_groups = config.n_kv_heads
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.dim, config.qkv_dim)
        self.proj = nn.Linear(config.n_heads * config.head_dim, config.dim)
        self.tau = Tau(config) if config.tau_attn else None

    def forward(
        self,
        normed: Tensor,
        positions: Tensor,
        cosine: Tensor,
        sine: Tensor,
        attend: Attend,
        layer: int,
        adapters: BlockAdapters | None,
    ) -> Tensor:
        packed = self.qkv(normed)
        if adapters is not None:
            adapters.add_qkv(packed, normed)
        groups = self.num_groups * self.head_dim
        query, key, value = packed.split((packed.shape[-1] - 2 * groups, groups, groups), dim=-1)
        query = query.unflatten(-1, (self.num_heads, self.head_dim))
        key = key.unflatten(-1, (self.num_groups, self.head_dim))
        value = value.unflatten(-1, (self.num_groups, self.head_dim))
        if self.tau is not None:
            query_scale, value_scale = self.tau(packed, positions)
            query = query * query_scale[..., None]
            value = value * value_scale[..., None]
        attended = attend(layer, rotary(query, cosine, sine), rotary(key, cosine, sine), value).flatten(1)
        projected = self.proj(attended)
        if adapters is not None:
            adapters.add_proj(projected, attended, normed)
        return projected


class Tau(nn.Module):
    """Scales queries and values, depending on the token and its position."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.empty(config.n_heads, config.qkv_dim))
        self.wv = nn.Parameter(torch.empty(config.n_heads, config.qkv_dim))
        self.alpha = nn.Parameter(torch.empty(config.n_heads))

    def forward(
        self,
        packed: Tensor,
        positions: Tensor,
        operation: Callable[..., tuple[Tensor, Tensor]] = tau_scales,
    ) -> tuple[Tensor, Tensor]:
        """Packed query, key and value [T, qkv_dim], positions [T] → [T, H] for queries and for values."""
        return operation(packed, positions, self.wq, self.wv, self.alpha)


class Mlp(nn.Module):
    """Two linear layers around a tanh-form GELU."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, out_dim)

    def forward(self, hidden: Tensor, adapters: BlockAdapters | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        inner = self.fc1(hidden)
        if adapters is not None:
            adapters.add_fc1(inner, hidden)
        inner = gelu(inner, approximate="tanh")
        out = self.fc2(inner)
        if adapters is not None:
            adapters.add_fc2(out, inner)
        return out
