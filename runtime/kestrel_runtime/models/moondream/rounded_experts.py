"""Rounds the weights of experts to float8 while a checkpoint is loaded, and measures what that changes."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@torch.no_grad()
def rounded_to_float8(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights [experts, out, in] as float8_e4m3fn, the scale of each row, float32 [experts, out], and the error.

    The error is the root of the mean square of what rounding changes, divided by that of the weights: about 0.026
    for normally distributed weights. A row of zeros stays zero. One expert at a time, so that little is in float32.
    """
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    changed = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for number, expert in enumerate(weight):
        wide = expert.float()
        scale = (wide.abs().amax(dim=1) / _LARGEST_FLOAT8).clamp_min(_SMALLEST_SCALE)
        short = (wide / scale[:, None]).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        rounded[number], scales[number] = short, scale
        changed = changed + (short.float() * scale[:, None] - wide).double().square().sum()
        total = total + wide.double().square().sum()
    return rounded, scales, (changed / total).sqrt().item() if total else 0.0
