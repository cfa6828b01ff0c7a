"""Lists the dimensions of published Moondreams, and infers what configurations omit from tensors and defaults.

Sources of the constants: the public reference (vikhyat/moondream) and the
configuration of the published checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.config import (
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)

TEXT_HEAD_DIM = 64
VISION_HEAD_DIM = 72
EXPERTS_PER_TOKEN = 8
IN_CHANNELS = 3
MAX_CROPS = 12
OVERLAP_MARGIN = 4
# Generations 2 and 3: the longest context, and the base of the rotary frequencies.
MAX_CONTEXT = {2: 2048, 3: 32_768}
ROPE_THETA = {2: 10_000.0, 3: 1_500_000.0}

Shapes = Mapping[str, tuple[int, ...]]

_VISION = VisionConfig(
    enc_dim=1152,
    enc_patch_size=14,
    enc_n_layers=27,
    enc_ff_dim=4304,
    enc_n_heads=16,
    proj_out_dim=2048,
    crop_size=378,
    in_channels=3,
    max_crops=12,
    overlap_margin=4,
    proj_inner_dim=8192,
)
_IDS = TokenizerConfig(0, 0, 3, 4, 5, 6, 7, 9, MappingProxyType({}))

MOONDREAM_2 = MoondreamConfig(
    TextConfig(
        dim=2048,
        ff_dim=8192,
        n_layers=24,
        vocab_size=51_200,
        max_context=MAX_CONTEXT[2],
        n_heads=32,
        n_kv_heads=32,
        prefix_attn=730,
        rope_theta=ROPE_THETA[2],
    ),
    _VISION,
    RegionConfig(
        dim=2048, coord_feat_dim=256, coord_out_dim=1024, size_feat_dim=512, size_out_dim=2048, inner_dim=8192
    ),
    _IDS,
)
MOONDREAM_3 = MoondreamConfig(
    replace(
        MOONDREAM_2.text,
        max_context=MAX_CONTEXT[3],
        rope_theta=ROPE_THETA[3],
        moe=MoeConfig(num_experts=64, start_layer=4, experts_per_token=8, expert_inner_dim=1024),
        tau_attn=True,
    ),
    _VISION,
    replace(MOONDREAM_2.region, inner_dim=None, decoder_arch="linear", use_ln=True),
    _IDS,
)
PUBLISHED: Mapping[str, tuple[MoondreamConfig, bool]] = MappingProxyType(
    {
        "moondream2": (MOONDREAM_2, False),
        "moondream3": (MOONDREAM_3, False),
        "moondream3-fp8": (MOONDREAM_3, True),
    }
)
"""The dimensions by name, without prompt templates, and whether the experts are float8."""


def infer_config(shapes: Shapes) -> dict[str, Any]:
    """Returns a `config.json` that fits canonical names and shapes. Raises `CheckpointError` if none does."""
    try:
        return {
            "text": _text(shapes),
            "vision": _vision(shapes),
            "region": _region(shapes),
            "tokenizer": _tokenizer(_generation(shapes)),
        }
    except KeyError as error:
        raise CheckpointError(f"cannot infer the model's dimensions: there is no tensor {error}") from error
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise CheckpointError(f"cannot infer the model's dimensions from its tensors' shapes: {error}") from error


def _generation(shapes: Shapes) -> int:
    is_third = any(name.endswith((".attn.tau.alpha", ".mlp.router.weight")) for name in shapes)
    return 3 if is_third else 2


def _text(shapes: Shapes) -> dict[str, Any]:
    vocab_size, dim = shapes["text.wte"]
    n_layers = _num_blocks(shapes, "text")
    tau = shapes.get("text.blocks.0.attn.tau.alpha")
    n_heads = math.prod(tau) if tau is not None else dim // TEXT_HEAD_DIM
    head_dim = dim // n_heads
    qkv_dim = shapes["text.blocks.0.attn.qkv.weight"][0]
    generation = _generation(shapes)
    text: dict[str, Any] = {
        "dim": dim,
        "ff_dim": 4 * dim,
        "n_layers": n_layers,
        "vocab_size": vocab_size,
        "max_context": MAX_CONTEXT[generation],
        "n_heads": n_heads,
        "n_kv_heads": (qkv_dim // head_dim - n_heads) // 2,
        "prefix_attn": 1 + shapes["vision.pos_emb"][-2],
        "tau_attn": tau is not None,
        "rope_theta": ROPE_THETA[generation],
    }
    moe_layers = [layer for layer in range(n_layers) if f"text.blocks.{layer}.mlp.router.weight" in shapes]
    dense_layers = [layer for layer in range(n_layers) if layer not in moe_layers]
    if dense_layers:
        text["ff_dim"] = shapes[f"text.blocks.{dense_layers[0]}.mlp.fc1.weight"][0]
    if moe_layers:
        num_experts, _, expert_inner_dim = shapes[f"text.blocks.{moe_layers[0]}.mlp.fc2.weight"]
        text["moe"] = {
            "num_experts": num_experts,
            "start_layer": moe_layers[0],
            "experts_per_token": min(EXPERTS_PER_TOKEN, num_experts),
            "expert_inner_dim": expert_inner_dim,
        }
    return text


def _vision(shapes: Shapes) -> dict[str, Any]:
    enc_dim, patch_values = shapes["vision.patch_emb.weight"]
    patch_size = math.isqrt(patch_values // IN_CHANNELS)
    num_patches = shapes["vision.pos_emb"][-2]
    proj_out_dim, proj_inner_dim = shapes["vision.proj_mlp.fc2.weight"]
    return {
        "enc_dim": enc_dim,
        "enc_patch_size": patch_size,
        "enc_n_layers": _num_blocks(shapes, "vision"),
        "enc_ff_dim": shapes["vision.blocks.0.mlp.fc1.weight"][0],
        "enc_n_heads": max(1, enc_dim // VISION_HEAD_DIM),
        "proj_out_dim": proj_out_dim,
        "crop_size": math.isqrt(num_patches) * patch_size,
        "in_channels": IN_CHANNELS,
        "max_crops": MAX_CROPS,
        "overlap_margin": OVERLAP_MARGIN,
        "proj_inner_dim": proj_inner_dim,
    }


def _region(shapes: Shapes) -> dict[str, Any]:
    dim, coord_feat_dim = shapes["region.coord_encoder.weight"]
    is_mlp = "region.coord_decoder.fc1.weight" in shapes
    last = ".fc2.weight" if is_mlp else ".weight"
    region: dict[str, Any] = {
        "dim": dim,
        "coord_feat_dim": coord_feat_dim,
        "coord_out_dim": shapes[f"region.coord_decoder{last}"][0],
        "size_feat_dim": shapes["region.size_encoder.weight"][1],
        "size_out_dim": shapes[f"region.size_decoder{last}"][0],
        "decoder_arch": "mlp" if is_mlp else "linear",
        "use_ln": "region.ln.weight" in shapes,
    }
    if is_mlp:
        region["inner_dim"] = shapes["region.coord_decoder.fc1.weight"][0]
    return region


def _num_blocks(shapes: Shapes, part: str) -> int:
    matches = (re.match(rf"{part}\.blocks\.(\d+)\.", name) for name in shapes)
    layers = [int(match[1]) for match in matches if match]
    if not layers:
        raise KeyError(f"{part}.blocks.0")
    if max(layers) >= len(shapes):  # every block has tensors
        raise ValueError(f"there is a block {max(layers)} of {part}, and not those before it")
    return 1 + max(layers)


def _tokenizer(generation: int) -> dict[str, Any]:
    """Returns ids and templates of the starmie tokenizer, which every published Moondream since June 2025 uses."""
    templates: dict[str, Any] = {
        "caption": {
            "short": [1, 32708, 2, 12492, 3],
            "normal": [1, 32708, 2, 6382, 3],
            "long": [1, 32708, 2, 4059, 3],
        },
        "query": {"prefix": [1, 15381, 2], "suffix": [3]},
        "detect": {"prefix": [1, 7235, 476, 2], "suffix": [3]},
        "point": {"prefix": [1, 2581, 2], "suffix": [3]},
    }
    if generation == 3:
        templates["segment"] = {"prefix": [1, 17374, 2], "suffix": [3]}
    return {
        "bos_id": 0,
        "eos_id": 0,
        "answer_id": 3,
        "thinking_id": 4,
        "coord_id": 5,
        "size_id": 6,
        "start_ground_points_id": 7,
        "end_ground_id": 9,
        "templates": templates,
    }
