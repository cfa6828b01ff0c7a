"""Rotary position embedding of the leading dimensions of each head."""

import torch
from torch import Tensor


def rotary(
    heads: Tensor,  # [T, H, D]
    cosine: Tensor,  # [T, R / 2] float32
    sine: Tensor,  # [T, R / 2] float32
) -> Tensor:  # [T, H, D], dtype of `heads`
    """Rotate dimensions i and i + R/2 of the first R by the angle of dimension i; the others are unchanged.

    Computed in float32. The public reference interleaves the rotated pairs. Here both halves keep their places:
    queries and keys are permuted in the same way, so their products do not change.
    """
    half = cosine.shape[-1]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    rotated = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return torch.cat((rotated.to(heads.dtype), heads[..., 2 * half :]), dim=-1)
