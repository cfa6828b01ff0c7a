"""Defines what the decoder, the vision encoder and the region model share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters


class Mlp(nn.Module):
    """Two linear layers around a tanh-form GELU."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, out_dim)

    def forward(self, hidden: Tensor, adapters: BlockAdapters | None = None) -> Tensor:
        """Computes [T, in] → [T, out]."""
        inner = self.fc1(hidden)
        if adapters is not None:
            adapters.add_fc1(inner, hidden)
        inner = gelu(inner, approximate="tanh")
        out = self.fc2(inner)
        if adapters is not None:
            adapters.add_fc2(out, inner)
        return out


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along their first dimension, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
