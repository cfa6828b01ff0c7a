"""Moondreams small enough for a test, with a vocabulary of full size or that of the built-in model."""

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

import kestrel_runtime
from bench.harness.checkpoints import write_endless
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


def write_endless_nano(target: Path) -> Path:
    """Write the built-in model to the new folder `target`, with few of its blocks, for one crop of an image.

    It has a block of each kind. Its answers are nonsense, and never end before they are as long as they may be.
    """
    source = Path(kestrel_runtime.__path__[0]) / "nano"
    config = json.loads((source / "config.json").read_text())
    config["text"]["n_layers"], config["vision"]["enc_n_layers"], config["vision"]["max_crops"] = 2, 1, 1
    dropped = re.compile(r"model\.text\.blocks\.([2-9])\.|model\.vision\.blocks\.([1-9])\.")
    tensors = {
        name: tensor for name, tensor in load_file(source / "model.safetensors").items() if not dropped.match(name)
    }
    with tempfile.TemporaryDirectory() as name:
        shallow = Path(name)
        (shallow / "config.json").write_text(json.dumps(config))
        shutil.copyfile(source / "tokenizer.json", shallow / "tokenizer.json")
        save_file(tensors, shallow / "model.safetensors")
        write_endless(shallow, target)
    return target
