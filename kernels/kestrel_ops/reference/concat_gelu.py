"""What a product takes in: rows put side by side, one part of them through a GELU."""

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
    """`plain` as it is, then the tanh form of GELU of `inner`, or `inner` as it is without `activate`.

    Rows may lie at any distance; a row's own values are contiguous. Computed in float32. With `out_dtype`
    float8_e4m3fn the rows come quantised, out * scale, one scale over a whole row. A given `out_scale` is that of
    all rows; then nothing is measured, what does not fit is cut, and no scales come back.
    """
    wide = gelu(inner.float(), approximate="tanh") if activate else inner.float()
    if plain is not None:
        wide = torch.cat((plain.float(), wide), dim=-1)
    if out_scale is not None:
        return rounded_to_float8(wide / out_scale), None
    if out_dtype == torch.float8_e4m3fn:
        return quantise_rows(wide)
    return wide.to(out_dtype), None
