"""Writes samples to rows of the request state in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.shapes import ModelShape

_BLOCK_ROWS = 32


def advance_rows(
    integers: Tensor,  # [R, 6] int64, rows may be strided: id, number of values, rule, samples, budget, seed
    row_values: Tensor,  # [R, V] float32, rows may be strided
    successors: Tensor,  # [S, 4] int64: of a rule the next, an id that leads elsewhere and to what, the last; or -1
    rows: Tensor,  # [B] int64: rows that are written; those that come again have equal samples
    ids: Tensor,  # [B] int64
    num_values: Tensor | None = None,  # [B] int64; None for 0
    values: Tensor | None = None,  # [B, V] float32; None for 0
    scores: Tensor | None = None,  # [B, 1] float32; None for -1
    is_finite: Tensor | None = None,  # [B] bool; None for True
) -> Tensor:  # [B, 3 + V] float32: id, or -1 where not `is_finite`, number of values, values, score
    """Writes a sample to each row, and returns it. Same contract as `reference.advance_rows`."""
    batch, width = len(rows), row_values.shape[1]
    assert integers.stride(1) == row_values.stride(1) == 1
    assert successors.is_contiguous()
    sampled = torch.empty(batch, 3 + width, dtype=torch.float32, device=rows.device)
    launcher(_advance_rows, (triton.cdiv(batch, _BLOCK_ROWS),))(
        integers,
        row_values,
        successors,
        rows,
        ids,
        num_values,
        None if values is None else values.contiguous(),
        None if scores is None else scores.contiguous(),
        is_finite,
        sampled,
        batch,
        integers.stride(0),
        row_values.stride(0),
        width=width,
        block=_BLOCK_ROWS,
        num_warps=1,
    )
    return sampled


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model."""
    return unsupported_device(model)


# The columns lie anywhere in wider rows.
@triton.jit(
    do_not_specialize=["batch", "integer_stride", "value_stride"],
    do_not_specialize_on_alignment=["integers", "row_values", "scores"],
)
def _advance_rows(
    integers,
    row_values,
    successors,
    rows,
    ids,
    num_values,
    values,
    scores,
    is_finite,
    sampled,
    batch,
    integer_stride,
    value_stride,
    width: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < batch
    row = tl.load(rows + place, mask=inside, other=0)
    token = tl.load(ids + place, mask=inside, other=0)
    target = integers + row * integer_stride
    rule = tl.load(target + 2, mask=inside, other=0)
    num_sampled = tl.load(target + 3, mask=inside, other=0) + 1
    budget = tl.load(target + 4, mask=inside, other=0)
    following = tl.load(successors + 4 * rule, mask=inside, other=0)
    leading = tl.load(successors + 4 * rule + 1, mask=inside, other=0)
    special = tl.load(successors + 4 * rule + 2, mask=inside, other=0)
    last = tl.load(successors + 4 * rule + 3, mask=inside, other=0)
    following = tl.where((num_sampled >= budget) & (last != -1), last, following)
    following = tl.where(token == leading, special, following)
    count = tl.zeros((block,), tl.int64)
    if num_values is not None:
        count = tl.load(num_values + place, mask=inside, other=0)
    tl.debug_barrier()
    tl.store(target, token, mask=inside)
    tl.store(target + 1, count, mask=inside)
    tl.store(target + 2, following, mask=inside)
    tl.store(target + 3, num_sampled, mask=inside)
    result = sampled + place * (3 + width)
    for column in tl.static_range(width):
        value = tl.zeros((block,), tl.float32)
        if values is not None:
            value = tl.load(values + place * width + column, mask=inside, other=0)
        tl.store(row_values + row * value_stride + column, value, mask=inside)
        tl.store(result + 2 + column, value, mask=inside)
    score = tl.full((block,), -1.0, tl.float32)
    if scores is not None:
        score = tl.load(scores + place, mask=inside, other=0)
    if is_finite is not None:
        token = tl.where(tl.load(is_finite + place, mask=inside, other=1) != 0, token, -1)
    tl.store(result, token.to(tl.float32), mask=inside)
    tl.store(result + 1, count.to(tl.float32), mask=inside)
    tl.store(result + 2 + width, score, mask=inside)
