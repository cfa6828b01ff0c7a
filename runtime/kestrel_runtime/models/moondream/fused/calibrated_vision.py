"""Runs the vision encoder in float8 with scales measured at the start, so that products round their own results.

With a scale that is known beforehand a product can apply the activation, the addition and the rounding itself.
Scales that are measured on every row require the rows to be written and read once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kestrel_ops import Kernels
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.fused.vision import FusedVision, folded
from kestrel_runtime.models.moondream.vision.encoder import VisionModel

# float8 keeps its relative precision over fifteen powers of two, so this margin costs no accuracy.
_MARGIN = 8
_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_SEED = 1


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer with one scale."""

    weight: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [1] float32
    bias: Tensor  # [N] model dtype


@dataclass(frozen=True, slots=True)
class _Scale:
    """Stored values are multiplied by it when they are read."""

    number: float
    tensor: Tensor  # [1] float32
    inverse: Tensor  # [1] float32

    @classmethod
    def of(cls, largest: float, device: torch.device) -> _Scale:
        number = max(largest, 1e-6) / _LARGEST_FLOAT8
        tensor = torch.tensor([number], device=device)
        return cls(number, tensor, 1 / tensor)


@dataclass(frozen=True, slots=True)
class _CalibratedBlock:
    qkv: _Linear
    proj: _Linear
    fc1: _Linear
    fc2: _Linear
    attended: _Scale
    activated: _Scale


class CalibratedVision(FusedVision):
    """A `FusedVision` in float8 that rounds activations with scales measured on sample crops."""

    def __init__(
        self, vision: VisionModel, kernels: Kernels, crops: Tensor, *, frees_originals: bool = False
    ) -> None:
        """Measures scales by encoding uint8 crops [N, side, side, channels]; later values may be 8 times larger.

        With `frees_originals` the model's own weights are freed block by block, except its final norm.
        Raises ValueError where a dimension of the blocks is no multiple of 16, and RuntimeError where the device
        has no such products.
        """
        if vision.config.enc_dim % 16 or vision.config.enc_ff_dim % 16:
            raise ValueError("float8 products need vision.enc_dim and vision.enc_ff_dim to be multiples of 16")
        # No value of a normalised row exceeds the square root of the row's length.
        self._normed_scale = _Scale.of(math.sqrt(vision.config.enc_dim), crops.device)
        self._calibrated: list[_CalibratedBlock] = []
        self._pictures = crops
        super().__init__(vision, kernels, "float8", frees_originals=frees_originals)
        with torch.no_grad():
            self.encode(crops)  # an unsupported device fails here, at start
        del self._pictures

    def _fold_blocks(self, vision: VisionModel, *, frees_originals: bool) -> None:
        """Runs each block in float8 with a scale for every row on the pictures, measures the largest values, and
        keeps the block with fixed scales for them. Only one block at a time is in memory twice.
        """
        hidden = self._embed_patches(self._pictures)
        delta: Tensor | None = None
        for block in vision.blocks:
            delta, attended, activated = self._measure(self._fold_block(block), hidden, delta)
            self._calibrated.append(self._calibrate(block, attended, activated))
            if frees_originals:
                self._free_matrices(block)

    def _run_block(self, layer: int, hidden: Tensor, delta: Tensor | None) -> None:
        block, kernels, normed_scale = self._calibrated[layer], self._kernels, self._normed_scale
        normed = self._normed_by_scale(hidden)
        packed = kernels.scaled_linear(
            normed, normed_scale.tensor[:, None], block.qkv.weight, block.qkv.scale, block.qkv.bias, self._dtype
        )
        self._add(self._attend(packed, block.attended.number), block.attended, block.proj, hidden)
        activated = kernels.scaled_linear_gelu(
            self._normed_by_scale(hidden),
            normed_scale.tensor,
            block.fc1.weight,
            block.fc1.scale,
            block.fc1.bias,
            block.activated.inverse,
        )
        self._add(activated, block.activated, block.fc2, hidden)

    def _normed_by_scale(self, hidden: Tensor) -> Tensor:
        normed, _ = self._kernels.add_layer_norm(
            hidden, None, self._epsilon, torch.float8_e4m3fn, out_scale=self._normed_scale.number
        )
        return normed

    def _add(self, rows: Tensor, scale: _Scale, linear: _Linear, hidden: Tensor) -> None:
        self._kernels.scaled_linear_add(rows, scale.tensor, linear.weight, linear.scale, linear.bias, hidden)

    def _measure(self, block: Any, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, float, float]:
        """Adds `delta` to `hidden` and runs a block of `FusedVision` with a scale for every row.

        Returns the next `delta`, and the largest magnitudes of the inputs of its second and its last product."""
        packed = self._product(*self._normed(hidden, delta, block.qkv), block.qkv)
        attended = self._attend(packed)
        delta = self._product(*self._quantised(attended, block.proj, activate=False), block.proj)
        inner = self._product(*self._normed(hidden, delta, block.fc1), block.fc1)
        activated, scale = self._quantised(inner, block.fc2)
        assert scale is not None, "float8 rows come with their scales"
        largest = (attended.abs().amax(), scale.amax() * _LARGEST_FLOAT8)
        out = self._product(activated, scale, block.fc2)
        if out.is_meta:  # kernels are compiled, and nothing is computed
            return out, 1.0, 1.0
        return out, largest[0].item(), largest[1].item()

    def _calibrate(self, block: Any, attended: float, activated: float) -> _CalibratedBlock:
        device = block.ln1.weight.device
        return _CalibratedBlock(
            qkv=self._quantised_layer(block.attn.qkv, block.ln1),
            proj=self._quantised_layer(block.attn.proj, None),
            fc1=self._quantised_layer(block.mlp.fc1, block.ln2),
            fc2=self._quantised_layer(block.mlp.fc2, None),
            attended=_Scale.of(attended * _MARGIN, device),
            activated=_Scale.of(activated * _MARGIN, device),
        )

    def _quantised_layer(self, layer: nn.Linear, norm: nn.LayerNorm | None) -> _Linear:
        weight, bias = folded(layer, norm)
        scale = (weight.abs().amax() / _LARGEST_FLOAT8).clamp_min(torch.finfo(torch.float32).tiny)
        stored = (weight / scale).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        return _Linear(stored, scale[None], bias.to(self._dtype))


def calibration_crops(config: VisionConfig, device: torch.device) -> Tensor:
    """Returns synthetic pictures that measure the range of values inside the encoder.

    They are uint8 crops [6, side, side, channels]: fine and coarse noise, a gradient, stripes, white and black.

    Photographs and screenshots consist of uniform areas, edges and noise, which these crops cover.
    """
    side, channels = config.crop_size, config.in_channels
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randint(0, 256, (side, side, channels), generator=generator)
    coarse = noise[: side // 14 + 1, : side // 14 + 1].repeat_interleave(14, 0).repeat_interleave(14, 1)
    slope = torch.linspace(0, 255, side)[:, None, None].expand(side, side, channels)
    stripes = (torch.arange(side) // 7 % 2 * 255)[None, :, None].expand(side, side, channels)
    white = torch.full((side, side, channels), 255)
    pictures = (noise, coarse[:side, :side], slope, stripes, white, torch.zeros_like(white))
    return torch.stack([picture.to(torch.uint8) for picture in pictures]).to(device)
