"""The products of a decoder block for one token: the weight goes from memory straight into registers.

Tensor cores would want the weight in shared memory and converted there, for sixteen tokens at the least. Here a
program takes a tile of a few rows, asks for all of it before it does anything else, even before it waits for the
kernel before, and multiplies and adds up in float32. A second token would double that arithmetic, which already
takes as long as reading the weight does.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.triton.dependent_launch import has_dependent_launch, launch, let_next_start, wait_for_previous
from kestrel_ops.triton.small_batch import load_weight, operand

WIDEST_TILE = 2048
"""Columns of the weight in a tile at most, a power of two: with more there are too few rows to share the token."""


@dataclass(frozen=True, slots=True)
class SingleTokenPlan:
    """How a product [1, K] @ [N, K].T is cut into programs of one tile each."""

    block_n: int
    """Rows of the weight in a tile."""
    num_warps: int
    dependent_launch: bool = True
    """Whether it starts before the kernel before has ended, where the device can do that."""


def expand_one(
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    row_sums: Tensor,
    bias: Tensor,
    epsilon: float,
    num_plain: int,
    plain_out: Tensor,
    activated_out: Tensor,
    plan: SingleTokenPlan,
) -> None:
    """`decode_expand` of one token, no wider than `WIDEST_TILE`."""
    num_tokens, width = hidden.shape
    num_rows = len(weight)
    assert num_tokens == 1
    assert width <= WIDEST_TILE
    block_k = triton.next_power_of_2(width)
    launch(
        _expand,
        (triton.cdiv(num_rows, plan.block_n),),
        hidden,
        weight,
        weight_scale,
        row_sums,
        bias,
        plain_out,
        activated_out,
        num_rows,
        epsilon,
        num_plain=num_plain,
        width=width,
        block_n=plan.block_n,
        block_k=block_k,
        is_even=num_rows % plan.block_n == 0 and width == block_k,
        is_dependent=plan.dependent_launch and has_dependent_launch(weight),
        num_warps=plan.num_warps,
        num_stages=1,
    )


def contract_one(
    activations: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor,
    hidden: Tensor,
    plan: SingleTokenPlan,
) -> None:
    """`decode_contract` of one token."""
    num_tokens, width = activations.shape
    num_rows = len(weight)
    assert num_tokens == 1
    block_k = min(triton.next_power_of_2(width), WIDEST_TILE)
    num_shares = triton.cdiv(width, block_k)
    launch(
        _contract,
        (triton.cdiv(num_rows, plan.block_n), num_shares),
        activations,
        weight,
        weight_scale,
        bias,
        hidden,
        num_rows,
        width=width,
        block_n=plan.block_n,
        block_k=block_k,
        is_even=num_rows % plan.block_n == 0 and width == num_shares * block_k,
        is_dependent=plan.dependent_launch and has_dependent_launch(weight),
        num_warps=plan.num_warps,
        num_stages=1,
    )


@triton.jit
def _expand(
    hidden,
    weight,
    weight_scale,
    row_sums,
    bias,
    plain_out,
    activated_out,
    num_rows,
    epsilon,
    num_plain: tl.constexpr,
    width: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    first_row = tl.program_id(0) * block_n
    rows = first_row + tl.arange(0, block_n)
    columns = tl.arange(0, block_k)
    in_range = rows < num_rows
    tile = load_weight(weight, rows, columns, num_rows, width, is_even)
    shift = tl.load(row_sums + rows, mask=in_range, other=0.0)
    offset = tl.load(bias + rows, mask=in_range, other=0.0)
    scale = 1.0
    if weight_scale is not None:
        scale = tl.load(weight_scale + rows, mask=in_range, other=0.0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    token = tl.load(hidden + columns, mask=columns < width, other=0.0)
    mean = tl.sum(token, axis=0) / width
    variance = tl.maximum(tl.sum(token * token, axis=0) / width - mean * mean, 0.0)
    product = tl.sum(tile.to(tl.float32) * token[None, :], axis=1) * scale
    product = (product - shift * mean) * tl.rsqrt(variance + epsilon) + offset
    if first_row < num_plain:
        is_plain = in_range & (rows < num_plain)
        tl.store(plain_out + rows, operand(product, plain_out.dtype.element_ty), mask=is_plain)
    if first_row + block_n > num_plain:
        bent = 1.5957691216057308 * (product + 0.044715 * product * product * product)
        activated = operand(product * tl.sigmoid(bent), activated_out.dtype.element_ty)
        tl.store(activated_out + (rows - num_plain), activated, mask=in_range & (rows >= num_plain))


@triton.jit
def _contract(
    activations,
    weight,
    weight_scale,
    bias,
    hidden,
    num_rows,
    width: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    share = tl.program_id(1)
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    columns = share * block_k + tl.arange(0, block_k)
    in_range = rows < num_rows
    tile = load_weight(weight, rows, columns, num_rows, width, is_even)
    # One of the programs that share a row adds its bias.
    offset = tl.load(bias + rows, mask=in_range & (share == 0), other=0.0)
    scale = 1.0
    if weight_scale is not None:
        scale = tl.load(weight_scale + rows, mask=in_range, other=0.0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    token = tl.load(activations + columns, mask=columns < width, other=0.0).to(tl.float32)
    product = tl.sum(tile.to(tl.float32) * token[None, :], axis=1) * scale + offset
    tl.atomic_add(hidden + rows, product, mask=in_range, sem="relaxed")
