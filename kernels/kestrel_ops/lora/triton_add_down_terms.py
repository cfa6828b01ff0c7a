"""Adds the terms of adapters to what a block of packed prompts adds to the stream, in two launches."""

from __future__ import annotations

from torch import Tensor

from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.lora.reference import BlockLowRank
from kestrel_ops.lora.triton_products import expand_add, shrink
from kestrel_ops.lora.triton_rows_by_slot import with_groups
from kestrel_ops.shapes import ModelShape


def add_down_terms(
    out: Tensor,  # [T, dim], changed in place
    activations: Tensor,  # [T, H * D + ff_dim], rows may be strided
    scale: Tensor | None,  # [T, 1] float32
    low_rank: BlockLowRank,
) -> None:
    """Adds each row's terms to what a block adds to the stream. Same contract as `reference.add_down_terms`.

    Does not synchronise.
    """
    low_rank = with_groups(low_rank, is_decode=False)
    layers, rows = low_rank.down, low_rank.rows
    sources = activations.tensor_split((layers[0].a.shape[2],), dim=1)[: len(layers)]
    coefficients = shrink(sources, layers, rows, low_rank, scale=scale)
    expand_add(out, coefficients, layers, rows, adds_both=True)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model) or unsupported_rows(model)
