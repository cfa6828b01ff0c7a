"""Moondreams small enough for a test, with a vocabulary of full size."""

from dataclasses import replace

from kestrel_runtime.models.moondream.config import MoeConfig, MoondreamConfig
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, MOONDREAM_3


def small(config: MoondreamConfig) -> MoondreamConfig:
    """The same kind of model with heads of the published size and few of everything else."""
    moe = config.text.moe and MoeConfig(num_experts=4, start_layer=1, experts_per_token=2, expert_inner_dim=32)
    text = replace(config.text, dim=64, ff_dim=96, n_layers=2, n_heads=1, n_kv_heads=1, moe=moe)
    vision = replace(
        config.vision, enc_dim=72, enc_n_layers=1, enc_ff_dim=80, enc_n_heads=1, proj_out_dim=64, proj_inner_dim=96
    )
    region = replace(config.region, dim=64, coord_feat_dim=32, size_feat_dim=64)
    region = replace(region, inner_dim=region.inner_dim and 24)
    return replace(config, text=text, vision=vision, region=region)


SMALL_2 = small(MOONDREAM_2)
SMALL_3 = small(MOONDREAM_3)
