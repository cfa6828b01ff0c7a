"""Checkpoints of any dimensions with random weights, scaled so that rounding errors and kernel faults show.

`bench.random_weights` writes models of the published dimensions for timing: their activations stay near zero. Here
every layer has a gain of 1.2 to 2.5, as the reference fixtures have, so that attention is peaked, logits deviate by
about 2.5, experts differ from token to token and greedy answers depend on the image. Weights are float32, experts
float32 or float8 with a scale per row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.tokenizer_file import write_tokenizer
from bench.harness.training_layout import training_name
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors

_BIAS_DEVIATION = 0.1
_NORM_DEVIATION = 0.1
_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
# Of names that match, the first: the gain (deviation * sqrt(fan-in)) of a matrix.
_GAINS = (
    (r"text\.lm_head\.", 2.5),
    (r"text\..*\.attn\.qkv\.", 2.2),
    (r"text\..*\.tau\.w[qv]", 1.0),
    (r"text\..*\.mlp\.(router|fc1)\.", 2.0),
    (r"text\.", 2.4),
    (r"vision\.proj_mlp\.", 2.0),
    (r"(vision|region)\.", 1.2),
)
# Tensors that are no matrices of a layer: their deviation.
_DEVIATIONS = (
    (r"text\.wte", 1.0),
    (r"text\..*\.tau\.alpha", 1.0),
    (r"vision\.pos_emb", 0.5),
    (r"region\.(coord|size)_features", 3.0),
)
_CONTROL_BIAS = 6.0
"""Added to the logits of coordinates and of both ends of a grounding, which would hardly ever be sampled else."""
_END_BIAS = 4.5


def write_scaled_model(
    folder: Path, config: MoondreamConfig, *, fp8_experts: bool, seed: int, words: tuple[str, ...] = ()
) -> None:
    """Write `config.json`, `tokenizer.json` and `model.safetensors`; each of `words` is one token.

    Equal arguments write equal files. Float8 experts come in the training layout, as they are published.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config_data(config), indent=1))
    write_tokenizer(folder / "tokenizer.json", config.text.vocab_size, words)
    shapes = expected_tensors(config, fp8_experts=fp8_experts)
    tensors = dict(_tensors(config, shapes, seed))
    if fp8_experts:
        # The training layout has the features of places the other way round.
        for name in ("region.coord_features", "region.size_features"):
            tensors[name] = tensors[name].T.contiguous()
        tensors = {training_name(name, tensor): tensor for name, tensor in tensors.items()}
    else:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def _config_data(config: MoondreamConfig) -> dict[str, Any]:
    sections = {name: asdict(getattr(config, name)) for name in ("text", "vision", "region")}
    tokenizer = config.tokenizer
    special = {name: getattr(tokenizer, name) for name in tokenizer.__dataclass_fields__ if name != "templates"}
    templates = {
        skill: {part: [*ids] for part, ids in parts.items()} for skill, parts in tokenizer.templates.items()
    }
    return {**sections, "tokenizer": {**special, "templates": templates}}


def _tensors(
    config: MoondreamConfig, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(".scale"):
            continue  # comes with its weight
        tensor = torch.randn(shape, generator=chance) * _deviation(name, shape)
        if re.search(r"(^|[._])ln[12]?\.weight", name):
            tensor += 1
        if name == "text.lm_head.bias":
            ids = config.tokenizer
            tensor[[ids.coord_id, ids.start_ground_points_id, ids.end_ground_id]] += _CONTROL_BIAS
            tensor[ids.eos_id] += _END_BIAS
        scale_name = f"{name.removesuffix('weight')}scale"
        if scale_name not in shapes:
            yield name, tensor
            continue
        scale = tensor.abs().amax(dim=-1) / _LARGEST_FLOAT8
        yield scale_name, scale
        yield name, (tensor / scale[..., None]).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    for pattern, deviation in _DEVIATIONS:
        if re.match(pattern, name):
            return deviation
    if re.search(r"(^|[._])ln[12]?\.", name):
        return _NORM_DEVIATION
    if name.endswith(".bias"):
        return _BIAS_DEVIATION
    return next(gain for pattern, gain in _GAINS if re.match(pattern, name)) * shape[-1] ** -0.5
