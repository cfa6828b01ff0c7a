"""Defines the vision encoder: crops to features, features of all crops to one grid, grid to decoder embeddings.

Source: the public reference's `vision.py` and `image_crops.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, scaled_dot_product_attention

from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.layers import Mlp


class VisionModel(nn.Module):
    """Encoder and projector. Parameters carry the names of the hub checkpoints."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        patch_dim = config.in_channels * config.enc_patch_size**2
        self.patch_emb = nn.Linear(patch_dim, config.enc_dim)
        self.pos_emb = nn.Parameter(torch.empty(1, config.num_image_tokens, config.enc_dim))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.enc_n_layers))
        self.post_ln = nn.LayerNorm(config.enc_dim)
        self.proj_mlp = Mlp(2 * config.enc_dim, config.proj_inner_dim, config.proj_out_dim)

    def encode(self, crops: Tensor) -> Tensor:
        """Computes uint8 crops [N, side, side, channels] → features [N, patches, enc_dim]."""
        features = self.patch_emb(self._patches(crops)) + self.pos_emb
        for block in self.blocks:
            features = block(features)
        return self.post_ln(features)

    def project_all(self, features: Iterable[Tensor], grids: Iterable[tuple[int, int]]) -> Tensor:
        """Computes features of images and their (rows, columns) → embeddings [images, patches, text dim]."""
        pairs = zip(features, grids, strict=True)
        return torch.stack([self.project(image, rows, columns) for image, (rows, columns) in pairs])

    def project(self, features: Tensor, rows: int, columns: int) -> Tensor:
        """Computes features of the global crop, then rows * columns local ones → embeddings [patches, text dim]."""
        side = self.config.grid_size
        local = self._stitch(features[1:].unflatten(1, (side, side)), rows, columns)  # [height, width, enc_dim]
        pooled = adaptive_avg_pool2d(local.permute(2, 0, 1).float(), (side, side)).to(features.dtype)
        return self.proj_mlp(torch.cat((features[0], pooled.flatten(1).T), dim=-1))

    def _patches(self, crops: Tensor) -> Tensor:
        # A patch is a vector ordered channel, row, column. Pixels go to [-1, 1] in float32.
        size, side = self.config.enc_patch_size, self.config.grid_size
        pixels = (crops.float() / 255 - 0.5) / 0.5
        grid = pixels.view(-1, side, size, side, size, self.config.in_channels)
        return (
            grid.permute(0, 1, 3, 5, 2, 4)
            .reshape(-1, side * side, self.patch_emb.in_features)
            .to(self.patch_emb.weight.dtype)
        )

    def _stitch(self, grids: Tensor, rows: int, columns: int) -> Tensor:
        # Neighbouring crops overlap by two margins. Each contributes its middle, and its margins at the border.
        margin, side = self.config.overlap_margin, self.config.grid_size

        def kept(index: int, count: int) -> slice:
            return slice(0 if index == 0 else margin, side if index == count - 1 else side - margin)

        return torch.cat(
            [
                torch.cat(
                    [
                        grids[row * columns + column, kept(row, rows), kept(column, columns)]
                        for column in range(columns)
                    ],
                    dim=1,
                )
                for row in range(rows)
            ],
            dim=0,
        )


class InvariantVision:
    """The vision encoder, one crop and one image at a time: products of the same shapes for the same image."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision

    def encode(self, crops: Tensor) -> Tensor:
        """Computes uint8 crops [N, side, side, channels] → features [N, patches, enc_dim]."""
        return torch.cat([self._vision.encode(crop) for crop in crops.split(1)])

    def project_all(self, features: Iterable[Tensor], grids: Iterable[tuple[int, int]]) -> Tensor:
        """Computes features of images and their (rows, columns) → embeddings [images, patches, text dim]."""
        return self._vision.project_all(features, grids)


class _Block(nn.Module):
    """Pre-norm transformer block with full attention."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.enc_dim)
        self.attn = _Attention(config)
        self.ln2 = nn.LayerNorm(config.enc_dim)
        self.mlp = Mlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.attn(self.ln1(features))
        return features + self.mlp(self.ln2(features))


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.enc_n_heads
        self.qkv = nn.Linear(config.enc_dim, 3 * config.enc_dim)
        self.proj = nn.Linear(config.enc_dim, config.enc_dim)

    def forward(self, features: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(features).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )  # each [N, heads, patches, head dim]
        return self.proj(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
