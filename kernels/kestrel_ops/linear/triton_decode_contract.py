"""Computes the second product of a decoder block for small batches, with its columns divided among programs.

No sum depends on the order in which programs end. For one token a program computes whole rows. For more tokens each
program writes a partial sum, and the next kernel adds the partial sums in a fixed order.
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
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.linear.triton_pending_sums import add_pending
from kestrel_ops.linear.triton_single_token import SingleTokenConfig, contract_one
from kestrel_ops.linear.triton_small_batch import (
    DEPENDENT_LAUNCH_FROM,
    SmallBatchConfig,
    batch_block,
    load_tokens,
    load_weight,
    operand,
    operand_type,
    triton_type,
)
from kestrel_ops.lora.reference import BlockLowRank
from kestrel_ops.lora.triton_products import Terms, add_terms, shrink
from kestrel_ops.lora.triton_rows_by_slot import with_groups
from kestrel_ops.shapes import ModelShape


def decode_contract(
    activations: Tensor,  # [B, K], rows may be strided
    weight: Tensor,  # [N, K], contiguous
    weight_scale: Tensor | None,
    bias: Tensor,
    hidden: Tensor,  # [B, N] float32, contiguous
    may_defer: bool = False,
    low_rank: BlockLowRank | None = None,
    delta: Tensor | None = None,  # [B, N], contiguous
    total: Tensor | None = None,  # [B, N] float32, contiguous, not `hidden`
    config: SmallBatchConfig | SingleTokenConfig | None = None,  # None: that which the batch asks for
) -> Tensor | None:  # [S, B, N] float32
    """Adds the second product of a block to the stream. Same contract as `reference.decode_contract`.

    The deferred terms are the partial sums over parts of the columns.
    """
    batch, width = activations.shape
    num_rows = len(weight)
    assert activations.stride(1) == 1
    assert weight.is_contiguous()
    assert hidden.is_contiguous()
    config = config or config_for(batch, weight.dtype, has_terms=low_rank is not None)
    if isinstance(config, SingleTokenConfig):
        assert low_rank is None
        contract_one(activations, weight, weight_scale, bias, hidden, delta, total, config)
        return None
    block_b = batch_block(batch)
    turns = triton.cdiv(triton.cdiv(width, config.block_k), config.num_splits)
    num_parts = triton.cdiv(width, turns * config.block_k)
    pending = torch.empty(num_parts, batch, num_rows, dtype=torch.float32, device=hidden.device)
    is_dependent = config.dependent_launch and has_dependent_launch(weight)
    terms, kinds = Terms.none()
    if low_rank is not None:
        low_rank = with_groups(low_rank, is_decode=True)
        layers, rows = low_rank.down, low_rank.rows
        sources = activations.tensor_split((layers[0].a.shape[2],), dim=1)[: len(layers)]
        shrink(sources, layers, rows, low_rank, is_dependent=is_dependent)
        terms, kinds = Terms.of(layers, rows)
    launch(
        _contract,
        (triton.cdiv(num_rows, config.block_n), num_parts, triton.cdiv(batch, block_b)),
        activations,
        weight,
        weight_scale,
        bias,
        pending,
        *terms,
        batch,
        num_rows,
        activations.stride(0),
        width=width,
        part_columns=turns * config.block_k,
        block_b=block_b,
        block_n=config.block_n,
        block_k=config.block_k,
        operand_dtype=triton_type(operand_type(weight.dtype)),
        is_even=num_rows % config.block_n == 0 and width == turns * config.block_k * num_parts,
        **kinds,
        block_rank=32,
        has_even_terms=num_rows % config.block_n == 0,
        num_parts=num_parts,
        is_dependent=is_dependent,
        lets_next_start=has_dependent_launch(weight),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if may_defer:
        assert delta is None
        assert total is None
        return pending
    add_pending(hidden, pending, delta, total)
    return None


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.weight_dtype) or unsupported_rows(model)


def config_for(batch: int, dtype: torch.dtype, *, has_terms: bool = False) -> SmallBatchConfig | SingleTokenConfig:
    """Returns the launch configuration for a batch and the weight's type, with or without terms of adapters."""
    if batch == 1 and not has_terms:
        return SingleTokenConfig(block_n=4, num_warps=4)
    if dtype == torch.float32:
        return SmallBatchConfig(block_n=64, block_k=32, num_warps=4, num_stages=3, num_splits=4)
    is_dependent = batch >= DEPENDENT_LAUNCH_FROM
    if dtype == torch.float8_e4m3fn:
        if batch < DEPENDENT_LAUNCH_FROM:
            return SmallBatchConfig(64, 128, num_warps=4, num_stages=4, num_splits=8)
        num_stages = 4 if 32 <= batch <= 64 else 3
        return SmallBatchConfig(64, 128, 4, num_stages, num_splits=8, dependent_launch=is_dependent)
    if batch <= 64:
        num_stages = 4 if batch < DEPENDENT_LAUNCH_FROM else 3
        return SmallBatchConfig(64, 128, 4, num_stages, num_splits=8, dependent_launch=is_dependent)
    return SmallBatchConfig(128, 64, num_warps=8, num_stages=4, num_splits=8, dependent_launch=is_dependent)


@triton.jit(do_not_specialize=["batch"])
def _contract(
    activations,
    weight,
    weight_scale,
    bias,
    pending,
    coefficients_0,
    coefficients_1,
    places_0,
    places_1,
    b_0,
    b_1,
    counts,
    coefficient_stride,
    batch,
    num_rows,
    stride,
    width: tl.constexpr,
    part_columns: tl.constexpr,
    block_b: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    operand_dtype: tl.constexpr,
    is_even: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    has_even_terms: tl.constexpr,
    block_rank: tl.constexpr,
    num_parts: tl.constexpr,
    is_dependent: tl.constexpr,
    lets_next_start: tl.constexpr,
):
    first_row = tl.program_id(0) * block_n
    part = tl.program_id(1)
    if is_dependent:
        wait_for_previous()
    if lets_next_start:  # the next kernel adds the pending sums, and loads nothing before this kernel has ended
        let_next_start()
    rows = first_row + tl.arange(0, block_n)
    tokens = tl.program_id(2) * block_b + tl.arange(0, block_b)
    product = tl.zeros((block_n, block_b), tl.float32)
    for begin in range(0, part_columns, block_k):
        columns = part * part_columns + begin + tl.arange(0, block_k)
        left = load_weight(weight, rows, columns, num_rows, width, is_even)
        right = load_tokens(activations, tokens, columns, batch, stride, width, is_even)
        product = tl.dot(
            operand(left, operand_dtype), operand(right, operand_dtype), product, input_precision="ieee"
        )
    in_range = rows < num_rows
    if weight_scale is not None:
        product *= tl.load(weight_scale + rows, mask=in_range, other=0.0)[:, None]
    if part == 0:
        product += tl.load(bias + rows, mask=in_range, other=0.0)[:, None]
    product = add_terms(
        product,
        tokens,
        batch,
        first_row,
        first_row,
        num_rows,
        num_rows,
        part,
        coefficients_0,
        coefficients_1,
        places_0,
        places_1,
        b_0,
        b_1,
        counts,
        coefficient_stride,
        kind_0,
        kind_1,
        num_parts,
        block_n,
        block_rank,
        has_even_terms,
    )
    place = (part * batch + tokens).to(tl.int64) * num_rows
    tl.store(
        pending + place[None, :] + rows[:, None],
        product,
        mask=in_range[:, None] & (tokens < batch)[None, :],
    )
