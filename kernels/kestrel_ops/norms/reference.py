"""Operations on each row before a product: residual addition, normalisation, GELU and rounding to float8."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kestrel_ops.lora.reference import BlockLowRank, write_normed

LARGEST_FLOAT8 = 448.0
# The scale of a row of zeros must not be 0.
_SMALLEST_MAGNITUDE = 1e-12
# The value of each byte, [256] float32.
_OF_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def quantise_rows(
    rows: Tensor,  # [T, dim]
) -> tuple[Tensor, Tensor]:  # [T, dim] float8_e4m3fn, [T, 1] float32
    """Scales each row by its largest magnitude / 448 and rounds: row = quantised * scale."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_SMALLEST_MAGNITUDE) / LARGEST_FLOAT8
    return quantised_to_float8(wide / scale), scale


def to_float32(stored: Tensor) -> Tensor:
    """Returns float8_e4m3fn values as float32."""
    if stored.device.type != "cpu":
        return stored.float()
    # On the host torch converts them one by one, and copies from a table in half of the time.
    return _OF_FLOAT8.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)


def quantised_to_float8(values: Tensor) -> Tensor:
    """Returns float8_e4m3fn values; those beyond its range are clipped."""
    return values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)


def add_layer_norm(
    hidden: Tensor,  # [T, dim], any floating type; changed in place where there is a delta
    delta: Tensor | None,  # [T, dim], any floating type
    epsilon: float,
    out_dtype: torch.dtype,
    out_scale: float | None = None,
    low_rank: BlockLowRank | None = None,
    weight: Tensor | None = None,  # [dim]
    bias: Tensor | None = None,  # [dim], where there is a weight
    affine_out: Tensor | None = None,  # [T, dim], any floating type, where there is a weight: written
) -> tuple[Tensor, Tensor | None]:  # [T, dim] out_dtype, and [T, 1] float32 where that is float8
    """Computes hidden += delta, then normed = (hidden - mean) / sqrt(variance + epsilon) of each row.

    The sum is rounded to the type of `hidden`, and the stored values are normalised in float32. There is no weight
    and no bias: they are folded into the next product. With `out_dtype` float8_e4m3fn the rows are quantised,
    normed = out * scale. A given `out_scale` applies to all rows. Then larger values are clipped, and no scales are
    returned. `low_rank.normed` gets the rows with weight and bias, and so does `affine_out`, for products that have
    not folded them in.
    """
    if delta is not None:
        hidden.copy_(hidden.float() + delta.float())
    wide = hidden.float()
    variance, mean = torch.var_mean(wide, dim=-1, keepdim=True, correction=0)
    normed = (wide - mean) * torch.rsqrt(variance + epsilon)
    if low_rank is not None:
        write_normed(normed, low_rank)
    if weight is not None and bias is not None and affine_out is not None:
        affine_out.copy_(normed * weight.float() + bias.float())
    if out_scale is not None:
        return quantised_to_float8(normed / out_scale), None
    if out_dtype == torch.float8_e4m3fn:
        return quantise_rows(normed)
    return normed.to(out_dtype), None


def concat_gelu(
    plain: Tensor | None,  # [T, A]
    inner: Tensor,  # [T, F]
    out_dtype: torch.dtype,
    activate: bool = True,
    out_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # [T, A + F] out_dtype, and [T, 1] float32 where that is float8
    """Concatenates `plain`, unchanged, and the tanh form of GELU of `inner`, or `inner` unchanged without
    `activate`.

    Rows may have any stride; the values of a row are contiguous. Computed in float32. With `out_dtype`
    float8_e4m3fn the rows are quantised, out * scale, with one scale for a whole row. A given `out_scale` applies
    to all rows. Then larger values are clipped, and no scales are returned.
    """
    wide = gelu(inner.float(), approximate="tanh") if activate else inner.float()
    if plain is not None:
        wide = torch.cat((plain.float(), wide), dim=-1)
    if out_scale is not None:
        return quantised_to_float8(wide / out_scale), None
    if out_dtype == torch.float8_e4m3fn:
        return quantise_rows(wide)
    return wide.to(out_dtype), None
