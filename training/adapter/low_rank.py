"""Low-rank matrices beside frozen linear layers, and the files in which PEFT keeps them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kestrel_runtime.models.moondream.model import Moondream

RANK, ALPHA = 8, 16
_MODULES = ("qkv", "proj")


class LowRankLinear(nn.Module):
    """A linear layer that stays, and what an adapter adds to it."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        a = torch.randn((RANK, base.in_features), generator=generator) / math.sqrt(base.in_features)
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return self.base(rows) + rows @ self.a.T @ self.b.T * (ALPHA / RANK)


def add_adapter(model: Moondream, layers: tuple[int, ...], seed: int) -> dict[str, LowRankLinear]:
    """Freeze a model, and put beside the attention of some blocks an adapter that adds nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    added: dict[str, LowRankLinear] = {}
    for layer in layers:
        attention = model.text.blocks[layer].get_submodule("attn")
        for name in _MODULES:
            base = attention.get_submodule(name)
            assert isinstance(base, nn.Linear)
            added[f"text.blocks.{layer}.attn.{name}"] = own = LowRankLinear(base, generator)
            setattr(attention, name, own)
    return added


def write_peft(folder: Path, added: Mapping[str, LowRankLinear], base_model: str) -> int:
    """Write `adapter_config.json` and `adapter_model.safetensors`, in bfloat16. Returns the bytes of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = sorted({int(name.split(".")[2]) for name in added})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": list(_MODULES),
        "layers_to_transform": layers,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, own in added.items():
        for side, tensor in (("A", own.a), ("B", own.b)):
            tensors[f"base_model.model.model.{name}.lora_{side}.weight"] = tensor.detach().to(torch.bfloat16)
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file)
    return file.stat().st_size
