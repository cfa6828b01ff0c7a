"""Computes the first product of a decoder block for small batches, which reads the weight once.

For one token every program normalises the token itself. For more tokens a kernel before the product normalises them
once, and adds the pending sums of the previous layer to the stream.
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
from kestrel_ops.linear.triton_pending_sums import add_and_normalise, add_pending
from kestrel_ops.linear.triton_single_token import WIDEST_TILE, SingleTokenConfig, expand_one
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


def decode_expand(
    hidden: Tensor,  # [B, K] float32, contiguous
    weight: Tensor,  # [N, K], contiguous
    weight_scale: Tensor | None,
    row_sums: Tensor,
    bias: Tensor,
    epsilon: float,
    num_plain: int,
    plain_out: Tensor,  # [B, num_plain], contiguous
    activated_out: Tensor,  # [B, N - num_plain], rows may be strided
    pending: Tensor | None = None,  # [S, B, K] float32, contiguous
    low_rank: BlockLowRank | None = None,
    delta: Tensor | None = None,  # [B, K], contiguous
    config: SmallBatchConfig | SingleTokenConfig | None = None,  # None: that which the batch asks for
) -> None:
    """Computes the first product of a block. Same contract as `reference.decode_expand`."""
    batch, width = hidden.shape
    num_rows = len(weight)
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    assert plain_out.is_contiguous()
    assert activated_out.stride(1) == 1
    config = config or config_for(batch, weight.dtype, width, has_terms=low_rank is not None)
    if isinstance(config, SingleTokenConfig):
        assert low_rank is None
        if pending is not None:
            add_pending(hidden, pending)
        expand_one(
            hidden,
            delta,
            weight,
            weight_scale,
            row_sums,
            bias,
            epsilon,
            num_plain,
            plain_out,
            activated_out,
            config,
        )
        return
    block_b = batch_block(batch)
    operand_dtype = operand_type(weight.dtype)
    is_dependent = config.dependent_launch and has_dependent_launch(weight)
    tokens = add_and_normalise(
        hidden, pending, epsilon, operand_dtype, delta, is_dependent=is_dependent, low_rank=low_rank
    )
    terms, kinds = Terms.none()
    if low_rank is not None:
        low_rank = with_groups(low_rank, is_decode=True)
        layers, rows = low_rank.up, low_rank.rows
        shrink((low_rank.normed,) * len(layers), layers, rows, is_dependent=is_dependent)
        terms, kinds = Terms.of(layers, rows)
    launch(
        _expand,
        (triton.cdiv(num_rows, config.block_n), triton.cdiv(batch, block_b)),
        tokens,
        weight,
        weight_scale,
        bias,
        plain_out,
        activated_out,
        *terms,
        batch,
        num_rows,
        activated_out.stride(0),
        num_plain=num_plain,
        width=width,
        operand_dtype=triton_type(operand_dtype),
        block_b=block_b,
        block_n=config.block_n,
        block_k=config.block_k,
        is_even=num_rows % config.block_n == 0 and width % config.block_k == 0,
        **kinds,
        block_rank=64,
        has_even_terms=num_plain % config.block_n == 0 and num_rows % config.block_n == 0,
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.weight_dtype) or unsupported_rows(model)


def config_for(
    batch: int, dtype: torch.dtype, width: int, *, has_terms: bool = False
) -> SmallBatchConfig | SingleTokenConfig:
    """Returns the launch configuration for a batch and the weight's type and width, with or without terms of
    adapters."""
    if batch == 1 and not has_terms and width <= WIDEST_TILE:
        return SingleTokenConfig(block_n=8, num_warps=4)
    if dtype == torch.float32:
        return SmallBatchConfig(block_n=64, block_k=32, num_warps=4, num_stages=3)
    # The previous kernel normalises the tokens. It has few programs, whose loads are not delayed.
    if dtype == torch.float8_e4m3fn:
        if batch < DEPENDENT_LAUNCH_FROM:
            return SmallBatchConfig(128, 128, num_warps=8, num_stages=3, dependent_launch=True)
        num_stages = 4 if batch <= 64 else 3
        return SmallBatchConfig(64, 128, num_warps=4, num_stages=num_stages, dependent_launch=True)
    if batch <= 64:
        num_stages = 4 if batch < DEPENDENT_LAUNCH_FROM else 3
        return SmallBatchConfig(64, 128, num_warps=4, num_stages=num_stages, dependent_launch=True)
    return SmallBatchConfig(128, 64, num_warps=8, num_stages=4, dependent_launch=True)


@triton.jit(do_not_specialize=["batch"])
def _expand(
    tokens_in,
    weight,
    weight_scale,
    bias,
    plain_out,
    activated_out,
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
    activated_stride,
    num_plain: tl.constexpr,
    width: tl.constexpr,
    operand_dtype: tl.constexpr,
    block_b: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    has_even_terms: tl.constexpr,
    block_rank: tl.constexpr,
    is_dependent: tl.constexpr,
):
    first_row = tl.program_id(0) * block_n
    if is_dependent:
        wait_for_previous()
        let_next_start()
    rows = first_row + tl.arange(0, block_n)
    tokens = tl.program_id(1) * block_b + tl.arange(0, block_b)
    product = tl.zeros((block_n, block_b), tl.float32)
    for begin in range(0, width, block_k):
        columns = begin + tl.arange(0, block_k)
        left = load_weight(weight, rows, columns, num_rows, width, is_even)
        right = load_tokens(tokens_in, tokens, columns, batch, width, width, is_even)
        product = tl.dot(operand(left, operand_dtype), right, product, input_precision="ieee")
    in_range = rows < num_rows
    if weight_scale is not None:
        product *= tl.load(weight_scale + rows, mask=in_range, other=0.0)[:, None]
    product += tl.load(bias + rows, mask=in_range, other=0.0)[:, None]
    product = add_terms(
        product,
        tokens,
        batch,
        first_row,
        first_row - num_plain,
        num_plain,
        num_rows - num_plain,
        0,
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
        1,
        block_n,
        block_rank,
        has_even_terms,
    )
    is_token = (tokens < batch)[None, :]
    if first_row < num_plain:
        tl.store(
            plain_out + tokens[None, :].to(tl.int64) * num_plain + rows[:, None],
            operand(product, plain_out.dtype.element_ty),
            mask=is_token & (rows < num_plain)[:, None],
        )
    if first_row + block_n > num_plain:
        bent = 1.5957691216057308 * (product + 0.044715 * product * product * product)
        tl.store(
            activated_out + tokens[None, :].to(tl.int64) * activated_stride + (rows - num_plain)[:, None],
            operand(product * tl.sigmoid(bent), activated_out.dtype.element_ty),
            mask=is_token & (in_range & (rows >= num_plain))[:, None],
        )
