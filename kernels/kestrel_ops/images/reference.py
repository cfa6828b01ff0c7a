"""Resize 8-bit pixels along one axis, with integer weights; hash words of pixels."""

import torch
from torch import Tensor

RESAMPLE_WEIGHT_BITS = 22
"""A weight of 1 is stored as 2 to this power, the largest whose sums over values of 255 fit 32 bits."""


def resample(
    pixels: Tensor,  # [height, width, channels] uint8, contiguous; channels behind the third are padding
    taps: Tensor,  # [1 + K, length] int32: first source places, then the weights of K places from there on
    dim: int,  # 0 resamples rows, 1 columns
    windows: Tensor | None = None,  # [N, 2] int32: the first row and column of parts of the result
    side: int = 0,  # rows and columns of each window
) -> Tensor:  # uint8, contiguous: `length` rows or columns, the other axis as it was; or [N, side, side, channels]
    """Place i becomes the sum over k of weight `taps[1 + k, i]` times source place `taps[0, i] + k`, as 8 bits.

    It is rounded, halves up, and clipped. Every source place must exist, even if its weight is 0. Integer
    arithmetic makes the result exact. With `windows`, which lie within the result, it returns these parts alone.
    """
    spread = (-1, 1, 1) if dim == 0 else (1, -1, 1)
    pixels = pixels[..., :3]
    total = torch.full((), 1 << (RESAMPLE_WEIGHT_BITS - 1), dtype=torch.int32, device=pixels.device)
    for place, weights in enumerate(taps[1:]):
        total = total + pixels.index_select(dim, taps[0] + place) * weights.view(spread)
    resampled = (total >> RESAMPLE_WEIGHT_BITS).clamp(0, 255).to(torch.uint8)
    if windows is None:
        return resampled
    places = torch.arange(side, device=pixels.device)
    top, left = windows.long()[:, :, None].unbind(1)
    return resampled[(top + places)[:, :, None], (left + places)[:, None]]


def hash_words(
    words: Tensor,  # [N, W] int32, contiguous
    multipliers: Tensor,  # [F, W] int64, contiguous
) -> Tensor:  # [N, F] int64
    """Returns the sums of words times multipliers modulo 2^64, for each row of words and each of multipliers."""
    return (words[:, None] * multipliers).sum(2)
