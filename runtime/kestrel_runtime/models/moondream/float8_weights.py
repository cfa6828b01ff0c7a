"""Rounds weights to float8, each row to a scale of its own."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def float8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 matrix [N, K] as float8_e4m3fn, and a scale for each row, float32 [N]. Rows of zeros stay zeros."""
    scale = (weight.abs().amax(dim=1) / _LARGEST_FLOAT8).clamp_min(_SMALLEST_SCALE)
    stored = (weight / scale[:, None]).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    return stored, scale


@torch.no_grad()
def float8_experts(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights [experts, out, in] as float8_e4m3fn, the scale of each row, float32 [experts, out], and the error.

    The error is the root of the mean square of what rounding changes, divided by that of the weights: about 0.026
    for normally distributed weights. One expert at a time, so that little is in float32.
    """
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    changed = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for number, expert in enumerate(weight):
        wide = expert.float()
        rounded[number], scales[number] = short, scale = float8_rows(wide)
        changed = changed + (short.float() * scale[:, None] - wide).double().square().sum()
        total = total + wide.double().square().sum()
    return rounded, scales, (changed / total).sqrt().item() if total else 0.0
