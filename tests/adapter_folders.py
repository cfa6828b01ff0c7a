"""Random adapters of a Moondream: written in each format, and merged into the weights that they change."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.adapters.slabs import target_shapes
from kestrel_runtime.models.moondream.config import TextConfig

Pair = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r]; of experts A [E, r, in] and B [E, out, r]."""

PEFT_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["qkv", "proj", "fc1", "fc2"],
    "peft_version": "0.21.2",
}


def random_pairs(
    config: TextConfig,
    seed: int,
    rank: int = 4,
    size: float = 0.1,
    targets: Callable[[str], bool] = lambda target: True,
) -> dict[str, Pair]:
    """An adapter that changes answers, by target; experts have `rank` for all those of a token together."""
    chance = torch.Generator().manual_seed(seed)
    pairs: dict[str, Pair] = {}
    for target, shape in target_shapes(config, rank).items():
        if targets(target):
            stack = () if shape.num_experts is None else (shape.num_experts,)
            a = torch.randn((*stack, shape.max_rank, shape.in_dim), generator=chance)
            b = torch.randn((*stack, shape.out_dim, shape.max_rank), generator=chance)
            pairs[target] = (size * a, size * b)
    return pairs


def peft_tensors(pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    """As PEFT writes them: A and B of experts in one matrix each."""
    tensors: dict[str, Tensor] = {}
    for target, (a, b) in pairs.items():
        if a.ndim == 3:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        module = f"base_model.model.model.text.{target}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a.contiguous(), b.contiguous()
    return tensors


def write_peft(folder: Path, pairs: Mapping[str, Pair], **config: Any) -> Path:
    """A folder as PEFT writes it; returns it. The scale is `lora_alpha` / rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **config}), encoding="utf-8")
    save_file(peft_tensors(pairs), folder / "adapter_model.safetensors")
    return folder


def scaled(pairs: Mapping[str, Pair], alpha: float = 8.0) -> dict[str, Pair]:
    """What `write_peft` means with an alpha: B with the scale."""
    return {target: (a, b * (alpha / a.shape[-2])) for target, (a, b) in pairs.items()}


@torch.no_grad()
def merged(loaded: LoadedModel, pairs: Mapping[str, Pair]) -> LoadedModel:
    """A copy of a model whose weights have had B @ A added."""
    model = copy.deepcopy(loaded.model)
    for target, (a, b) in pairs.items():
        module = model.text.get_submodule(target)
        if getattr(module, "scale", None) is not None:  # float8 cannot hold the sum
            wide = module.weight.float() * module.scale[..., None]
            module.weight, module.scale = nn.Parameter(wide, requires_grad=False), None
        module.weight += b @ a
    return replace(loaded, model=model)
