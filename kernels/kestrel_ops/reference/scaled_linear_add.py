"""A linear layer in float8 that adds to the residual stream."""

import torch
from torch import Tensor

from kestrel_ops.reference.scaled_linear import scaled_linear


def scaled_linear_add(
    x: Tensor,  # [T, K] float8_e4m3fn
    x_scale: Tensor,  # [1] float32
    weight: Tensor,  # [N, K] float8_e4m3fn
    weight_scale: Tensor,  # [1] float32
    bias: Tensor,  # [N], of the type of `hidden`
    hidden: Tensor,  # [T, N], changed in place
) -> None:
    """hidden += (x * x_scale) @ (weight * weight_scale).T + bias, rounded once. K and N are multiples of 16."""
    delta = scaled_linear(x, x_scale[:, None], weight, weight_scale, bias, torch.float32)
    hidden.copy_(hidden.float() + delta)
