"""Float8 weights with one scale per output row, as a checkpoint keeps them and as training feels them."""

import torch
from torch import Tensor

_LARGEST = 448.0  # of float8 e4m3


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, out, in] → float8 of the same shape, and scales [experts, out] in float32."""
    scale = weight.float().abs().amax(dim=-1).clamp(min=1e-8) / _LARGEST
    return (weight.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def fake_quantised(weight: Tensor) -> Tensor:
    """The values that float8 would hold; the gradient passes as if nothing had been rounded."""
    with torch.no_grad():
        rounded, scale = quantised(weight)
        rounding = rounded.float() * scale[..., None] - weight
    return weight + rounding
