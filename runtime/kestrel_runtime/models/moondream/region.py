"""Embeds coordinates and sizes, and decodes them from hidden states.

Source: the public reference's `region.py`. A coordinate is bin / bins; a size is a power of two from 2^-10 to 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kestrel_runtime.models.moondream.config import RegionConfig
from kestrel_runtime.models.moondream.layers import Mlp

NEARBY = 64
"""Bins are near one if they are within 1 / NEARBY of all bins from it: 16 of 1024.

That is 1/64 of the image's side for a coordinate, and 11 % of a size (2 ** (10 / 64))."""
SIZE_OCTAVES = 10
"""The smallest size is 2 ** -SIZE_OCTAVES of the image."""


class RegionModel(nn.Module):
    """Encoders of values into embeddings, decoders of hidden states into bins."""

    def __init__(self, config: RegionConfig) -> None:
        super().__init__()
        self.coord_features = nn.Parameter(torch.empty(1, config.coord_feat_dim // 2))
        self.size_features = nn.Parameter(torch.empty(2, config.size_feat_dim // 2))
        self.coord_encoder = nn.Linear(config.coord_feat_dim, config.dim)
        self.size_encoder = nn.Linear(config.size_feat_dim, config.dim)
        self.coord_decoder = _decoder(config, config.coord_out_dim)
        self.size_decoder = _decoder(config, config.size_out_dim)
        self.ln = nn.LayerNorm(config.dim) if config.use_ln else None

    def encode_coordinates(self, values: Tensor) -> Tensor:
        """Encodes coordinates [N] in [0, 1] → embeddings [N, dim]."""
        return self.coord_encoder(_fourier(values[:, None], self.coord_features))

    def encode_sizes(self, values: Tensor) -> Tensor:
        """Encodes widths and heights [N, 2] in [0, 1] → embeddings [N, dim]."""
        return self.size_encoder(_fourier(values, self.size_features))

    def coordinate_logits(self, hidden: Tensor) -> Tensor:
        """Computes hidden states before the final LayerNorm [N, dim] → logits [N, bins]."""
        return self.coord_decoder(self._normed(hidden))

    def size_logits(self, hidden: Tensor) -> Tensor:
        """Computes hidden states before the final LayerNorm [N, dim] → logits [N, 2, bins]: width, then height."""
        return self.size_decoder(self._normed(hidden)).unflatten(-1, (2, -1))

    @staticmethod
    def coordinates(bins: Tensor, num_bins: int) -> Tensor:
        """Converts bins int64 to float32 coordinates in [0, 1)."""
        return bins.float() / num_bins

    @staticmethod
    def sizes(bins: Tensor, num_bins: int) -> Tensor:
        """Converts bins int64 to float32 sizes from 2^-10 to 1."""
        # In float64, since vectorised float32 powers differ between elements in their last bit.
        return torch.exp2(bins.double() / (num_bins - 1) * SIZE_OCTAVES - SIZE_OCTAVES).float()

    @staticmethod
    def mass_near(logits: Tensor, bins: Tensor) -> Tensor:
        """Returns the probability of the bins near chosen ones (`NEARBY`), at temperature 1: float32 [...].

        logits: float32 [..., bins]; bins: int64 [...]. Only log-softmaxes add up, since their bits of a row do not
        depend on other rows.
        """
        num_bins = logits.shape[-1]
        reach = max(num_bins // NEARBY, 1)
        places = bins[..., None] + torch.arange(-reach, reach + 1, device=bins.device)
        is_outside = (places < 0) | (places >= num_bins)
        near = logits.gather(-1, places.clamp(0, num_bins - 1)).masked_fill(is_outside, float("-inf"))
        # The chosen bin's share of all bins, divided by its share of those near it.
        of_all = logits.log_softmax(dim=-1).gather(-1, bins[..., None])[..., 0]
        of_near = near.log_softmax(dim=-1)[..., reach]
        return (of_all - of_near).exp().clamp(max=1.0)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.ln is None else self.ln(hidden)


def _decoder(config: RegionConfig, out_dim: int) -> nn.Module:
    if config.decoder_arch == "linear":
        return nn.Linear(config.dim, out_dim)
    assert config.inner_dim is not None, "checked by MoondreamConfig"
    return Mlp(config.dim, config.inner_dim, out_dim)


def _fourier(values: Tensor, weights: Tensor) -> Tensor:
    angles = 2 * math.pi * values.to(weights.dtype) @ weights
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
