"""Small Moondreams of hard dimensions, drawn at random from a seed, and a fixed list that is hard for kernels.

Kernels work in blocks of 16, 32, 64 or 128, and the published models are multiples of most. Faults in tails,
masks and alignment only show at widths that are not, so most numbers here are odd multiples of 8 or odd altogether.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.harness.checkpoints import training_name, write_tokenizer
from kestrel_runtime.models.moondream.config import (
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors

TOKENS = ("What", " is", " the", " value", " of", " tallest", " bar", " shown", " here")
"""Words of the prompts that are one token each; everything else is spelled byte by byte."""
_SMALLEST_VOCABULARY = 310
"""Bytes, control tokens, and the beginnings of `TOKENS`."""
_MAX_CONTEXT = 512
_ROPE_THETA = {2: 10_000.0, 3: 1_500_000.0}
_IDS = {
    "bos_id": 0,
    "eos_id": 0,
    "answer_id": 3,
    "thinking_id": 4,
    "coord_id": 5,
    "size_id": 6,
    "start_ground_points_id": 7,
    "end_ground_id": 9,
}
_WIDTHS = (24, 32, 40, 48, 64, 77, 96, 104, 112, 130)
"""Inner dimensions of MLPs and experts."""
_TEXT_HEAD_SIZES = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 72)
_VISION_HEAD_SIZES = (7, 8, 11, 12, 16, 20, 24, 40, 72)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model to write and check."""

    name: str
    config: MoondreamConfig
    fp8_experts: bool
    image_sizes: tuple[tuple[int, int], ...]
    """Width and height in pixels of the images to ask about."""

    def described(self) -> str:
        """The dimensions in one line."""
        text, vision, moe = self.config.text, self.config.vision, self.config.text.moe
        heads = f"{text.n_heads}x{text.head_dim}"
        if text.n_kv_heads != text.n_heads:
            heads += f"/{text.n_kv_heads}"
        line = (
            f"text {text.n_layers}x{text.dim} heads {heads} ff {text.ff_dim}, vision {vision.enc_n_layers}x"
            f"{vision.enc_dim} heads {vision.enc_n_heads} ff {vision.enc_ff_dim}, {vision.num_image_tokens} patches"
        )
        if moe is None:
            return line
        kind = "float8 " if self.fp8_experts else ""
        return f"{line}, {moe.num_experts} {kind}experts of {moe.expert_inner_dim}, top {moe.experts_per_token}"


def drawn_shape(seed: int) -> ModelShape:
    """The model of a seed: Moondream 2 for even ones, else Moondream 3, half of them with float8 experts."""
    chance, generation = random.Random(f"model shape {seed}"), 2 + seed % 2
    vision = _vision(chance)
    text = _text(chance, generation, vision)
    config = _model(text, vision, _region(chance, generation, text.dim))
    sizes = _image_sizes(chance, vision)
    return ModelShape(f"seed-{seed}", config, generation == 3 and seed % 4 == 3, sizes)


def _text(chance: random.Random, generation: int, vision: VisionConfig) -> TextConfig:
    heads, n_layers = chance.choice((1, 2, 3, 4)), chance.choice((2, 3, 4))
    dim = heads * chance.choice(_TEXT_HEAD_SIZES)
    moe = None
    kv_heads = chance.choice([count for count in range(1, heads + 1) if heads % count == 0])
    if generation == 3:
        kv_heads, num_experts = heads, chance.choice((3, 4, 7, 8))
        moe = MoeConfig(
            num_experts=num_experts,
            start_layer=chance.randrange(n_layers),
            experts_per_token=chance.randint(1, min(4, num_experts)),
            expert_inner_dim=chance.choice(_WIDTHS),
        )
    return TextConfig(
        dim=dim,
        ff_dim=chance.choice(_WIDTHS),
        n_layers=n_layers,
        vocab_size=_SMALLEST_VOCABULARY + chance.randrange(300),
        max_context=_MAX_CONTEXT,
        n_heads=heads,
        n_kv_heads=kv_heads,
        prefix_attn=1 + vision.num_image_tokens,
        moe=moe,
        tau_attn=generation == 3,
        rope_theta=_ROPE_THETA[generation],
    )


