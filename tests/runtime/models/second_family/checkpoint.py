"""A checkpoint of the second family, with random weights."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from kestrel_runtime.loading.tokenizer import Tokenizer
from tests.reference_fixtures import CHECKOUT

NANO_TOKENIZER = CHECKOUT / "runtime" / "kestrel_runtime" / "nano" / "tokenizer.json"
DIM, HEADS, CONTEXT = 24, 3, 90


def write_checkpoint(folder: Path) -> None:
    """Write weights, tokenizer and configuration."""
    chance = torch.Generator().manual_seed(3)
    vocabulary = Tokenizer.from_file(NANO_TOKENIZER).vocab_size
    shapes = {
        "embedding": (vocabulary, DIM),
        "position": (CONTEXT, DIM),
        "qkv": (3 * DIM, DIM),
        "head": (vocabulary, DIM),
    }
    save_file(
        {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    shutil.copy(NANO_TOKENIZER, folder / "tokenizer.json")
    config = {
        "model_type": "small-text",
        "vocab_size": vocabulary,
        "dim": DIM,
        "n_kv_heads": HEADS,
        "max_context": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "small-text", **config}))
