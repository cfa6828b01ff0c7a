"""The second product of a decoder block for small batches: many programs add their shares into the stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.triton.dependent_launch import (
    has_dependent_launch,
    launch,
    let_next_start,
    wait_for_previous,
)
from kestrel_ops.triton.single_token import SingleTokenPlan, contract_one
from kestrel_ops.triton.small_batch import (
    DEPENDENT_LAUNCH_FROM,
    SmallBatchPlan,
    batch_block,
    load_tokens,
    load_weight,
    operand,
    operand_type,
    triton_type,
)


def decode_contract(
    activations: Tensor,  # [B, K], rows may be strided
    weight: Tensor,  # [N, K], contiguous
    weight_scale: Tensor | None,
    bias: Tensor,
    hidden: Tensor,  # [B, N] float32, contiguous
    plan: SmallBatchPlan | SingleTokenPlan | None = None,  # None: that which the batch asks for
) -> None:
    """As the definition says; the shares of a sum are added in the order in which programs end."""
    batch, width = activations.shape
    num_rows = len(weight)
    assert activations.stride(1) == 1
    assert weight.is_contiguous()
    assert hidden.is_contiguous()
    plan = plan or plan_for(batch, weight.dtype)
    if isinstance(plan, SingleTokenPlan):
        contract_one(activations, weight, weight_scale, bias, hidden, plan)
        return
    is_dependent = plan.dependent_launch and has_dependent_launch(weight)
    block_b = batch_block(batch)
    turns = triton.cdiv(triton.cdiv(width, plan.block_k), plan.num_splits)
    launch(
        _contract,
        (triton.cdiv(num_rows, plan.block_n), plan.num_splits, triton.cdiv(batch, block_b)),
        activations,
        weight,
        weight_scale,
        bias,
        hidden,
        batch,
        num_rows,
        activations.stride(0),
        width=width,
        share=turns * plan.block_k,
        block_b=block_b,
        block_n=plan.block_n,
        block_k=plan.block_k,
        operand_dtype=triton_type(operand_type(weight.dtype)),
        is_even=num_rows % plan.block_n == 0 and width == turns * plan.block_k * plan.num_splits,
        is_dependent=is_dependent,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )


def plan_for(batch: int, dtype: torch.dtype) -> SmallBatchPlan | SingleTokenPlan:
    """The cut for a batch and the weight's type."""
    if batch == 1:
        return SingleTokenPlan(block_n=4 if dtype == torch.float8_e4m3fn else 8, num_warps=4)
    if dtype == torch.float32:
        return SmallBatchPlan(block_n=64, block_k=32, num_warps=4, num_stages=3, num_splits=4)
    is_dependent = batch >= DEPENDENT_LAUNCH_FROM
    if dtype == torch.float8_e4m3fn:
        if batch < DEPENDENT_LAUNCH_FROM:
            return SmallBatchPlan(64, 128, num_warps=4, num_stages=3, num_splits=16)
        num_stages = 4 if 32 < batch <= 64 else 3
        return SmallBatchPlan(64, 128, 4, num_stages, num_splits=8, dependent_launch=is_dependent)
    if batch <= 64:
        num_stages = 4 if batch < DEPENDENT_LAUNCH_FROM else 3
        return SmallBatchPlan(64, 128, 4, num_stages, num_splits=8, dependent_launch=is_dependent)
    return SmallBatchPlan(128, 64, num_warps=8, num_stages=4, num_splits=8, dependent_launch=is_dependent)


@triton.jit(do_not_specialize=["batch"])
def _contract(
    activations,
    weight,
    weight_scale,
    bias,
    hidden,
    batch,
    num_rows,
    stride,
    width: tl.constexpr,
    share: tl.constexpr,
    block_b: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    operand_dtype: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    first_row = tl.program_id(0) * block_n
    split = tl.program_id(1)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    rows = first_row + tl.arange(0, block_n)
    tokens = tl.program_id(2) * block_b + tl.arange(0, block_b)
    product = tl.zeros((block_n, block_b), tl.float32)
    for begin in range(0, share, block_k):
        columns = split * share + begin + tl.arange(0, block_k)
        left = load_weight(weight, rows, columns, num_rows, width, is_even)
        right = load_tokens(activations, tokens, columns, batch, stride, width, is_even)
        product = tl.dot(
            operand(left, operand_dtype), operand(right, operand_dtype), product, input_precision="ieee"
        )
    in_range = rows < num_rows
    if weight_scale is not None:
        product *= tl.load(weight_scale + rows, mask=in_range, other=0.0)[:, None]
    if split == 0:
        product += tl.load(bias + rows, mask=in_range, other=0.0)[:, None]
    tl.atomic_add(
        hidden + tokens[None, :].to(tl.int64) * num_rows + rows[:, None],
        product,
        mask=in_range[:, None] & (tokens < batch)[None, :],
        sem="relaxed",
    )
