"""Rows in float8: each row is scaled so that its largest magnitude is the largest float8 value."""

import torch
from torch import Tensor

LARGEST_FLOAT8 = 448.0
# The scale of a row of zeros must not be 0.
_SMALLEST_MAGNITUDE = 1e-12


def quantise_rows(
    rows: Tensor,  # [T, dim]
) -> tuple[Tensor, Tensor]:  # [T, dim] float8_e4m3fn, [T, 1] float32
    """Scale each row by its largest magnitude / 448 and round: row = quantised * scale."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_SMALLEST_MAGNITUDE) / LARGEST_FLOAT8
    return rounded_to_float8(wide / scale), scale


def rounded_to_float8(values: Tensor) -> Tensor:
    """float8_e4m3fn values; those beyond its range are clipped."""
    return values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
