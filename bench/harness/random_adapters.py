"""Adapters (LoRA) of random weights for any Moondream, in PEFT's layout: as fast and as large as trained ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel_runtime.models.moondream.adapters.slabs import target_shapes
from kestrel_runtime.models.moondream.config import MoondreamConfig, TextConfig

DEVIATION = 0.02
# From this version on PEFT takes experts as [experts, out, in].
_PEFT_VERSION = "0.19.0"


def write_random_adapters(folder: Path, model: Path, count: int, rank: int) -> tuple[str, ...]:
    """Write adapters of all targets of the model in the folder `model`, in bfloat16; returns their names.

    `rank` is that of a dense layer; the experts that a token uses share it.
    """
    config = MoondreamConfig.from_dict(json.loads((model / "config.json").read_text())).text
    names = tuple(f"tenant-{number}" for number in range(count))
    for seed, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        settings = {"peft_type": "LORA", "lora_alpha": 2 * rank, "r": rank, "peft_version": _PEFT_VERSION}
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
        save_file(dict(_tensors(config, rank, seed)), folder / name / "adapter_model.safetensors")
    return names


def _tensors(config: TextConfig, rank: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    for target, shape in target_shapes(config, rank).items():
        folded = shape.max_rank * (shape.num_experts or 1)
        for side, size in (("A", (folded, shape.in_dim)), ("B", (shape.out_dim, folded))):
            drawn = torch.empty(size, dtype=torch.bfloat16).normal_(0.0, DEVIATION, generator=chance)
            yield f"base_model.model.model.text.{target}.lora_{side}.weight", drawn