def _vision(chance: random.Random) -> VisionConfig:
    heads, grid, patch = chance.choice((1, 2, 3, 4)), chance.choice((3, 5, 6, 7, 9, 12)), chance.choice((7, 8, 14))
    return VisionConfig(
        enc_dim=heads * chance.choice(_VISION_HEAD_SIZES),
        enc_patch_size=patch,
        enc_n_layers=chance.choice((1, 2, 3, 5)),
        enc_ff_dim=chance.choice(_WIDTHS),
        enc_n_heads=heads,
        proj_out_dim=1,  # the text's, once that is known
        crop_size=grid * patch,
        in_channels=3,
        max_crops=chance.choice((1, 4, 5, 12)),
        overlap_margin=chance.randrange((grid + 1) // 2),
        proj_inner_dim=chance.choice(_WIDTHS),
    )


def _region(chance: random.Random, generation: int, dim: int) -> RegionConfig:
    features, bins = (8, 16, 26, 32, 48), (100, 256, 333, 1024)
    region = RegionConfig(
        dim=dim,
        coord_feat_dim=chance.choice(features),
        coord_out_dim=chance.choice(bins),
        size_feat_dim=chance.choice(features),
        size_out_dim=2 * chance.choice(bins),
        inner_dim=chance.choice(_WIDTHS),
    )
    if generation == 2:
        return region
    return replace(region, inner_dim=None, decoder_arch="linear", use_ln=True)


def _image_sizes(chance: random.Random, vision: VisionConfig) -> tuple[tuple[int, int], ...]:
    """One image that is smaller than a crop, and one that is cut."""
    side = vision.crop_size
    small = (chance.randint(side // 2, side), chance.randint(side // 2, side))
    return small, (chance.randint(side, 4 * side), chance.randint(side, 3 * side))


def _model(text: TextConfig, vision: VisionConfig, region: RegionConfig) -> MoondreamConfig:
    caption = {length: (1, 11 + place, 2, 3) for place, length in enumerate(("short", "normal", "long"))}
    templates: dict[str, Mapping[str, tuple[int, ...]]] = {"caption": caption}
    for place, skill in enumerate(("query", "detect", "point", "segment")):
        if skill != "segment" or text.tau_attn:
            templates[skill] = {"prefix": (1, 20 + place, 2), "suffix": (3,)}
    config = MoondreamConfig(
        text, replace(vision, proj_out_dim=text.dim), region, TokenizerConfig(**_IDS, templates=templates)
    )
    config.check()
    return config


def _hard(name: str, *, dims: Mapping[str, Mapping[str, int]], experts: bool, fp8: bool = False) -> ModelShape:
    """A model of these dimensions, in which everything that is not named is like the reference fixtures."""
    vision = VisionConfig(
        **{
            "enc_dim": 48,
            "enc_patch_size": 14,
            "enc_n_layers": 8,
            "enc_ff_dim": 104,
            "enc_n_heads": 2,
            "proj_out_dim": 1,
            "crop_size": 378,
            "in_channels": 3,
            "max_crops": 12,
            "overlap_margin": 4,
            "proj_inner_dim": 104,
            **dims.get("vision", {}),
        }
    )
    moe = MoeConfig(num_experts=8, start_layer=1, experts_per_token=2, expert_inner_dim=40) if experts else None
    text = TextConfig(
        **{
            "dim": 48,
            "ff_dim": 104,
            "n_layers": 4,
            "vocab_size": 613,
            "max_context": 2048,
            "n_heads": 2,
            "n_kv_heads": 2,
            "prefix_attn": 1 + vision.num_image_tokens,
            **dims.get("text", {}),
        },
        moe=moe,
        tau_attn=experts,
        rope_theta=_ROPE_THETA[3 if experts else 2],
    )
    region = RegionConfig(
        dim=text.dim, coord_feat_dim=32, coord_out_dim=1024, size_feat_dim=64, size_out_dim=2048, inner_dim=40
    )
    if experts:
        region = replace(region, inner_dim=None, decoder_arch="linear", use_ln=True)
    side = vision.crop_size
    return ModelShape(
        name, _model(text, vision, region), fp8, ((side // 3, side // 4), (side * 16 // 10, side * 11 // 10))
    )


HARD_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _hard("width-48", dims={}, experts=False),
            _hard("width-48-experts", dims={}, experts=True),
            _hard("width-48-fp8-experts", dims={}, experts=True, fp8=True),
            # Nothing is a multiple of 16, and the MLPs are of odd width.
            _hard(
                "odd",
                dims={
                    "vision": {
                        "enc_dim": 77,
                        "enc_n_heads": 7,
                        "enc_ff_dim": 101,
                        "crop_size": 84,
                        "max_crops": 5,
                        "overlap_margin": 1,
                        "proj_inner_dim": 77,
                    },
                    "text": {"dim": 60, "n_heads": 3, "n_kv_heads": 1, "ff_dim": 77},
                },
                experts=False,
            ),
            _hard(
                "odd-experts",
                dims={
                    "vision": {
                        "enc_dim": 40,
                        "enc_n_heads": 5,
                        "enc_ff_dim": 24,
                        "crop_size": 70,
                        "max_crops": 7,
                        "overlap_margin": 2,
                        "proj_inner_dim": 40,
                    },
                    "text": {"dim": 40, "n_heads": 1, "n_kv_heads": 1, "ff_dim": 77, "vocab_size": 331},
                },
                experts=True,
            ),
            # Widths just above a block of 128 and of 64.
            _hard(
                "block-and-tail",
                dims={
                    "vision": {"enc_dim": 144, "enc_n_heads": 2, "enc_ff_dim": 272, "crop_size": 168},
                    "text": {"dim": 144, "n_heads": 2, "n_kv_heads": 2, "ff_dim": 528, "vocab_size": 1041},
                },
                experts=False,
            ),
        )
    }
)
"""By name: dimensions that kernels have failed on or that lie just beside their blocks."""


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
