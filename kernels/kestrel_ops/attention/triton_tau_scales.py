"""Computes the scales of tau attention: one kernel for few tokens and for very many, two for what is between."""

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
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.linear.triton_small_batch import triton_type
from kestrel_ops.norms.triton_exact_gelu import exact_gelu
from kestrel_ops.shapes import ModelShape

_FEW_TOKENS = 4  # up to which each scale has a program of its own
_MOST_COLUMNS = 8192  # of a scale that are multiplied at once
_COLUMNS = 128
_MOST_HEADS = 128  # a program holds the sums of all heads


def tau_scales(
    packed: Tensor,
    positions: Tensor,
    query_weight: Tensor,  # [H, W], contiguous
    value_weight: Tensor,  # [H, W], contiguous
    alpha: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes the scales of tau attention with sums in float32. Same contract as `reference.tau_scales`."""
    num_tokens, width = packed.shape
    num_heads = len(alpha)
    assert packed.stride(1) == 1
    assert query_weight.is_contiguous()
    assert value_weight.is_contiguous()
    device = packed.device
    out = torch.empty(2, num_tokens, num_heads, dtype=query_weight.dtype, device=device)
    if num_tokens == 0:
        return out[0], out[1]
    is_dependent = has_dependent_launch(packed)
    operands = packed, positions, query_weight, value_weight, alpha
    sizes = {"num_heads": num_heads, "width": width, "is_dependent": is_dependent}
    if num_tokens <= _FEW_TOKENS:
        launch(
            _scale,
            (2 * num_heads, num_tokens),
            *(*operands, out, packed.stride(0)),
            columns=min(_MOST_COLUMNS, triton.next_power_of_2(width)),
            **sizes,
            num_warps=8,
            num_stages=1,
        )
        return out[0], out[1]
    block_tokens, programs, num_warps = _config_for(num_tokens, DeviceLimits.of(device))
    block_rows = max(16, triton.next_power_of_2(2 * num_heads))
    num_blocks, num_steps = triton.cdiv(num_tokens, block_tokens), triton.cdiv(width, _COLUMNS)
    steps = triton.cdiv(num_steps, max(1, min(num_steps, programs // num_blocks)))
    num_parts = triton.cdiv(num_steps, steps)
    parts = None
    if num_parts > 1:
        parts = torch.empty(num_parts, num_tokens, 2 * num_heads, dtype=torch.float32, device=device)
    launch(
        _multiply_part,
        (num_blocks, num_parts),
        *operands,
        *(out, parts, packed.stride(0), num_tokens, steps),
        operand_dtype=triton_type(query_weight.dtype),
        block_tokens=block_tokens,
        block_rows=block_rows,
        columns=_COLUMNS if query_weight.itemsize == 2 else _COLUMNS // 2,
        is_even=_is_stacked(query_weight, value_weight) and width % _COLUMNS == 0 and 2 * num_heads == block_rows,
        **sizes,
        num_warps=num_warps,
        num_stages=3,
    )
    if parts is not None:
        launch(
            _add,
            (triton.cdiv(2 * num_heads * num_tokens, 128),),
            *(parts, positions, alpha, out, num_tokens, num_parts),
            num_heads=num_heads,
            is_dependent=is_dependent,
            num_warps=4,
            num_stages=1,
        )
    return out[0], out[1]


def _config_for(num_tokens: int, limits: DeviceLimits) -> tuple[int, int, int]:
    """Tokens of a program, programs that keep a device busy, and warps of a program."""
    if num_tokens <= 128:
        return 16, 512, 4
    return (128, 264, 4) if limits.is_hopper else (64, 512, 4)


def _is_stacked(first: Tensor, second: Tensor) -> bool:
    """Returns True if both tensors are adjacent in memory, so that they can be loaded as one."""
    is_shared = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return is_shared and second.storage_offset() == first.storage_offset() + first.numel()


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    if model.text.num_heads > _MOST_HEADS:
        return f"{model.text.num_heads} heads are more than {_MOST_HEADS}"
    return unsupported_device(model)


@triton.jit
def _with_position(product, alpha, position) -> tl.tensor:
    """Computes tanh(product) + sigmoid(alpha * ln(position + 1)) + 1/2."""
    steps = tl.log(tl.maximum(position, 0).to(tl.float32) + 1.0)
    return 2.0 * tl.sigmoid(2.0 * product) - 0.5 + tl.sigmoid(alpha.to(tl.float32) * steps)


@triton.jit
def _scale(
    packed,
    positions,
    query_weight,
    value_weight,
    alpha,
    out,
    stride,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    is_dependent: tl.constexpr,
):
    row, token = tl.program_id(0), tl.program_id(1)
    head = row % num_heads
    weight = query_weight + head * width
    if row >= num_heads:
        weight = value_weight + head * width
    own_alpha = tl.load(alpha + head)
    places = tl.arange(0, columns)
    first_factors = tl.load(weight + places, mask=places < width, other=0.0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    total = tl.zeros((columns,), tl.float32)
    for begin in tl.static_range(0, width, columns):
        inside = begin + places < width
        factors = first_factors.to(tl.float32)
        if begin:
            factors = tl.load(weight + begin + places, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(packed + token * stride + begin + places, mask=inside, other=0.0).to(tl.float32)
        total += exact_gelu(values) * factors
    scale = _with_position(tl.sum(total, axis=0), own_alpha, tl.load(positions + token))
    place = (row // num_heads * tl.num_programs(1) + token) * num_heads + head
    tl.store(out + place, scale.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def _multiply_part(
    packed,
    positions,
    query_weight,
    value_weight,
    alpha,
    out,
    parts,
    stride,
    num_tokens,
    steps,
    operand_dtype: tl.constexpr,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    columns: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    first_column = tl.program_id(1) * (steps * 128)
    tokens = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    rows = tl.arange(0, block_rows)
    heads = rows % num_heads
    places = tl.arange(0, columns)
    is_token, is_row = tokens < num_tokens, rows < 2 * num_heads
    own_rows = packed + tokens[:, None].to(tl.int64) * stride
    is_query = (rows < num_heads)[None, :]
    if is_dependent:
        wait_for_previous()
        let_next_start()
    product = tl.zeros((block_tokens, block_rows), tl.float32)
    for begin in range(0, steps * 128, columns):
        column = first_column + begin
        if is_even:  # behind the last column values are 0, by whatever factors
            own = tl.minimum(column, width - columns) + places
            is_present = tokens < tl.where(column < width, num_tokens, 0)
            values = tl.load(own_rows + own[None, :], mask=is_present[:, None], other=0.0)
            factors = tl.load(query_weight + rows[None, :] * width + own[:, None])
        else:
            own = column + places
            inside = own < width
            values = tl.load(own_rows + own[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
            places_of_weight = heads[None, :] * width + own[:, None]
            is_weight = is_row[None, :] & inside[:, None]
            factors = tl.load(query_weight + places_of_weight, mask=is_weight & is_query, other=0.0)
            factors += tl.load(value_weight + places_of_weight, mask=is_weight & (is_query == 0), other=0.0)
        activated = exact_gelu(values.to(tl.float32)).to(operand_dtype)
        product = tl.dot(activated, factors, product, input_precision="ieee")
    inside = is_token[:, None] & is_row[None, :]
    if parts is not None:
        own_part = parts + tl.program_id(1).to(tl.int64) * num_tokens * (2 * num_heads)
        tl.store(own_part + tokens[:, None] * (2 * num_heads) + rows[None, :], product, mask=inside)
    else:
        position = tl.load(positions + tokens, mask=is_token, other=0)
        scale = _with_position(product, tl.load(alpha + heads)[None, :], position[:, None])
        place = (rows // num_heads * num_tokens)[None, :] * num_heads + tokens[:, None] * num_heads + heads[None, :]
        tl.store(out + place, scale.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _add(parts, positions, alpha, out, num_tokens, num_parts, num_heads: tl.constexpr, is_dependent: tl.constexpr):
    each = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = each < num_tokens * (2 * num_heads)
    token, row = each // (2 * num_heads), each % (2 * num_heads)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    total = tl.zeros((128,), tl.float32)
    own = parts + each
    for _ in range(num_parts):
        total += tl.load(own, mask=inside, other=0.0)
        own += num_tokens * (2 * num_heads)
    position = tl.load(positions + token, mask=inside, other=0)
    scale = _with_position(total, tl.load(alpha + row % num_heads), position)
    place = (row // num_heads * num_tokens + token) * num_heads + row % num_heads
    tl.store(out + place, scale.to(out.dtype.element_ty), mask=inside)
