"""Quantises weights to 4 bits, and dequantises them.

Columns are divided into groups of 64. A weight is a level of 16 times the scale of its row and group, in bfloat16.
The levels are ±1, 3, 5, 7, 10, 14, 20 and 28: a float8_e4m3fn has them, times 1/256, with two bits in fixed places,
so that a kernel makes four of them from as many bytes by few operations on integers. kernels/README.md compares
their error with that of other formats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kestrel_ops.norms.reference import to_float32

INT4_GROUP = 64
"""Columns with one scale for each row."""
INT4_UNIT = 1 / 256
"""The value of level 1 as a float8_e4m3fn."""
_LEVELS = (1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0)
_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 1.05, 1.1)
"""Scales to try, over the one at which the largest weight of a group is the largest level.

That one is the first, so that what is stored is quantised to itself.
"""
# The bits of a byte of float8: sign, two of an exponent that is not used, three of the level, and 10.
_LEVEL_SHIFT, _FIXED = 2, 0x02


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a float32 weight [rows, columns] to 4 bits: bytes uint8 [pairs, rows, 64], scales bfloat16 [pairs,
    rows, 2].

    A pair is two groups of columns, of which the last may be wider than the weight. Of several scales of a group
    the one with the smallest squared error is taken. Quantising what these stand for gives the same again.
    """
    num_rows, num_columns = weight.shape
    groups = pad(weight, (0, -num_columns % (2 * INT4_GROUP))).view(num_rows, -1, INT4_GROUP)
    levels = torch.tensor(_LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    magnitudes = groups.abs()
    largest = magnitudes.amax(dim=-1, keepdim=True)
    best_scale = torch.zeros_like(largest)
    best = torch.zeros(groups.shape, dtype=torch.int32, device=weight.device)
    least = torch.full_like(largest, torch.inf)
    for factor in _FACTORS:
        scale = (largest * (factor / _LEVELS[-1])).bfloat16().float()
        own = torch.bucketize(magnitudes / torch.where(scale > 0, scale, 1.0), between, out_int32=True)
        error = (levels[own] * scale - magnitudes).square().sum(dim=-1, keepdim=True)
        is_better = error < least
        best, best_scale = torch.where(is_better, own, best), torch.where(is_better, scale, best_scale)
        least = torch.where(is_better, error, least)
    codes = ((groups < 0).to(torch.int32) << 3 | best).to(torch.uint8)
    return _packed(codes), best_scale.view(num_rows, -1, 2).transpose(0, 1).contiguous().bfloat16()


def dequantise_int4(packed: Tensor, scales: Tensor, num_columns: int) -> Tensor:
    """Returns the weight of bytes [pairs, rows, 64] and scales [pairs, rows, 2]: float32 [rows, columns]."""
    groups = torch.stack(float8_bits(packed), dim=2).view(torch.float8_e4m3fn)  # [pairs, rows, 2, 64]
    wide = to_float32(groups) * (scales.float() / INT4_UNIT)[..., None]
    return wide.transpose(0, 1).flatten(1)[:, :num_columns]


def float8_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bytes as the bits of float8_e4m3fn, times 256 the levels: those of the first and of the second
    group."""
    first = packed & 0x9C | _FIXED
    second = packed << 2 & 0x8C | packed >> 2 & 0x10 | _FIXED
    return first, second


def _packed(codes: Tensor) -> Tensor:
    """Codes [rows, groups, 64], sign and number of a level, as bytes [pairs, rows, 64].

    The first group of a pair has the bits where float8 has them, the second the four that are left.
    """
    first, second = codes.unflatten(1, (-1, 2)).unbind(dim=2)
    own = (first & 8) << 4 | (first & 7) << _LEVEL_SHIFT
    other = second & 3 | (second & 8) << 2 | (second & 4) << 4
    return (own | other).transpose(0, 1).contiguous()
