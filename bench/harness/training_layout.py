"""Names of tensors in the layout that models are trained in, which is how float8 experts are published."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_VISUAL = "vision_encoder.encoder.model.visual"
# Canonical name → name in the training layout; the first that fits.
_TRAINING_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"text\.wte", "text_model.transformer.embd.wte.weight"),
        (r"text\.post_ln\.", "text_model.lm_head.ln."),
        (r"text\.lm_head\.", "text_model.lm_head.linear."),
        (r"text\.blocks\.(\d+)\.ln\.", r"text_model.transformer.h.\1.ln."),
        (r"text\.blocks\.(\d+)\.attn\.qkv\.", r"text_model.transformer.h.\1.mixer.Wqkv."),
        (r"text\.blocks\.(\d+)\.attn\.proj\.", r"text_model.transformer.h.\1.mixer.out_proj."),
        (r"text\.blocks\.(\d+)\.attn\.tau\.", r"text_model.transformer.h.\1.tau_"),
        (r"text\.blocks\.(\d+)\.mlp\.router\.", r"text_model.transformer.h.\1.gate."),
        (r"text\.blocks\.(\d+)\.mlp\.fc1\.scale", r"text_model.transformer.h.\1.moe_quant.up_scale"),
        (r"text\.blocks\.(\d+)\.mlp\.fc2\.scale", r"text_model.transformer.h.\1.moe_quant.down_scale"),
        (r"text\.blocks\.(\d+)\.mlp\.fc1\.experts", r"text_model.transformer.h.\1.mlp.experts.weight"),
        (r"text\.blocks\.(\d+)\.mlp\.fc2\.experts", r"text_model.transformer.h.\1.mlp.output_experts.weight"),
        (r"text\.blocks\.(\d+)\.mlp\.", r"text_model.transformer.h.\1.mlp."),
        (r"vision\.patch_emb\.", f"{_VISUAL}.patch_embed.linear."),
        (r"vision\.pos_emb", f"{_VISUAL}.pos_embed"),
        (r"vision\.post_ln\.", f"{_VISUAL}.norm."),
        (r"vision\.blocks\.(\d+)\.ln([12])\.", rf"{_VISUAL}.blocks.\1.norm\2."),
        (r"vision\.blocks\.", f"{_VISUAL}.blocks."),
        (r"vision\.proj_mlp\.", "vision_encoder.projection.mlp."),
        (r"region\.coord_features", "region_model.coordinate_features.weight"),
        (r"region\.size_features", "region_model.size_features.weight"),
        (r"region\.coord_encoder\.", "region_model.coordinate_encoder."),
        (r"region\.size_encoder\.", "region_model.size_encoder."),
        (r"region\.coord_decoder\.", "region_model.coordinate_head."),
        (r"region\.size_decoder\.", "region_model.size_head."),
        (r"region\.ln\.", "region_model.ln."),
    )
]


def training_name(name: str, tensor: Tensor) -> str:
    """The training layout's name of a canonical one. Raises ValueError where it has none."""
    if tensor.dtype is torch.float8_e4m3fn:
        name = name.replace(".weight", ".experts")
    for pattern, replacement in _TRAINING_NAMES:
        match = pattern.match(name)
        if match:
            return match.expand(replacement) + name[match.end() :]
    raise ValueError(f"{name} has no name in the training layout")
