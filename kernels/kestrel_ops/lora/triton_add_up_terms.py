"""Adds the terms of adapters to the first product of a block of packed prompts, in two launches."""

from __future__ import annotations

from torch import Tensor

from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.lora.reference import BlockLowRank
from kestrel_ops.lora.triton_products import expand_add, shrink
from kestrel_ops.lora.triton_rows_by_slot import with_groups
from kestrel_ops.shapes import ModelShape


def add_up_terms(
    product: Tensor,  # [T, sum of outputs of `low_rank.up`], rows may be strided, changed in place
    low_rank: BlockLowRank,
) -> None:
    """Adds each row's terms to the first product of a block. Same contract as `reference.add_up_terms`.

    Does not synchronise.
    """
    low_rank = with_groups(low_rank, is_decode=False)
    layers, rows = low_rank.up, low_rank.rows
    coefficients = shrink((low_rank.normed,) * len(layers), layers, rows)
    expand_add(product, coefficients, layers, rows, adds_both=False)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model) or unsupported_rows(model)
