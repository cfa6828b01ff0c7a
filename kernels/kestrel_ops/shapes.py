"""Sizes, types and the device of one model, from which implementations decide whether they can serve it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MULTIPLE = 16


def has_float8_product(*sizes: int) -> bool:
    """Returns True if a product of float8 matrices supports these sizes: libraries require multiples of 16."""
    return all(size % _FLOAT8_MULTIPLE == 0 for size in sizes)


@dataclass(frozen=True, slots=True)
class TextShape:
    """Describes the decoder, if it runs on fused operations."""

    dim: int
    ff_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    """Tokens in a page of the cache."""
    max_batch: int
    """Sequences that decode together."""
    weight_dtype: torch.dtype
    """The type of the blocks' matrices."""
    cache_dtype: torch.dtype
    num_experts: int = 0
    """0: no mixture of experts."""
    experts_per_token: int = 0

    @property
    def qkv_dim(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Describes the encoder of image crops, if it runs on fused operations."""

    dim: int
    ff_dim: int
    num_heads: int
    num_patches: int
    """Patches of a crop."""
    projector_dim: int
    """The widest row between the projector's products."""
    weight_dtype: torch.dtype
    has_fixed_scales: bool = False
    """True if float8 products have scales known beforehand (`scaled_linear_gelu`, `scaled_linear_add`)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes one model on one device. A part that is None uses no fused operation."""

    device_type: str
    capability: tuple[int, int] | None
    """The compute capability of a CUDA device; None for other devices."""
    dtype: torch.dtype
    """The type of the model's inputs and outputs of operations."""
    text: TextShape | None
    vision: VisionShape | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of rows that are normalised, activated or rounded as a whole."""
        text, vision = self.text, self.vision
        of_text = () if text is None else (text.dim, text.num_heads * text.head_dim + text.ff_dim)
        return of_text + (() if vision is None else (vision.dim, vision.ff_dim, vision.projector_dim))

    @property
    def weight_dtypes(self) -> set[torch.dtype]:
        """Types of the matrices of both parts."""
        return {part.weight_dtype for part in (self.text, self.vision) if part is not None}

    def lacks(self, capability: tuple[int, int], what: str) -> str | None:
        """Returns why a CUDA device does not support `what`; None if it does or if there is no such device."""
        if self.capability is None or self.capability >= capability:
            return None
        needed, own = (".".join(map(str, version)) for version in (capability, self.capability))
        return f"{what} needs compute capability {needed}, this device has {own}"
