"""Lists the patches of an image's tiles whose average is each row of the projector's input.

Stitching the tiles and pooling the result average fixed patches, so they are listed once for each tiling.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.config import VisionConfig


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Averages in the order: patch 0 of the global tile, place 0 of the pooled whole, patch 1, place 1 …"""

    patches: Tensor
    """[entries] int64: indices of patches, counted from the image's first tile."""
    starts: Tensor
    """[2 * patches of a tile] int64: the first index in `patches` of each average."""

    @classmethod
    def of(cls, config: VisionConfig, rows: int, columns: int, device: torch.device) -> PoolingPlan:
        """The plan of a tiling. It equals stitching followed by an adaptive average pool to the size of a tile."""
        side = config.grid_size
        stitched_rows, stitched_columns = _stitched(config, rows), _stitched(config, columns)
        averages: list[list[int]] = []
        for y, x in itertools.product(range(side), repeat=2):
            averages.append([y * side + x])
            averages.append(
                [
                    (1 + row * columns + column) * side * side + crop_y * side + crop_x
                    for row, crop_y in _window(stitched_rows, y, side)
                    for column, crop_x in _window(stitched_columns, x, side)
                ]
            )
        starts = itertools.accumulate((len(average) for average in averages[:-1]), initial=0)
        return cls(
            patches=torch.tensor([patch for average in averages for patch in average], device=device),
            starts=torch.tensor(list(starts), device=device),
        )


def _stitched(config: VisionConfig, count: int) -> list[tuple[int, int]]:
    # Along one axis: the tile, and the place within it, of every patch that stitching keeps. Each tile contributes
    # its middle, and its margins only at the border of the image.
    margin, side = config.overlap_margin, config.grid_size
    return [
        (tile, place)
        for tile in range(count)
        for place in range(0 if tile == 0 else margin, side if tile == count - 1 else side - margin)
    ]


def _window(places: list[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
    # The window of an adaptive average pool from len(places) to `count`.
    return places[index * len(places) // count : -(-(index + 1) * len(places) // count)]
