"""Checkpoints that the benches write: endless ones, random adapters, tokenizers, the layout of training."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from kestrel_runtime.models.moondream.adapters.slabs import target_shapes
from kestrel_runtime.models.moondream.config import MoondreamConfig, TextConfig

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


DEVIATION = 0.02
# From this version on PEFT takes experts as [experts, out, in].
_PEFT_VERSION = "0.19.0"


def write_random_adapters(folder: Path, model: Path, count: int, rank: int) -> tuple[str, ...]:
    """Write adapters of all targets of the model in the folder `model`, in bfloat16; returns their names.

    `rank` is that of a dense layer; the experts that a token uses share it.
    """
    config = MoondreamConfig.from_dict(json.loads((model / "config.json").read_text())).text
    return write_adapters_of(folder, config, count, rank)


def write_adapters_of(folder: Path, config: TextConfig, count: int, rank: int) -> tuple[str, ...]:
    """The same for a decoder."""
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


NUM_CONTROL_TOKENS = 10
END_OF_TEXT = "<|endoftext|>"


def write_tokenizer(file: Path, num_tokens: int, words: Iterable[str]) -> None:
    """Write a tokenizer of `num_tokens` ids in which each of `words`, blanks before them included, is one."""
    control = [END_OF_TEXT, *(f"<|control_{number}|>" for number in range(1, NUM_CONTROL_TOKENS))]
    names = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known = set(names)
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(words):
        letters = _spelled(word)
        for end in range(2, len(letters) + 1):
            # A word grows from its front. Fronts are blanks or capitals, which no word has inside.
            if letters[:end] not in known:
                known.add(letters[:end])
                names.append(letters[:end])
                merges.append((letters[: end - 1], letters[end - 1]))
    names += [_spelled(f" {number:05d}") for number in range(num_tokens - len(names))]
    if len(names) > num_tokens:
        raise ValueError(f"{num_tokens} tokens are too few: the words alone need {len(names)}")
    library = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(control)
    library.save(str(file))


def _spelled(text: str) -> str:
    """Text in the byte-level alphabet; blanks and plain letters are all that is needed."""
    return text.replace(" ", "Ġ")


_VISUAL = "vision_encoder.encoder.model.visual"
# Canonical name → name in the training layout; the first that fits.
_TRAINING_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"text\.wte", "text_model.transformer.embd.wte.weight"),
        (r"text\.post_ln\.", "text_model.lm_head.ln."),
        (r"text\.lm_head\.", "text_model.lm_head.linear."),
        (r"text\.blocks\.(\d+)\.ln\.", r"text_model.transformer.h.\1.ln."),
        (r"text\.blocks\.(\d+)\.attn\.qkv\.", r"text_model.transformer.h.\1.mixer.Wqkv."),
        (r"text\.blocks\.(\d+)\.attn\.proj\.", r"text_model.transformer.h.\1.mixer.out_proj."),
        (r"text\.blocks\.(\d+)\.attn\.tau\.", r"text_model.transformer.h.\1.tau_"),
        (r"text\.blocks\.(\d+)\.mlp\.router\.", r"text_model.transformer.h.\1.gate."),
        (r"text\.blocks\.(\d+)\.mlp\.fc1\.scale", r"text_model.transformer.h.\1.moe_quant.up_scale"),
        (r"text\.blocks\.(\d+)\.mlp\.fc2\.scale", r"text_model.transformer.h.\1.moe_quant.down_scale"),
        (r"text\.blocks\.(\d+)\.mlp\.fc1\.experts", r"text_model.transformer.h.\1.mlp.experts.weight"),
        (r"text\.blocks\.(\d+)\.mlp\.fc2\.experts", r"text_model.transformer.h.\1.mlp.output_experts.weight"),
        (r"text\.blocks\.(\d+)\.mlp\.", r"text_model.transformer.h.\1.mlp."),
        (r"vision\.patch_emb\.", f"{_VISUAL}.patch_embed.linear."),
        (r"vision\.pos_emb", f"{_VISUAL}.pos_embed"),
        (r"vision\.post_ln\.", f"{_VISUAL}.norm."),
        (r"vision\.blocks\.(\d+)\.ln([12])\.", rf"{_VISUAL}.blocks.\1.norm\2."),
        (r"vision\.blocks\.", f"{_VISUAL}.blocks."),
        (r"vision\.proj_mlp\.", "vision_encoder.projection.mlp."),
        (r"region\.coord_features", "region_model.coordinate_features.weight"),
        (r"region\.size_features", "region_model.size_features.weight"),
        (r"region\.coord_encoder\.", "region_model.coordinate_encoder."),
        (r"region\.size_encoder\.", "region_model.size_encoder."),
        (r"region\.coord_decoder\.", "region_model.coordinate_head."),
        (r"region\.size_decoder\.", "region_model.size_head."),
        (r"region\.ln\.", "region_model.ln."),
    )
]


def training_name(name: str, tensor: Tensor) -> str:
    """The training layout's name of a canonical one. Raises ValueError where it has none."""
    if tensor.dtype is torch.float8_e4m3fn:
        name = name.replace(".weight", ".experts")
    for pattern, replacement in _TRAINING_NAMES:
        match = pattern.match(name)
        if match:
            return match.expand(replacement) + name[match.end() :]
    raise ValueError(f"{name} has no name in the training layout")
