"""The published models' sizes, written out by hand: what inference from tensors has to come to."""

from dataclasses import dataclass, replace

from kestrel_runtime.models.moondream.config import (
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)


@dataclass(frozen=True)
class FullSize:
    """What the hub tells about a published model."""

    name: str
    num_tensors: int
    num_parameters: int


FULL_SIZES = (FullSize("moondream2", 592, 1_927_237_104), FullSize("moondream3", 662, 9_268_626_928))

_TEMPLATES_2 = {
    "caption": {"short": (1, 32708, 2, 12492, 3), "normal": (1, 32708, 2, 6382, 3), "long": (1, 32708, 2, 4059, 3)},
    "query": {"prefix": (1, 15381, 2), "suffix": (3,)},
    "detect": {"prefix": (1, 7235, 476, 2), "suffix": (3,)},
    "point": {"prefix": (1, 2581, 2), "suffix": (3,)},
}
_TEMPLATES_3 = {**_TEMPLATES_2, "segment": {"prefix": (1, 17374, 2), "suffix": (3,)}}

_MOONDREAM_2 = MoondreamConfig(
    text=TextConfig(
        dim=2048,
        ff_dim=8192,
        n_layers=24,
        vocab_size=51200,
        max_context=2048,
        n_heads=32,
        n_kv_heads=32,
        prefix_attn=730,
        rope_theta=10_000.0,
    ),
    vision=VisionConfig(
        enc_dim=1152,
        enc_patch_size=14,
        enc_n_layers=27,
        enc_ff_dim=4304,
        enc_n_heads=16,
        proj_out_dim=2048,
        crop_size=378,
        in_channels=3,
        max_crops=12,
        overlap_margin=4,
        proj_inner_dim=8192,
    ),
    region=RegionConfig(
        dim=2048, coord_feat_dim=256, coord_out_dim=1024, size_feat_dim=512, size_out_dim=2048, inner_dim=8192
    ),
    tokenizer=TokenizerConfig(
        bos_id=0,
        eos_id=0,
        answer_id=3,
        thinking_id=4,
        coord_id=5,
        size_id=6,
        start_ground_points_id=7,
        end_ground_id=9,
        templates=_TEMPLATES_2,
    ),
)
_MOONDREAM_3 = MoondreamConfig(
    text=replace(
        _MOONDREAM_2.text,
        max_context=32_768,
        tau_attn=True,
        rope_theta=1_500_000.0,
        moe=MoeConfig(num_experts=64, start_layer=4, experts_per_token=8, expert_inner_dim=1024),
    ),
    vision=_MOONDREAM_2.vision,
    region=replace(_MOONDREAM_2.region, inner_dim=None, decoder_arch="linear", use_ln=True),
    tokenizer=replace(_MOONDREAM_2.tokenizer, templates=_TEMPLATES_3),
)
# The published vocabulary, because the published templates need it; all else as small as its heads allow.
_SMALL = MoondreamConfig(
    text=replace(_MOONDREAM_2.text, dim=64, ff_dim=96, n_layers=2, n_heads=1, n_kv_heads=1),
    vision=replace(
        _MOONDREAM_2.vision,
        enc_dim=72,
        enc_n_heads=1,
        enc_n_layers=1,
        enc_ff_dim=40,
        proj_out_dim=64,
        proj_inner_dim=48,
    ),
    region=replace(_MOONDREAM_2.region, dim=64, inner_dim=24),
    tokenizer=_MOONDREAM_2.tokenizer,
)


def published_config(name: str) -> MoondreamConfig:
    return {"moondream2": _MOONDREAM_2, "moondream3": _MOONDREAM_3, "small": _SMALL}[name]
