"""Models of a few thousand random weights, for what must hold of any weights."""

from typing import TypeVar

import torch

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
        data["text"]["moe"] = {"num_experts": 4, "start_layer": 1, "experts_per_token": 2, "expert_inner_dim": 6}
    return MoondreamConfig.from_dict(data)


def random_model(config: MoondreamConfig, seed: int = 0, *, fp8_experts: bool = False) -> Moondream:
    """A model with random weights, small enough that its outputs stay near 1."""
    return randomised(Moondream(config, expert_format="float8" if fp8_experts else "model"), seed)


def randomised(module: Module, seed: int = 0) -> Module:
    """Give every parameter of a module random values in its own type."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = (0.3 * torch.randn(parameter.shape)).to(parameter.dtype)
    return module.eval().requires_grad_(False)
