"""A linear layer whose operands may be float8."""

import torch
from torch import Tensor


def scaled_linear(
    x: Tensor,  # [T, K]
    x_scale: Tensor | None,  # [T, 1] or [1, 1] float32 where `x` is float8_e4m3fn
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [N] or, with one scale of `x`, [1] float32 where `weight` is float8_e4m3fn
    bias: Tensor | None,  # [N]
    out_dtype: torch.dtype,
) -> Tensor:  # [T, N] out_dtype
    """(x * x_scale) @ (weight * weight_scale).T + bias, summed in float32.

    float8 operands need K and N to be multiples of 16. A bias in `out_dtype` costs nothing.
    """
    product = x.float() @ weight.float().T
    if x_scale is not None:
        product = product * x_scale
    if weight_scale is not None:
        product = product * weight_scale
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)
