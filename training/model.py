"""The shape of Moondream Nano and its first weights. The modules themselves are the runtime's."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as LibraryTokenizer
from torch import nn

from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.model import Moondream
from training.tokens import VOCAB_SIZE, templates

_MAX_FREQUENCY = 8.0  # of the coordinate features: higher ones do not survive bfloat16


def config_dict(tokenizer_file: Path) -> dict[str, Any]:
    """`config.json` of Moondream Nano, with the prompt templates of this tokenizer."""
    dim = 256
    return {
        "text": {
            "dim": dim,
            "ff_dim": 512,
            "n_layers": 6,
            "vocab_size": VOCAB_SIZE,
            "max_context": 4096,
            "n_heads": 4,
            "n_kv_heads": 4,
            "prefix_attn": 257,
            "moe": {"num_experts": 4, "start_layer": 1, "experts_per_token": 2, "expert_inner_dim": 128},
            "tau_attn": True,
            "rope_theta": 10000.0,
        },
        "vision": {
            "enc_dim": 192,
            "enc_patch_size": 14,
            "enc_n_layers": 5,
            "enc_ff_dim": 512,
            "enc_n_heads": 6,
            "proj_out_dim": dim,
            "crop_size": 224,
            "in_channels": 3,
            "max_crops": 6,
            "overlap_margin": 2,
            "proj_inner_dim": 384,
        },
        "region": {
            "dim": dim,
            "coord_feat_dim": 64,
            "coord_out_dim": 512,
            "size_feat_dim": 128,
            "size_out_dim": 512,
            "decoder_arch": "linear",
            "use_ln": True,
        },
        "tokenizer": {
            "bos_id": 0,
            "eos_id": 0,
            "answer_id": 3,
            "thinking_id": 4,
            "coord_id": 5,
            "size_id": 6,
            "start_ground_points_id": 7,
            "end_ground_id": 9,
            "templates": templates(LibraryTokenizer.from_file(str(tokenizer_file))),
        },
    }


def read_config(folder: Path) -> MoondreamConfig:
    """The configuration that `folder` holds."""
    return MoondreamConfig.from_dict(json.loads((folder / "config.json").read_text()))


def new_model(config: MoondreamConfig, seed: int) -> Moondream:
    """A model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    model = Moondream(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".fc1.weight", ".fc2.weight")) and parameter.ndim == 3:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
            elif name.endswith((".tau.wq", ".tau.wv", ".tau.alpha")):
                parameter.zero_()
            # Every block starts as the identity.
            if name.endswith((".attn.proj.weight", "mlp.fc2.weight")) and "proj_mlp" not in name:
                parameter.zero_()
        model.text.wte.normal_(std=0.3)
        model.text.lm_head.weight.mul_(0.3)
        model.vision.pos_emb.normal_(std=0.1)
        model.region.coord_features.copy_(_frequencies(model.region.coord_features.shape[1])[None])
        sizes = model.region.size_features
        frequencies = _frequencies(sizes.shape[1] // 2)
        sizes.zero_()
        sizes[0, ::2] = frequencies
        sizes[1, 1::2] = frequencies
    # Exact in bfloat16 and never trained, so that the shipped file computes the same features.
    model.region.coord_features.requires_grad_(False)
    model.region.size_features.requires_grad_(False)
    return model


def _frequencies(count: int) -> torch.Tensor:
    exponents = torch.linspace(math.log2(0.25), math.log2(_MAX_FREQUENCY), count)
    return torch.exp2(exponents).to(torch.bfloat16).float()
