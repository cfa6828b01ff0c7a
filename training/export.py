"""From trained weights to the folder that ships: float8 experts with scales, all else bfloat16."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.quantise import quantised

MAX_BYTES = 12_000_000


def export(folder: Path, target: Path) -> None:
    """Write `model.safetensors`, `config.json` and `tokenizer.json` of a finished run to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    state = torch.load(folder / "weights.pt", map_location="cpu")
    save_file(stored_tensors(state), target / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, target / name)
    num_bytes = (target / "model.safetensors").stat().st_size
    if num_bytes > MAX_BYTES:
        raise ValueError(f"model.safetensors has {num_bytes} bytes, more than {MAX_BYTES}")
    print(f"{target}: {num_bytes / 1e6:.2f} MB")


def stored_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the hub layout, in the types that they ship in."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim == 3 and ".mlp.fc" in name:
            weight, scale = quantised(tensor)
            stored[f"model.{name}"] = weight.contiguous()
            stored[f"model.{name.removesuffix('weight')}scale"] = scale.contiguous()
        else:
            stored[f"model.{name}"] = tensor.to(torch.bfloat16).contiguous()
    return stored


def trainable_state(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `stored_tensors` made, back in float32 for training to go on from."""
    state: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        values = tensor.float() if scale is None else tensor.float() * scale[..., None]
        state[name.removeprefix("model.")] = values
    return state
