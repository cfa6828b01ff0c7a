"""Parses the dimensions and prompt templates of one Moondream model from its `config.json`.

Sources: the public reference's `config.py` (vikhyat/moondream) and the configuration dataclasses of the published
checkpoints.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, Self, TypeVar

_Section = TypeVar("_Section")

# The JSON types of a field by its annotation. A bool does not count as a number.
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
_MAY_BE_ZERO = ("start_layer", "overlap_margin")  # and ids
# Far beyond every model that could be served. What depends on such a number is neither listed nor allocated.
_MAX_INTEGER, _MAX_FLOAT = 2**24, 1e12
_MAX_BY_NAME: Mapping[str, int] = {
    "n_layers": 1024,
    "enc_n_layers": 1024,
    "max_context": 2**20,
    "crop_size": 2**14,
    "max_crops": 1024,
    "num_experts": 2**14,
}
_NUM_CHANNELS = 3  # of decoded images
_MAX_TEMPLATE_IDS = 10_000
_SECTIONS = ("text", "vision", "region", "tokenizer")


class ConfigError(ValueError):
    """A `config.json` contradicts itself, or has a value that no model can have. The message names the field."""


class IncompleteConfig(ConfigError):
    """A `config.json` lacks a dimension, which may follow from the tensors."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts that replaces the dense MLP from `start_layer` on."""

    num_experts: int
    start_layer: int
    experts_per_token: int
    expert_inner_dim: int


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder stack. `prefix_attn` counts BOS and the image tokens, which have bidirectional attention."""

    dim: int
    ff_dim: int
    n_layers: int
    vocab_size: int
    max_context: int
    n_heads: int
    n_kv_heads: int
    prefix_attn: int
    moe: MoeConfig | None = None
    tau_attn: bool = False
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def rotary_dim(self) -> int:
        """Returns the number of leading dimensions of a head that are rotated."""
        return self.head_dim // 2

    @property
    def qkv_dim(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.start_layer


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The encoder of crops, the stitching of their features and the projection into the decoder."""

    enc_dim: int
    enc_patch_size: int
    enc_n_layers: int
    enc_ff_dim: int
    enc_n_heads: int
    proj_out_dim: int
    crop_size: int
    in_channels: int
    max_crops: int
    overlap_margin: int
    proj_inner_dim: int

    @property
    def grid_size(self) -> int:
        """Patches along one side of a crop; an image becomes `grid_size ** 2` tokens."""
        return self.crop_size // self.enc_patch_size

    @property
    def num_image_tokens(self) -> int:
        return self.grid_size**2


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """The heads that embed and sample coordinates. `decoder_arch` is "mlp" (Moondream 2) or "linear" (3)."""

    dim: int
    coord_feat_dim: int
    coord_out_dim: int
    size_feat_dim: int
    size_out_dim: int
    inner_dim: int | None = None
    decoder_arch: str = "mlp"
    use_ln: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Special ids and prompt templates.

    `templates` maps a skill to `{"prefix": ids, "suffix": ids}`, and "caption" to `{length: ids}`. The
    model has no skill without a template.
    """

    bos_id: int
    eos_id: int
    answer_id: int
    thinking_id: int
    coord_id: int
    size_id: int
    start_ground_points_id: int
    end_ground_id: int
    templates: Mapping[str, Mapping[str, tuple[int, ...]]]

    def ids(self) -> tuple[int, ...]:
        """Returns all ids: special ones and those of templates."""
        special = (getattr(self, field.name) for field in fields(self) if field.name.endswith("_id"))
        return (*special, *(id for parts in self.templates.values() for ids in parts.values() for id in ids))


@dataclass(frozen=True, slots=True)
class MoondreamConfig:
    """The configuration of a Moondream: everything except its weights."""

    text: TextConfig
    vision: VisionConfig
    region: RegionConfig
    tokenizer: TokenizerConfig

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a parsed `config.json`. Raises `ConfigError` naming the missing or contradictory field."""
        text = dict(_mapping(data, "text"))
        if text.get("moe") is not None:
            text["moe"] = _section(MoeConfig, _mapping(text, "moe", "text."), "text.moe")
        tokenizer = dict(_mapping(data, "tokenizer"))
        tokenizer["templates"] = _templates(_mapping(tokenizer, "templates", "tokenizer."))
        config = cls(
            text=_section(TextConfig, text, "text"),
            vision=_section(VisionConfig, _mapping(data, "vision"), "vision"),
            region=_section(RegionConfig, _mapping(data, "region"), "region"),
            tokenizer=_section(TokenizerConfig, tokenizer, "tokenizer"),
        )
        config.check()
        return config

    def check(self) -> None:
        """Refuses dimensions that contradict each other."""
        text, vision, region, moe = self.text, self.vision, self.region, self.text.moe
        highest_id = max(self.tokenizer.ids())
        rules = {
            "text.dim is not a multiple of text.n_heads": text.dim % text.n_heads == 0,
            "text.n_heads is not a multiple of text.n_kv_heads": text.n_heads % text.n_kv_heads == 0,
            "text.dim / text.n_heads is not a multiple of 4": text.head_dim % 4 == 0,
            "text.max_context is not above text.prefix_attn": text.max_context > text.prefix_attn,
            "text.moe.experts_per_token is above text.moe.num_experts": (
                moe is None or moe.experts_per_token <= moe.num_experts
            ),
            "tau attention needs text.n_kv_heads equal to text.n_heads": (
                not text.tau_attn or text.n_heads == text.n_kv_heads
            ),
            "vision.enc_dim is not a multiple of vision.enc_n_heads": vision.enc_dim % vision.enc_n_heads == 0,
            "vision.crop_size is not a multiple of vision.enc_patch_size": (
                vision.crop_size % vision.enc_patch_size == 0
            ),
            f"vision.in_channels is not {_NUM_CHANNELS}": vision.in_channels == _NUM_CHANNELS,
            "vision.overlap_margin leaves nothing of a crop": 2 * vision.overlap_margin < vision.grid_size,
            "vision.proj_out_dim differs from text.dim": vision.proj_out_dim == text.dim,
            "region.dim differs from text.dim": region.dim == text.dim,
            "region.coord_feat_dim is odd": region.coord_feat_dim % 2 == 0,
            "region.size_feat_dim is odd": region.size_feat_dim % 2 == 0,
            "region.size_out_dim is odd": region.size_out_dim % 2 == 0,
            f"tokenizer names id {highest_id}, beyond text.vocab_size {text.vocab_size}": (
                highest_id < text.vocab_size
            ),
            f"text.prefix_attn is not 1 + {vision.num_image_tokens} image tokens": (
                text.prefix_attn == 1 + vision.num_image_tokens
            ),
            'region.decoder_arch is neither "mlp" nor "linear"': region.decoder_arch in ("mlp", "linear"),
            "region.inner_dim is missing for an MLP decoder": (
                region.decoder_arch != "mlp" or region.inner_dim is not None
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ConfigError("config.json: " + "; ".join(broken))

    @property
    def generation(self) -> int:
        """Returns the generation, 2 or 3, which determines prompts and token rules."""
        return 3 if self.text.tau_attn or self.text.moe is not None else 2

    @property
    def architecture(self) -> str:
        """Returns the name of the generation."""
        return f"moondream{self.generation}"

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def max_context(self) -> int:
        """Returns the most positions of a sequence."""
        return self.text.max_context

    @property
    def bos_id(self) -> int:
        return self.tokenizer.bos_id

    @property
    def positions_per_image(self) -> int:
        """Returns the positions of an image, which follow the first token."""
        return self.vision.num_image_tokens


def _mapping(data: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    value = data.get(key)
    if value is None:
        raise IncompleteConfig(f"config.json: section {prefix}{key} is missing")
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: section {prefix}{key} is missing; it is {reprlib.repr(value)}")
    return value


def _section(kind: type[_Section], data: Mapping[str, Any], name: str) -> _Section:
    # Unknown keys are skipped: published configurations contain fields of the training.
    known = {field.name: field for field in fields(kind)}  # pyrefly: ignore[bad-argument-type] all are dataclasses
    values = {key: value for key, value in data.items() if key in known}
    for key, value in values.items():
        _check_value(f"{name}.{key}", value, str(known[key].type))
    missing = [key for key, field in known.items() if key not in data and field.default is MISSING]
    if missing:
        raise IncompleteConfig(f"config.json: {name} lacks {', '.join(missing)}")
    return kind(**values)


def _check_value(name: str, value: Any, annotation: str) -> None:
    types = _JSON_TYPES.get(annotation)
    if types is None:  # a section of its own, checked where it is read
        return
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"config.json: {name} is {reprlib.repr(value)}, not of type {annotation}")
    if isinstance(value, (bool, str, NoneType)):
        return
    may_be_zero = name.endswith(("_id", *_MAY_BE_ZERO))
    if value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"config.json: {name} is {reprlib.repr(value)}, which is too small")
    largest = _MAX_FLOAT if annotation == "float" else _MAX_BY_NAME.get(name.rpartition(".")[2], _MAX_INTEGER)
    if value > largest or math.isnan(value):
        raise ConfigError(f"config.json: {name} is {reprlib.repr(value)}, and must be at most {largest:.15g}")


def _templates(data: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    templates: dict[str, dict[str, tuple[int, ...]]] = {}
    for skill, parts in data.items():
        if parts is None:  # a skill that the model does not have
            continue
        for part, ids in _mapping(data, skill, "tokenizer.templates.").items():
            is_list = isinstance(ids, (list, tuple)) and len(ids) <= _MAX_TEMPLATE_IDS
            if not is_list or not all(type(id) is int and 0 <= id <= _MAX_INTEGER for id in ids):
                raise ConfigError(f"config.json: tokenizer.templates.{skill}.{part} is not a list of ids")
        if skill != "caption" and not {"prefix", "suffix"} <= parts.keys():
            raise ConfigError(f"config.json: tokenizer.templates.{skill} lacks its prefix or its suffix")
        templates[skill] = {part: tuple(ids) for part, ids in parts.items()}
    return templates


def sections_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the sections of a `config.json` that `MoondreamConfig.from_dict` reads, without empty ones.

    They stand at the top level or below `config`. Raises `ConfigError` if neither holds sections.
    """
    given = config or {}
    if not any(section in given for section in _SECTIONS) and given.get("config") is not None:
        given = given["config"]
        if not isinstance(given, Mapping):
            raise ConfigError(f"config.json: config is {reprlib.repr(given)}, not a section")
    return {section: given[section] for section in _SECTIONS if given.get(section) is not None}
