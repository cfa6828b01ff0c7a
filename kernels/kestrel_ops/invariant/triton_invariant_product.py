"""Computes a product whose row has the same bits among any number of rows, and whose column has them among any
others.

Tensor cores add up each element over the columns of the weight in their order, in one sum of float32. How rows and
outputs are divided among programs does not change that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.device_limits import DeviceLimits

_FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Describes the block of one program and its resources."""

    block_rows: int
    """Rows of the input."""
    block_out: int
    """Rows of the weight: columns of the output."""
    block_columns: int
    """Columns of the weight per iteration."""
    num_warps: int
    num_stages: int


def config_for(num_rows: int, dtype: torch.dtype, limits: DeviceLimits) -> ProductConfig:
    """Returns the launch configuration for a number of rows."""
    if dtype == torch.float32:  # added up by threads, one launch configuration for all
        return ProductConfig(32, 64, 32, 4, 2)
    if num_rows <= _FEW_ROWS:
        return ProductConfig(16 if num_rows <= 16 else _FEW_ROWS, 64, 64, 4, 4 if limits.is_hopper else 3)
    return ProductConfig(128, 128, 64, 8, 4) if limits.is_hopper else ProductConfig(128, 64, 64, 8, 3)


def invariant_product(
    rows: Tensor,  # [T, in], values of a row contiguous
    weight: Tensor,  # [out, in], of the type of `rows`, contiguous
    bias: Tensor | None,  # [out]
    config: ProductConfig | None = None,  # None: that which the number of rows asks for
) -> Tensor:  # [T, out]
    """Computes rows @ weight.T + bias."""
    (num_rows, width), num_out = rows.shape, len(weight)
    assert rows.dtype == weight.dtype
    assert rows.stride(1) == 1 or width == 1
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    config = config or config_for(num_rows, weight.dtype, DeviceLimits.of(weight.device))
    out = torch.empty(num_rows, num_out, dtype=rows.dtype, device=rows.device)
    if not num_rows:
        return out
    num_programs = triton.cdiv(num_rows, config.block_rows) * triton.cdiv(num_out, config.block_out)
    launcher(_product, (num_programs,))(
        rows,
        weight,
        bias,
        out,
        num_rows,
        rows.stride(0),
        num_out=num_out,
        width=width,
        block_rows=config.block_rows,
        block_out=config.block_out,
        block_columns=config.block_columns,
        is_even=width % config.block_columns == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


# Numbers of rows differ between batches. One kernel, compiled at the start, serves all.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows,
    weight,
    bias,
    out,
    num_rows,
    stride,
    num_out: tl.constexpr,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_columns: tl.constexpr,
    is_even: tl.constexpr,
):
    # Programs that run at the same time share rows of the input and of the weight.
    group: tl.constexpr = 8
    out_blocks: tl.constexpr = (num_out + block_out - 1) // block_out
    of_group: tl.constexpr = group * out_blocks
    program = tl.program_id(0)
    first_block = program // of_group * group
    group_rows = tl.minimum(tl.cdiv(num_rows, block_rows) - first_block, group)
    row_block = first_block + program % of_group % group_rows
    out_block = program % of_group // group_rows

    row = row_block * block_rows + tl.arange(0, block_rows)
    column = out_block * block_out + tl.arange(0, block_out)
    in_out = column < num_out
    # Rows beyond the last are the last one again, and are not stored.
    row_places = tl.minimum(row, num_rows - 1).to(tl.int64) * stride
    out_places = tl.minimum(column, num_out - 1).to(tl.int64) * width
    inner = tl.arange(0, block_columns)
    left_pointers = weight + out_places[:, None] + inner[None, :]
    right_pointers = rows + row_places[None, :] + inner[:, None]
    total = tl.zeros((block_out, block_rows), tl.float32)
    for begin in range(0, width, block_columns):
        if is_even:
            left = tl.load(left_pointers + begin)
            right = tl.load(right_pointers + begin)
        else:
            inside = begin + inner < width
            left = tl.load(left_pointers + begin, mask=inside[None, :], other=0.0)
            right = tl.load(right_pointers + begin, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=in_out, other=0.0).to(tl.float32)[:, None]
    places = row.to(tl.int64)[None, :] * num_out + column[:, None]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=in_out[:, None] & (row < num_rows)[None, :])
