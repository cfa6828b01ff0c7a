"""Dimensions of small Moondreams: drawn at random from a seed, and a fixed list that is hard for kernels.

Kernels work in blocks of 16, 32, 64 or 128, and the published models are multiples of most. Faults in tails,
masks and alignment only show at widths that are not, so most numbers here are odd multiples of 8 or odd altogether.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kestrel_runtime.models.moondream.config import (
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)

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
    """One image that is smaller than a tile, and one that is cut."""
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
