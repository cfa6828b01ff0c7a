"""Adds the product with each row's own low-rank matrices, by two products over all slots. Does not synchronise."""

import torch
from torch import Tensor

from kestrel_ops.lora.reference import LowRank
from kestrel_ops.shapes import ModelShape


def add_low_rank(
    out: Tensor,  # [T, out], changed in place
    rows: Tensor,  # [T, in], of the type of the weights
    weights: LowRank,
    slots: Tensor,  # [T] int64: the slot of each row, 0 for none
) -> None:
    """Adds each row's low-rank terms, so that a CUDA graph can capture it.

    Same contract as `reference.add_low_rank`. Rows are multiplied by the matrices of all slots, and results of
    other slots than their own are replaced by 0. With all slots in use this reads no more weights than any other
    way.
    """
    inner = of_own_slot(rows @ weights.a.flatten(0, 1).T, len(weights.a), slots)
    out += inner @ weights.b.flatten(0, 1)


def of_own_slot(
    inner: Tensor,  # [T, S * R]
    num_slots: int,
    slots: Tensor,  # [T] int64
) -> Tensor:  # [T, S * R]
    """Returns the columns of each row's slot; the others are 0, whatever they were."""
    numbers = torch.arange(1, num_slots + 1, device=slots.device)
    is_own = slots[:, None] == numbers
    return torch.where(is_own[..., None], inner.unflatten(1, (num_slots, -1)), 0).flatten(1)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model: it can serve any."""
    return None
