"""Adds the partial sums of a divided product to the residual stream in a fixed order, and normalises it.

Programs that divide the columns of a product each write a partial sum. With atomic additions the last bits of every
later layer would depend on the order in which programs end. The next kernel that reads the stream adds the partial
sums in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import (
    has_dependent_launch,
    launch,
    let_next_start,
    wait_for_previous,
)
from kestrel_ops.lora.reference import BlockLowRank
from kestrel_ops.lora.triton_rows_by_slot import normed_operands
from kestrel_ops.norms.triton_rows import RowBlocks, block_columns

_BLOCKS = RowBlocks(rows=1, num_warps=8)


def add_pending(
    hidden: Tensor,  # [B, K] float32, contiguous, changed in place without a `total`
    pending: Tensor,  # [S, B, K] float32, contiguous
    delta: Tensor | None = None,  # [B, K], contiguous
    total: Tensor | None = None,  # [B, K] float32, contiguous
) -> None:
    """Computes total = hidden + pending[0], then pending[1] and so on, then the delta."""
    _launch(hidden, pending, delta, total, None, 0.0, is_dependent=has_dependent_launch(hidden))


def add_and_normalise(
    hidden: Tensor,  # [B, K] float32, contiguous, changed in place where something is pending
    pending: Tensor | None,  # [S, B, K] float32, contiguous
    epsilon: float,
    out_dtype: torch.dtype,
    delta: Tensor | None = None,  # [B, K], contiguous: added as well, but not to `hidden`
    *,
    is_dependent: bool,  # whether it starts before the previous kernel has ended
    low_rank: BlockLowRank | None = None,
) -> Tensor:  # [B, K] out_dtype
    """Computes `add_pending`, and (hidden - mean) / sqrt(variance + epsilon) of each row. Writes
    `low_rank.normed`."""
    assert pending is None or delta is None
    out = torch.empty(hidden.shape, dtype=out_dtype, device=hidden.device)
    _launch(hidden, pending, delta, None, out, epsilon, is_dependent=is_dependent, low_rank=low_rank)
    return out


def _launch(
    hidden: Tensor,
    pending: Tensor | None,
    delta: Tensor | None,
    total: Tensor | None,
    out: Tensor | None,
    epsilon: float,
    *,
    is_dependent: bool,
    low_rank: BlockLowRank | None = None,
) -> None:
    batch, width = hidden.shape
    assert all(rows is None or rows.is_contiguous() for rows in (hidden, pending, delta, total))
    launch(
        _add_and_normalise,
        (batch,),
        hidden,
        pending,
        delta,
        total,
        out,
        *normed_operands(low_rank),
        batch,
        epsilon,
        width=width,
        block=block_columns(width, _BLOCKS),
        num_parts=0 if pending is None else len(pending),
        is_dependent=is_dependent,
        num_warps=_BLOCKS.num_warps,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["batch"])
def _add_and_normalise(
    hidden,
    pending,
    delta,
    total,
    out,
    norm_weight,
    norm_bias,
    with_norm,
    batch,
    epsilon,
    width: tl.constexpr,
    block: tl.constexpr,
    num_parts: tl.constexpr,
    is_dependent: tl.constexpr,
):
    if is_dependent:
        wait_for_previous()
        let_next_start()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    values = tl.load(hidden + row * width + columns, mask=inside, other=0.0)
    for part in tl.static_range(num_parts):
        place = (part * batch + row) * width + columns
        values += tl.load(pending + place, mask=inside, other=0.0)
    if delta is not None:
        values += tl.load(delta + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if total is not None:
        tl.store(total + row * width + columns, values, mask=inside)
    elif num_parts > 0:
        tl.debug_barrier()  # `hidden` is written in place
        tl.store(hidden + row * width + columns, values, mask=inside)
    if out is not None:
        centred = tl.where(inside, values - tl.sum(values) / width, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred) / width + epsilon)
        tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)
        if with_norm is not None:
            weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
            bias = tl.load(norm_bias + columns, mask=inside, other=0.0).to(tl.float32)
            whole = normed * weight + bias
            tl.store(with_norm + row * width + columns, whole.to(with_norm.dtype.element_ty), mask=inside)
