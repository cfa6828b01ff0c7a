"""The residual addition and the normalisation after it."""

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

    The sum is rounded to the type of `hidden`, and the stored values are normalised in float32. There is no weight
    and no bias: they are folded into the next product. With `out_dtype` float8_e4m3fn the rows are quantised,
    normed = out * scale. A given `out_scale` applies to all rows. Then larger values are clipped, and no scales are
    returned.
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
