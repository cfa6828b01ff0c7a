"""The residual addition and the normalisation that follows it."""

import torch
from torch import Tensor

from kestrel_ops.reference.quantise_rows import quantise_rows, rounded_to_float8


def add_layer_norm(
    hidden: Tensor,  # [T, dim], any floating type; changed in place where there is a delta
    delta: Tensor | None,  # [T, dim], any floating type
    epsilon: float,
    out_dtype: torch.dtype,
    out_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # [T, dim] out_dtype, and [T, 1] float32 where that is float8
    """hidden += delta, then normed = (hidden - mean) / sqrt(variance + epsilon) of each row.

    The sum is rounded to the type of `hidden`, and what is stored is what is normalised, in float32. No weight
    and no bias: those are folded into the product that follows. With `out_dtype` float8_e4m3fn the rows come
    quantised, normed = out * scale. A given `out_scale` is that of all rows; then nothing is measured, what does
    not fit is cut, and no scales come back.
    """
    if delta is not None:
        hidden.copy_(hidden.float() + delta.float())
    wide = hidden.float()
    variance, mean = torch.var_mean(wide, dim=-1, keepdim=True, correction=0)
    normed = (wide - mean) * torch.rsqrt(variance + epsilon)
    if out_scale is not None:
        return rounded_to_float8(normed / out_scale), None
    if out_dtype == torch.float8_e4m3fn:
        return quantise_rows(normed)
    return normed.to(out_dtype), None
