"""Models of a few thousand random weights, for what must hold of any weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.model import Moondream
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, model_config

Module = TypeVar("Module", bound=torch.nn.Module)


def tiny_config(
    generation: int = 2,
    *,
    crop_size: int = 56,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    max_context: int = 400,
    ff_dim: int = 32,
) -> MoondreamConfig:
    """A configuration as small as it may be; the ids and templates are those of the reference models."""
    data = model_config(MD2_SMALL if generation == 2 else MD3_SMALL)
    side = crop_size // 14
    data["text"] |= {
        "dim": 8 * n_heads,
        "ff_dim": ff_dim,
        "n_layers": 3,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "max_context": max_context,
        "prefix_attn": 1 + side**2,
    }
    data["vision"] |= {
        "enc_dim": 12,
        "enc_n_heads": 3,
        "enc_n_layers": 2,
        "enc_ff_dim": 20,
        "proj_inner_dim": 16,
        "proj_out_dim": 8 * n_heads,
        "crop_size": crop_size,
        "overlap_margin": max(1, side // 7),
    }
    data["region"] |= {"dim": 8 * n_heads, "coord_feat_dim": 8, "size_feat_dim": 8}
    if generation == 3:
        data["text"]["moe"] = {
            "num_experts": 4,
            "start_layer": 1,
            "experts_per_token": 2,
            "expert_inner_dim": 6,
        }
    return MoondreamConfig.from_dict(data)


def random_model(config: MoondreamConfig, seed: int = 0, *, fp8_experts: bool = False) -> Moondream:
    """A model with random weights, small enough that its outputs stay near 1."""
    return randomised(Moondream(config, fp8_experts=fp8_experts), seed)


def randomised(module: Module, seed: int = 0) -> Module:
    """Give every parameter of a module random values in its own type."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = (0.3 * torch.randn(parameter.shape)).to(parameter.dtype)
    return module.eval().requires_grad_(False)


class DenseAttend:
    """Attention of one sequence, written out: keeps all keys and values, position by position."""

    def __init__(self, prefix_length: int = 0) -> None:
        self.prefix_length = prefix_length
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[layer] = torch.cat((self.keys[layer], key)) if layer in self.keys else key
        self.values[layer] = torch.cat((self.values[layer], value)) if layer in self.values else value
        length = len(self.keys[layer])
        heads_per_group = query.shape[1] // key.shape[1]
        keys = self.keys[layer].repeat_interleave(heads_per_group, dim=1)
        values = self.values[layer].repeat_interleave(heads_per_group, dim=1)
        rows = []
        for row, position in enumerate(range(length - len(query), length)):
            visible = self.prefix_length if position < self.prefix_length else position + 1
            scores = torch.einsum("hd,nhd->hn", query[row], keys[:visible]) / query.shape[-1] ** 0.5
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values[:visible]))
        return torch.stack(rows)
