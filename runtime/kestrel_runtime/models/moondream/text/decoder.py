"""Defines the decoder: parallel attention and MLP blocks over packed tokens.

The caller passes the attention. Sources: the public reference's `text.py`
for Moondream 2 and the published Moondream 3 `text.py` for tau attention.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from kestrel_ops import INT4_GROUP, mixture_of_experts, rotary, tau_scales
from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters, RowAdapters
from kestrel_runtime.models.moondream.config import MoeConfig, TextConfig
from kestrel_runtime.models.moondream.layers import Mlp

ExpertFormat = Literal["model", "float8", "int4"]
"""The format of stored experts: the model's type, or 8 or 4 bits with scales."""


class Attend(Protocol):
    """Stores a layer's new keys and values, then attends: q [T, H, D], k and v [T, G, D] → [T, H, D]."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class TextModel(nn.Module):
    """Embedding, blocks and head. Parameters carry the names of the hub checkpoints."""

    def __init__(self, config: TextConfig, *, expert_format: ExpertFormat = "model") -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(_Block(config, layer, expert_format) for layer in range(config.n_layers))
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
        """Runs the blocks over packed tokens, with the adapter of each token's slot where there are any."""
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
        """Computes hidden states [B, dim] from `forward` → logits [B, vocabulary]."""
        return self.lm_head(self.post_ln(hidden))


class _Block(nn.Module):
    """x + attention(LN x) + mlp(LN x), one LayerNorm for both."""

    def __init__(self, config: TextConfig, layer: int, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = _Attention(config)
        if config.moe is not None and config.is_moe_layer(layer):
            self.mlp = MixtureOfExperts(config.dim, config.moe, expert_format)
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

    @torch.no_grad()
    def stack(self) -> None:
        """Moves both weights to lie one behind the other in memory, where operations can load them as one."""
        self.wq.data, self.wv.data = torch.cat([self.wq, self.wv]).split(len(self.wq))

    def forward(
        self,
        packed: Tensor,
        positions: Tensor,
        operation: Callable[..., tuple[Tensor, Tensor]] = tau_scales,
    ) -> tuple[Tensor, Tensor]:
        """Computes packed qkv [T, qkv_dim], positions [T] → scales [T, H] of queries, and of values."""
        return operation(packed, positions, self.wq, self.wv, self.alpha)


class MixtureOfExperts(nn.Module):
    """Each token goes to its best experts; see `kestrel_ops.mixture_of_experts` for the arithmetic."""

    def __init__(self, dim: int, config: MoeConfig, expert_format: ExpertFormat = "model") -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(dim, config.num_experts)
        self.logits = nn.Identity()
        """Passes the router's logits on, in every backend, so that hooks can read and change the choices."""
        self.fc1 = _Experts(config.num_experts, 2 * config.expert_inner_dim, dim, expert_format)
        self.fc2 = _Experts(config.num_experts, dim, config.expert_inner_dim, expert_format)

    def forward(
        self,
        hidden: Tensor,
        operation: Callable[..., Tensor] = mixture_of_experts,
        adapters: BlockAdapters | None = None,
    ) -> Tensor:
        """Computes [T, dim] → [T, dim], by the reference or another implementation."""
        return self.mixed(hidden, self.router(hidden), operation, adapters)

    def mixed(
        self,
        hidden: Tensor,  # [T, dim]
        logits: Tensor,  # [T, experts], of the router
        operation: Callable[..., Tensor] = mixture_of_experts,
        adapters: BlockAdapters | None = None,
        positions: Tensor | None = None,  # [T]: of padding, which chooses no expert, they are negative
    ) -> Tensor:
        """Computes [T, dim] → [T, dim], with tokens that are already routed."""
        return operation(
            hidden,
            self.logits(logits),
            self.fc1.weight,
            self.fc2.weight,
            self.experts_per_token,
            self.fc1.scale,
            self.fc2.scale,
            None if adapters is None else adapters.of_experts(),
            positions,
        )


class _Experts(nn.Module):
    """A stack of weight matrices [experts, out, in]; those of 8 or 4 bits have scales, see `QuantisedStack`."""

    def __init__(self, num_experts: int, out_dim: int, in_dim: int, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None
        if expert_format == "int4":
            num_pairs = -(-in_dim // (2 * INT4_GROUP))
            self.weight = _stored(torch.uint8, num_experts, num_pairs, out_dim, INT4_GROUP)
            self.scale = _stored(torch.bfloat16, num_experts, num_pairs, out_dim, 2)
        elif expert_format == "float8":
            self.weight = _stored(torch.float8_e4m3fn, num_experts, out_dim, in_dim)
            self.scale = _stored(torch.float32, num_experts, out_dim)
        else:
            self.weight = nn.Parameter(torch.empty(num_experts, out_dim, in_dim))


def _stored(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def rotary_tables(
    rotary_dim: int, max_context: int, theta: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of position * theta^(-2i / rotary_dim), float32 [max_context, rotary_dim / 2]."""
    dims = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (dims / rotary_dim))
    angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()
