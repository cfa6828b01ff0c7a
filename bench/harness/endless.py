"""A copy of a checkpoint that never ends an answer by itself, so that every answer is exactly `max_tokens` long."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

END_BIAS = -1e4
"""What the head adds to the logit of the end: far below any other, and still a number in every format."""
_END_ID = 0


def write_endless(source: Path, target: Path) -> None:
    """Copy the folder `source`, in the hub's layout with one weights file, to the new folder `target`."""
    target.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(source / name, target / name)
    tensors = load_file(source / "model.safetensors")
    tensors["model.text.lm_head.bias"][_END_ID] = END_BIAS
    save_file(tensors, target / "model.safetensors")
