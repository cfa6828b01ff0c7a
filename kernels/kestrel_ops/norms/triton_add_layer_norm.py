"""Computes the residual addition, the normalisation and the rounding to float8 in one pass over memory.

`hidden` is updated in place: a program loads everything before it stores anything, see `rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.lora.reference import BlockLowRank
from kestrel_ops.lora.triton_rows_by_slot import normed_operands
from kestrel_ops.norms.triton_rows import RowBlocks, clipped_to_float8, load_piece, pieces, store_piece
from kestrel_ops.shapes import ModelShape

_LARGEST_FLOAT8 = tl.constexpr(448.0)
_SMALLEST_MAGNITUDE = tl.constexpr(1e-12)


def add_layer_norm(
    hidden: Tensor,  # [T, dim], contiguous; changed in place where there is a delta
    delta: Tensor | None,  # [T, dim], contiguous
    epsilon: float,
    out_dtype: torch.dtype,
    out_scale: float | None = None,
    low_rank: BlockLowRank | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    affine_out: Tensor | None = None,  # [T, dim], contiguous
    blocks: RowBlocks | None = None,  # None: those that the width asks for
) -> tuple[Tensor, Tensor | None]:  # [T, dim] out_dtype, and [T, 1] float32 where that is float8
    """Adds a delta to rows and normalises them. Same contract as `reference.add_layer_norm`.

    Each row is read once and kept in registers.
    """
    num_rows, width = hidden.shape
    blocks = blocks or _blocks_for(width)
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    assert affine_out is None or affine_out.is_contiguous()
    out = torch.empty(num_rows, width, dtype=out_dtype, device=hidden.device)
    scale = None
    if out_dtype == torch.float8_e4m3fn and out_scale is None:
        scale = torch.empty(num_rows, 1, dtype=torch.float32, device=hidden.device)
    main, tail = pieces(width, blocks)
    launcher(_add_layer_norm, (triton.cdiv(num_rows, blocks.rows),))(
        hidden,
        delta,
        out,
        scale,
        *((weight, bias, affine_out) if low_rank is None else normed_operands(low_rank)),
        num_rows,
        epsilon,
        None if out_scale is None else 1 / out_scale,
        width=width,
        main=main,
        tail=tail,
        rows=blocks.rows,
        num_warps=blocks.num_warps,
    )
    return out, scale


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model, *model.weight_dtypes) or unsupported_rows(model)


def _blocks_for(width: int) -> RowBlocks:
    return RowBlocks(rows=1, num_warps=1 if width <= 1536 else 4)


@triton.jit
def _rounded_sum(values, delta, dtype: tl.constexpr):
    # The stored values are normalised.
    return (values + delta).to(dtype).to(tl.float32)


@triton.jit
def _centred_piece(values, mean, begin: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    # Columns beyond the row must stay 0: they take part in the sums.
    return tl.where((begin + tl.arange(0, size) < width)[None, :], values - mean[:, None], 0.0)


@triton.jit
def _store_normed(
    normed,
    norm_weight,
    norm_bias,
    row_starts,
    in_range,
    values,
    begin: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
):
    columns = begin + tl.arange(0, size)
    weight = tl.load(norm_weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    bias = tl.load(norm_bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    store_piece(normed, row_starts, in_range, values * weight[None, :] + bias[None, :], begin, size, width)


@triton.jit(do_not_specialize=["num_rows"])  # differs between batches
def _add_layer_norm(
    hidden,
    delta,
    out,
    scale,
    norm_weight,
    norm_bias,
    normed,
    num_rows,
    epsilon,
    out_factor,
    width: tl.constexpr,
    main: tl.constexpr,
    tail: tl.constexpr,
    rows: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    in_range = row < num_rows
    row_starts = row.to(tl.int64) * width
    values = load_piece(hidden, row_starts, in_range, 0, main, width)
    if tail > 0:
        tail_values = load_piece(hidden, row_starts, in_range, main, tail, width)
    if delta is not None:
        added = load_piece(delta, row_starts, in_range, 0, main, width)
        if tail > 0:
            tail_added = load_piece(delta, row_starts, in_range, main, tail, width)
        tl.debug_barrier()  # all threads have read `hidden` before any thread writes the sum
        values = _rounded_sum(values, added, hidden.dtype.element_ty)
        store_piece(hidden, row_starts, in_range, values, 0, main, width)
        if tail > 0:
            tail_values = _rounded_sum(tail_values, tail_added, hidden.dtype.element_ty)
            store_piece(hidden, row_starts, in_range, tail_values, main, tail, width)
    total = tl.sum(values, axis=1)
    if tail > 0:
        total += tl.sum(tail_values, axis=1)
    mean = total / width
    values = _centred_piece(values, mean, 0, main, width)
    squares = tl.sum(values * values, axis=1)
    largest = tl.max(tl.abs(values), axis=1)
    if tail > 0:
        tail_values = _centred_piece(tail_values, mean, main, tail, width)
        squares += tl.sum(tail_values * tail_values, axis=1)
        largest = tl.maximum(largest, tl.max(tl.abs(tail_values), axis=1))
    factor = tl.rsqrt(squares / width + epsilon)
    if normed is not None:
        _store_normed(
            normed, norm_weight, norm_bias, row_starts, in_range, values * factor[:, None], 0, main, width
        )
        if tail > 0:
            _store_normed(
                normed,
                norm_weight,
                norm_bias,
                row_starts,
                in_range,
                tail_values * factor[:, None],
                main,
                tail,
                width,
            )
    if scale is not None:
        magnitude = tl.maximum(largest * factor, _SMALLEST_MAGNITUDE)
        tl.store(scale + row, magnitude / _LARGEST_FLOAT8, mask=in_range)
        factor *= _LARGEST_FLOAT8 / magnitude
    if out_factor is not None:
        factor *= out_factor
    store_piece(
        out,
        row_starts,
        in_range,
        clipped_to_float8(values * factor[:, None], out_factor is not None),
        0,
        main,
        width,
    )
    if tail > 0:
        store_piece(
            out,
            row_starts,
            in_range,
            clipped_to_float8(tail_values * factor[:, None], out_factor is not None),
            main,
            tail,
            width,
        )
