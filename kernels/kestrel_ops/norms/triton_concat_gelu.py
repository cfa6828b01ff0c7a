"""Computes the concatenation, the activation and the rounding of a product's input in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.norms.triton_rows import RowBlocks, clipped_to_float8, load_piece, pieces, store_piece
from kestrel_ops.shapes import ModelShape

_LARGEST_FLOAT8 = tl.constexpr(448.0)
_SMALLEST_MAGNITUDE = tl.constexpr(1e-12)
# The tanh form is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)); here with powers of two.
_LINEAR = tl.constexpr(-2.3022081983)  # -2 * sqrt(2 / pi) * log2(e)
_CUBIC = tl.constexpr(-2.3022081983 * 0.044715)


def concat_gelu(
    plain: Tensor | None,  # [T, A], rows at any distance
    inner: Tensor,  # [T, F], rows at any distance
    out_dtype: torch.dtype,
    activate: bool = True,
    out_scale: float | None = None,
    blocks: RowBlocks | None = None,  # None: those that the width asks for
) -> tuple[Tensor, Tensor | None]:  # [T, A + F] out_dtype, and [T, 1] float32 where that is float8
    """Concatenates plain and activated columns. Same contract as `reference.concat_gelu`.

    Each row is read once and kept in registers.
    """
    num_rows, inner_width = inner.shape
    plain_width = 0 if plain is None else plain.shape[1]
    width = plain_width + inner_width
    blocks = blocks or _blocks_for(width)
    assert inner.stride(1) == 1
    assert plain is None or plain.stride(1) == 1
    out = torch.empty(num_rows, width, dtype=out_dtype, device=inner.device)
    scale = None
    if out_dtype == torch.float8_e4m3fn and out_scale is None:
        scale = torch.empty(num_rows, 1, dtype=torch.float32, device=inner.device)
    plain_main, plain_tail = pieces(plain_width, blocks)
    inner_main, inner_tail = pieces(inner_width, blocks)
    launcher(_concat_gelu, (triton.cdiv(num_rows, blocks.rows),))(
        plain,
        inner,
        out,
        scale,
        num_rows,
        0 if plain is None else plain.stride(0),
        inner.stride(0),
        None if out_scale is None else 1 / out_scale,
        plain_width=plain_width,
        plain_main=plain_main,
        plain_tail=plain_tail,
        inner_width=inner_width,
        inner_main=inner_main,
        inner_tail=inner_tail,
        rows=blocks.rows,
        activate=activate,
        num_warps=blocks.num_warps,
    )
    return out, scale


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model, *model.weight_dtypes) or unsupported_rows(model)


def _blocks_for(width: int) -> RowBlocks:
    if width <= 1536:
        return RowBlocks(rows=2, num_warps=4)
    return RowBlocks(rows=1, num_warps=4 if width <= 12288 else 8)


@triton.jit
def _activated(values, activate: tl.constexpr):
    if activate:
        return values / (1.0 + tl.exp2(values * (_LINEAR + _CUBIC * values * values)))
    return values


@triton.jit
def _largest(values):
    return tl.max(tl.abs(values), axis=1)


@triton.jit(do_not_specialize=["num_rows"])  # differs between batches
def _concat_gelu(
    plain,
    inner,
    out,
    scale,
    num_rows,
    plain_stride,
    inner_stride,
    out_factor,
    plain_width: tl.constexpr,
    plain_main: tl.constexpr,
    plain_tail: tl.constexpr,
    inner_width: tl.constexpr,
    inner_main: tl.constexpr,
    inner_tail: tl.constexpr,
    rows: tl.constexpr,
    activate: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    in_range = row < num_rows
    row = row.to(tl.int64)
    # All loads of a row are issued before the first reduction, so that they run concurrently.
    inner_values = load_piece(inner, row * inner_stride, in_range, 0, inner_main, inner_width)
    if inner_tail > 0:
        inner_rest = load_piece(inner, row * inner_stride, in_range, inner_main, inner_tail, inner_width)
    if plain_main > 0:
        plain_values = load_piece(plain, row * plain_stride, in_range, 0, plain_main, plain_width)
    if plain_tail > 0:
        plain_rest = load_piece(plain, row * plain_stride, in_range, plain_main, plain_tail, plain_width)
    inner_values = _activated(inner_values, activate)
    if inner_tail > 0:
        inner_rest = _activated(inner_rest, activate)
    factor = tl.full((rows,), 1.0, tl.float32)
    if scale is not None:
        magnitude = _largest(inner_values)
        if inner_tail > 0:
            magnitude = tl.maximum(magnitude, _largest(inner_rest))
        if plain_main > 0:
            magnitude = tl.maximum(magnitude, _largest(plain_values))
        if plain_tail > 0:
            magnitude = tl.maximum(magnitude, _largest(plain_rest))
        magnitude = tl.maximum(magnitude, _SMALLEST_MAGNITUDE)
        tl.store(scale + row, magnitude / _LARGEST_FLOAT8, mask=in_range)
        factor = _LARGEST_FLOAT8 / magnitude
    if out_factor is not None:
        factor *= out_factor
    factor = factor[:, None]
    starts = row * (plain_width + inner_width)
    if plain_main > 0:
        store_piece(
            out,
            starts,
            in_range,
            clipped_to_float8(plain_values * factor, out_factor is not None),
            0,
            plain_main,
            plain_width,
        )
    if plain_tail > 0:
        store_piece(
            out,
            starts,
            in_range,
            clipped_to_float8(plain_rest * factor, out_factor is not None),
            plain_main,
            plain_tail,
            plain_width,
        )
    starts += plain_width
    store_piece(
        out,
        starts,
        in_range,
        clipped_to_float8(inner_values * factor, out_factor is not None),
        0,
        inner_main,
        inner_width,
    )
    if inner_tail > 0:
        store_piece(
            out,
            starts,
            in_range,
            clipped_to_float8(inner_rest * factor, out_factor is not None),
            inner_main,
            inner_tail,
            inner_width,
        )
