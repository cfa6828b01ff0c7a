"""Adds the product with each row's own low-rank matrices: rows are grouped by slot, then multiplied twice."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.lora.reference import LowRank
from kestrel_ops.lora.triton_products import expand_add, shrink
from kestrel_ops.lora.triton_rows_by_slot import rows_by_slot
from kestrel_ops.shapes import ModelShape


def add_low_rank(
    out: Tensor,  # [T, out], rows may be strided, changed in place
    rows: Tensor,  # [T, in], rows may be strided
    weights: LowRank,
    slots: Tensor,  # [T] int64: the slot of each row, 0 for none
) -> None:
    """Adds each row's low-rank terms. Same contract as `reference.add_low_rank`.

    Does not synchronise. Rows in slot 0 cost nothing.
    """
    if not len(rows):
        return
    num_slots, max_rank, _ = weights.a.shape
    ranks = torch.full((4, num_slots), max_rank, dtype=torch.int32, device=slots.device)
    grouped = rows_by_slot(slots, ranks, max_rank, is_decode=False, dtype=weights.a.dtype)
    coefficients = shrink((rows,), (weights,), grouped)
    expand_add(out, coefficients, (weights,), grouped, adds_both=False)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model)
