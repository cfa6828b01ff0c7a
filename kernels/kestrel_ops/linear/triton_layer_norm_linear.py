"""Computes a LayerNorm and a small linear layer in one launch: every program normalises its row and has part of
a layer."""

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
from kestrel_ops.linear.triton_small_batch import operand
from kestrel_ops.shapes import ModelShape

_TILE = 16_384  # values of the weight in a program, which holds at least a row
_FEW_TOKENS = 4  # up to which programs are short rather than few
_MANY_TOKENS = 32  # from which on programs have several of them, so that the weight is read less often


def layer_norm_linear(
    hidden: Tensor,  # [T, dim] float32, contiguous
    norm_weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    weight: Tensor,  # [N, dim], contiguous
    bias: Tensor,
    delta: Tensor | None = None,  # [T, dim], contiguous
) -> tuple[Tensor, Tensor]:
    """Normalises rows and multiplies them by a matrix. Same contract as `reference.layer_norm_linear`."""
    num_tokens, dim = hidden.shape
    num_rows = len(weight)
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    assert weight.is_contiguous()
    normed = torch.empty(num_tokens, dim, dtype=weight.dtype, device=hidden.device)
    out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=hidden.device)
    columns = triton.next_power_of_2(dim)
    rows = max(1, min(2 if num_tokens <= _FEW_TOKENS else 8, _TILE // columns))
    tokens = 2 if num_tokens >= _MANY_TOKENS else 1
    if num_tokens:
        launch(
            _norm_and_multiply,
            (triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens)),
            *(hidden, delta, norm_weight, norm_bias, weight, bias, normed, out, num_tokens, epsilon),
            tokens=tokens,
            dim=dim,
            num_rows=num_rows,
            block_rows=rows,
            columns=columns,
            is_dependent=has_dependent_launch(hidden),
            num_warps=4,
            num_stages=1,
        )
    return normed, out


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model) or unsupported_rows(model)


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_and_multiply(
    hidden,
    delta,
    norm_weight,
    norm_bias,
    weight,
    bias,
    normed_out,
    out,
    num_tokens,
    epsilon,
    tokens: tl.constexpr,
    dim: tl.constexpr,
    num_rows: tl.constexpr,
    block_rows: tl.constexpr,
    columns: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    places = tl.arange(0, columns)
    inside, in_range = places < dim, rows < num_rows
    tile = tl.load(
        weight + rows[:, None] * dim + places[None, :], mask=in_range[:, None] & inside[None, :], other=0.0
    )
    gain = tl.load(norm_weight + places, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + places, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + rows, mask=in_range, other=0.0).to(tl.float32)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    for each in tl.static_range(tokens):
        # The last program may have the last token twice.
        token = tl.minimum(tl.program_id(1) * tokens + each, num_tokens - 1).to(tl.int64)
        row = tl.load(hidden + token * dim + places, mask=inside, other=0.0)
        if delta is not None:
            row += tl.load(delta + token * dim + places, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(row, axis=0) / dim
        centred = tl.where(inside, row - mean, 0.0)
        deviation = tl.rsqrt(tl.sum(centred * centred, axis=0) / dim + epsilon)
        normed = operand(centred * deviation * gain + shift, normed_out.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(normed_out + token * dim + places, normed, mask=inside)
        product = tl.sum(tile.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
        tl.store(out + token * num_rows + rows, product + offset, mask=in_range)
