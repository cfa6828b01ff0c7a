"""The input of a product: two matrices side by side, one of them through a GELU."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kestrel_ops.reference.quantise_rows import quantise_rows, rounded_to_float8


def concat_gelu(
    plain: Tensor | None,  # [T, A]
    inner: Tensor,  # [T, F]
    out_dtype: torch.dtype,
    activate: bool = True,
    out_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # [T, A + F] out_dtype, and [T, 1] float32 where that is float8
    """`plain` unchanged, then the tanh form of GELU of `inner`, or `inner` unchanged without `activate`.

    Rows may have any stride; the values of a row are contiguous. Computed in float32. With `out_dtype`
    float8_e4m3fn the rows are quantised, out * scale, with one scale for a whole row. A given `out_scale` applies
    to all rows. Then larger values are clipped, and no scales are returned.
    """
    wide = gelu(inner.float(), approximate="tanh") if activate else inner.float()
    if plain is not None:
        wide = torch.cat((plain.float(), wide), dim=-1)
    if out_scale is not None:
        return rounded_to_float8(wide / out_scale), None
    if out_dtype == torch.float8_e4m3fn:
        return quantise_rows(wide)
    return wide.to(out_dtype), None
