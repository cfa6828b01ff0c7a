"""Computes the integer weights of a Lanczos resize as Pillow does it, and the order of its two passes.

Each pass rounds to 8 bits, so every pixel depends on the exact weights and on the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_ops import RESAMPLE_WEIGHT_BITS

_LOBES = 3  # the formula below holds for three lobes only


@dataclass(frozen=True, slots=True)
class LanczosAxis:
    """One axis of a resize: `source` pixels become `target`."""

    source: int
    target: int

    def taps(self, num_weights: int = 0) -> Tensor:
        """Returns int32 [1 + K, target]: first source places, then K weights, as the operation `resample` takes
        them. K is `num_weights`, at most `source`, or as many as are needed if that is more.

        If K pixels would reach past the end, they begin earlier, with weights of 0.
        """
        scale = self.source / self.target
        stretch = max(scale, 1.0)  # the filter is wider when the image is reduced
        centre = (torch.arange(self.target, dtype=torch.float64) + 0.5) * scale
        reach = _LOBES * stretch
        start = (centre - reach + 0.5).long().clamp(min=0)
        end = (centre + reach + 0.5).long().clamp(max=self.source)
        num_weights = max(num_weights, int((end - start).max()))
        first = start.clamp(max=self.source - num_weights)
        place = first + torch.arange(num_weights)[:, None]
        angle = (place - (centre - 0.5)) * (math.pi / _LOBES / stretch)
        # sinc(x) sinc(x / 3) with one sine instead of two, since sin(3a) = 3 sin(a) - 4 sin(a)³. A constant
        # factor is left out: the weights are normalised below.
        square = angle.sin().square_()
        weights = square * (3 - 4 * square) / angle.square()
        weights.masked_fill_(angle == 0, 3.0)
        weights.masked_fill_((place < start) | (place >= end) | (angle.abs() > math.pi), 0.0)
        weights *= (1 << RESAMPLE_WEIGHT_BITS) / weights.sum(dim=0)
        return torch.cat((first[None], weights.round().long())).int()


def shrinks_rows_first(height: LanczosAxis, width: LanczosAxis) -> bool:
    """Returns True if rows are resampled before columns: if far more rows than columns are removed."""
    rows_gone, columns_gone = height.source - height.target, width.source - width.target
    return rows_gone > max(0, 2 * columns_gone)


def joined_taps(axes: Iterable[LanczosAxis]) -> Tensor:
    """Returns the taps of axes of one source, one behind the other: int32 [1 + K, all targets]."""
    axes = tuple(axes)
    num_weights = max(len(axis.taps()) for axis in axes) - 1
    return torch.cat([axis.taps(num_weights) for axis in axes], dim=1)
