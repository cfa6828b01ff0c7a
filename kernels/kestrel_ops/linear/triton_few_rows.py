"""Computes a linear layer in float8 for few rows, whose time is that of reading the weight.

The products of libraries occupy a part of the device only with so few rows, and cannot add a bias. Here columns are
divided among programs, which store parts of each sum; a second kernel adds them in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation import triton_compilations
from kestrel_ops.linear.triton_small_batch import load_tokens, load_weight, operand

MOST_ROWS = 63
_BLOCK_N, _BLOCK_K, _BLOCK_OF_SUMS = 32, 128, 512
_NUM_STAGES = 5
_WANTED_PROGRAMS = 256
"""Programs that occupy a large device: two for each multiprocessor."""


def serves(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
    """Returns True if `multiply_few` takes these operands: few rows with a scale each."""
    return len(x) <= MOST_ROWS and len(x_scale) == len(x) and len(weight_scale) == len(weight)


def multiply_few(
    x: Tensor,  # [T, K] float8_e4m3fn, contiguous, at most `MOST_ROWS` of them
    x_scale: Tensor,  # [T, 1] float32
    weight: Tensor,  # [N, K] float8_e4m3fn, contiguous
    weight_scale: Tensor,  # [N] float32
    bias: Tensor | None,  # [N]
    out_dtype: torch.dtype,
) -> Tensor:  # [T, N] out_dtype
    """Computes `scaled_linear` with a scale for each row, summed in float32."""
    (num_tokens, width), num_rows = x.shape, len(weight)
    assert num_tokens <= MOST_ROWS
    assert all(tensor.is_contiguous() for tensor in (x, x_scale, weight, weight_scale))
    out = torch.empty(num_tokens, num_rows, dtype=out_dtype, device=x.device)
    if not num_tokens:
        return out
    num_blocks, num_turns = triton.cdiv(num_rows, _BLOCK_N), triton.cdiv(width, _BLOCK_K)
    turns = triton.cdiv(num_turns, max(1, _WANTED_PROGRAMS // num_blocks))  # of a part of the columns
    num_parts = triton.cdiv(num_turns, turns)
    parts = None
    if num_parts > 1:
        parts = torch.empty(num_parts, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    triton_compilations.launcher(_multiply, (num_blocks, num_parts))(
        x,
        x_scale,
        weight,
        weight_scale,
        bias,
        out,
        parts,
        num_tokens,
        num_rows,
        width=width,
        part_columns=turns * _BLOCK_K,
        block_t=max(16, triton.next_power_of_2(num_tokens)),
        block_n=_BLOCK_N,
        block_k=_BLOCK_K,
        is_even=num_rows % _BLOCK_N == 0 and width == turns * _BLOCK_K * num_parts,
        num_warps=4,
        num_stages=_NUM_STAGES,
    )
    if parts is not None:
        triton_compilations.launcher(_add_parts, (num_tokens, triton.cdiv(num_rows, _BLOCK_OF_SUMS)))(
            parts,
            x_scale,
            bias,
            out,
            num_tokens,
            num_rows,
            num_parts=num_parts,
            block=_BLOCK_OF_SUMS,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])  # differs between steps
def _multiply(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    parts,
    num_tokens,
    num_rows,
    width: tl.constexpr,
    part_columns: tl.constexpr,
    block_t: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    part = tl.program_id(1)
    tokens = tl.arange(0, block_t)
    product = tl.zeros((block_n, block_t), tl.float32)
    for begin in range(0, part_columns, block_k):
        columns = part * part_columns + begin + tl.arange(0, block_k)
        left = load_weight(weight, rows, columns, num_rows, width, is_even)
        right = load_tokens(x, tokens, columns, num_tokens, width, width, is_even)
        product = tl.dot(operand(left, tl.float16), operand(right, tl.float16), product, input_precision="ieee")
    in_rows = rows < num_rows
    inside = in_rows[:, None] & (tokens < num_tokens)[None, :]
    product *= tl.load(weight_scale + rows, mask=in_rows, other=0.0)[:, None]
    if parts is not None:
        place = (part * num_tokens + tokens).to(tl.int64) * num_rows
        tl.store(parts + place[None, :] + rows[:, None], product, mask=inside)
    else:
        product *= tl.load(x_scale + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
        if bias is not None:
            product += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        place = tokens.to(tl.int64) * num_rows
        tl.store(out + place[None, :] + rows[:, None], product.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts(
    parts,
    x_scale,
    bias,
    out,
    num_tokens,
    num_rows,
    num_parts: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * block + tl.arange(0, block)
    in_rows = rows < num_rows
    total = tl.zeros((block,), tl.float32)
    for part in tl.static_range(num_parts):
        total += tl.load(parts + (part * num_tokens + token) * num_rows + rows, mask=in_rows, other=0.0)
    total *= tl.load(x_scale + token)
    if bias is not None:
        total += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out + token * num_rows + rows, total.to(out.dtype.element_ty), mask=in_rows)
