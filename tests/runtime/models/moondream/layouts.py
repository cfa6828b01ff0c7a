"""Writes a model's tensors the other way round: canonical names back into either checkpoint layout."""

import torch
from torch import Tensor

# Canonical name → training name, piece by piece, in order.
_TRAINING_PIECES = (
    ("text.wte", "text_model.transformer.embd.wte.weight"),
    ("text.post_ln.", "text_model.lm_head.ln."),
    ("text.lm_head.", "text_model.lm_head.linear."),
    ("text.blocks.", "text_model.transformer.h."),
    (".attn.tau.", ".tau_"),
    (".mlp.router.", ".gate."),
    (".mlp.fc1.scale", ".moe_quant.up_scale"),
    (".mlp.fc2.scale", ".moe_quant.down_scale"),
    ("vision.proj_mlp.", "vision_encoder.projection.mlp."),
    ("vision.patch_emb.", "vision_encoder.encoder.model.visual.patch_embed.linear."),
    ("vision.pos_emb", "vision_encoder.encoder.model.visual.pos_embed"),
    ("vision.post_ln.", "vision_encoder.encoder.model.visual.norm."),
    ("vision.blocks.", "vision_encoder.encoder.model.visual.blocks."),
    (".ln1.", ".norm1."),
    (".ln2.", ".norm2."),
    ("region.coord_features", "region_model.coordinate_features.weight"),
    ("region.size_features", "region_model.size_features.weight"),
    ("region.coord_encoder.", "region_model.coordinate_encoder."),
    ("region.coord_decoder.fc", "region_model.coordinate_decoder.fc"),
    ("region.size_decoder.fc", "region_model.size_decoder.fc"),
    ("region.coord_decoder.", "region_model.coordinate_head."),
    ("region.size_decoder.", "region_model.size_head."),
    ("region.", "region_model."),
)


def hub_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def training_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_training_name(name, tensor): _training_form(name, tensor) for name, tensor in tensors.items()}


def joined_tau(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The training layout's other spelling: query and value rows of tau in one tensor."""
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith((".tau_wq", ".tau_wv"))}
    for name, wq in tensors.items():
        if name.endswith(".tau_wq"):
            base = name.removesuffix("wq")
            joined[f"{base}wqwv"] = torch.cat([wq, tensors[f"{base}wv"]])
    return joined


def compiled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that a compiled module's state has."""
    return {name.replace(".ln.", "._orig_mod.ln."): tensor for name, tensor in tensors.items()}


def _training_name(name: str, tensor: Tensor) -> str:
    if name.startswith("text."):
        name = name.replace(".attn.qkv.", ".mixer.Wqkv.").replace(".attn.proj.", ".mixer.out_proj.")
        if tensor.ndim == 3:
            name = name.replace(".mlp.fc1.", ".mlp.experts.").replace(".mlp.fc2.", ".mlp.output_experts.")
    for canonical, training in _TRAINING_PIECES:
        name = (
            name.replace(canonical, training)
            if canonical.startswith(".")
            else _reprefixed(name, canonical, training)
        )
    return name


def _reprefixed(name: str, canonical: str, training: str) -> str:
    return training + name.removeprefix(canonical) if name.startswith(canonical) else name


def _training_form(name: str, tensor: Tensor) -> Tensor:
    return tensor.T.contiguous() if name.endswith("_features") else tensor
