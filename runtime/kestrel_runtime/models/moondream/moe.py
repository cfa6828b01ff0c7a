"""The mixture-of-experts MLP: a router and stacked experts, in full precision or float8 with row scales."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kestrel_ops import mixture_of_experts
from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters
from kestrel_runtime.models.moondream.config import MoeConfig


class MixtureOfExperts(nn.Module):
    """Each token goes to its best experts; see `kestrel_ops.mixture_of_experts` for the arithmetic."""

    def __init__(self, dim: int, config: MoeConfig, *, fp8: bool) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(dim, config.num_experts)
        self.logits = nn.Identity()
        """What the router gives passes through it on every path, so that hooks can see and change the choices."""
        self.fc1 = _Experts(config.num_experts, 2 * config.expert_inner_dim, dim, fp8=fp8)
        self.fc2 = _Experts(config.num_experts, dim, config.expert_inner_dim, fp8=fp8)

    def forward(
        self,
        hidden: Tensor,
        operation: Callable[..., Tensor] = mixture_of_experts,
        adapters: BlockAdapters | None = None,
    ) -> Tensor:
        """[T, dim] → [T, dim], by the reference or another implementation."""
        return self.mixed(hidden, self.router(hidden), operation, adapters)

    def mixed(
        self,
        hidden: Tensor,  # [T, dim]
        logits: Tensor,  # [T, experts], of the router
        operation: Callable[..., Tensor] = mixture_of_experts,
        adapters: BlockAdapters | None = None,
    ) -> Tensor:
        """[T, dim] → [T, dim], with tokens that are already routed."""
        return operation(
            hidden,
            self.logits(logits),
            self.fc1.weight,
            self.fc2.weight,
            self.experts_per_token,
            self.fc1.scale,
            self.fc2.scale,
            None if adapters is None else adapters.of_experts(),
        )


class _Experts(nn.Module):
    """A stack of weight matrices [experts, out, in]; float8 ones have a scale per expert and row."""

    def __init__(self, num_experts: int, out_dim: int, in_dim: int, *, fp8: bool) -> None:
        super().__init__()
        dtype = torch.float8_e4m3fn if fp8 else None
        self.weight = nn.Parameter(torch.empty(num_experts, out_dim, in_dim, dtype=dtype), requires_grad=not fp8)
        self.scale = (
            nn.Parameter(torch.empty(num_experts, out_dim, dtype=torch.float32), requires_grad=False)
            if fp8
            else None
        )
