"""Computes a mixture of gated experts in which a token has the same bits among any other tokens.

Pairs of a token and one of its experts are listed by expert, in blocks of one expert each. Every element of a
product is one sum of float32 over the columns of the weight in their order, whatever block its pair is in. The
experts of a token are added in the order of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.linear.triton_small_batch import converted
from kestrel_ops.lora.reference import ExpertAdapters
from kestrel_ops.shapes import FLOAT8, ModelShape

_COLUMNS_OF_A_SUM = 1024


@dataclass(frozen=True, slots=True)
class _Lists:
    """Pairs (token * choices + rank) by expert, and blocks of them."""

    pairs: Tensor
    """[T * choices] int64, in the order of their experts."""
    experts: Tensor
    """[blocks] int64: the expert of each block; of blocks that are not used, the number of experts."""
    begins: Tensor
    """[blocks] int64: the first place in `pairs` of each block."""
    ends: Tensor
    """[blocks] int64: the place behind the last pair of the block's expert."""


def invariant_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,  # [T]: padding takes part as any token does
) -> Tensor:  # [T, dim]
    """Computes a mixture of experts whose rows have the same bits in any batch.

    Same contract as `reference.invariant_experts`. Float8 weights are converted to the type of `hidden`.
    """
    assert adapters is None, "--deterministic takes no adapters"
    num_tokens, dim = hidden.shape
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    num_experts, both, _ = up.shape
    width, choices = both // 2, experts_per_token
    num_pairs = num_tokens * choices
    hidden = hidden.contiguous()
    assert up.is_contiguous()
    assert down.is_contiguous()
    if up.dtype == FLOAT8 and not DeviceLimits.of(hidden.device).has_float8:
        up, down = up.view(torch.uint8), down.view(torch.uint8)
    top = router_logits.float().topk(choices, dim=-1)
    weights = top.values.softmax(dim=-1)
    is_full = hidden.dtype == torch.float32
    block_pairs = 16 if is_full or num_pairs <= 16 * num_experts else 64
    lists = _listed(top.indices, num_experts, block_pairs)
    block_out, block_columns = (32, 32) if is_full else (64, 64)
    options: dict[str, Any] = {
        "num_experts": num_experts,
        "block_pairs": block_pairs,
        "block_out": block_out,
        "block_columns": block_columns,
        "num_warps": 4,
        "num_stages": 2 if is_full else 3,
    }
    num_blocks = len(lists.experts)
    inner = torch.empty(num_pairs, width, dtype=hidden.dtype, device=hidden.device)
    launcher(_expand, (num_blocks * triton.cdiv(width, block_out),))(
        *(hidden, up, up_scale, lists.pairs, lists.experts, lists.begins, lists.ends, inner),
        choices=choices,
        dim=dim,
        inner=width,
        **options,
    )
    rows = torch.empty(num_pairs, dim, dtype=hidden.dtype, device=hidden.device)
    launcher(_contract, (num_blocks * triton.cdiv(dim, block_out),))(
        *(inner, down, down_scale, lists.pairs, lists.experts, lists.begins, lists.ends, rows, num_pairs),
        dim=dim,
        inner=width,
        **options,
    )
    columns = min(_COLUMNS_OF_A_SUM, triton.next_power_of_2(dim))
    launcher(_sum_choices, (num_tokens, triton.cdiv(dim, columns)))(
        *(rows, weights, out), dim=dim, choices=choices, columns=columns
    )
    return out


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None or not model.text.num_experts:
        return None
    return unsupported_device(model) or unsupported_rows(model)


def _listed(choices: Tensor, num_experts: int, block_pairs: int) -> _Lists:
    """Lists of the pairs of `choices` [T, choices] int64. Does not wait for the device."""
    experts, pairs = choices.flatten().sort(stable=True)
    numbers = torch.arange(num_experts + 1, device=experts.device)
    starts = torch.searchsorted(experts, numbers)
    num_blocks = (starts.diff() + block_pairs - 1) // block_pairs
    last_blocks = num_blocks.cumsum(0)
    most = min(num_experts, len(pairs)) + len(pairs) // block_pairs
    blocks = torch.arange(most, device=experts.device)
    owners = torch.searchsorted(last_blocks, blocks, right=True)
    known = owners.clamp(max=num_experts - 1)
    within = blocks - (last_blocks - num_blocks)[known]
    return _Lists(pairs, owners, starts[known] + within * block_pairs, starts[known + 1])


@triton.jit
def _tile(pointers, scale, expert, row, num_rows: tl.constexpr, is_inside, dtype: tl.constexpr):
    """Returns a tile [rows, columns] of a weight, in the type of the tokens."""
    tile = tl.load(pointers, mask=is_inside, other=0.0)
    if scale is not None:
        tile = converted(tile, tl.float32) * tl.load(scale + expert * num_rows + row)[:, None]
    return tile.to(dtype)


@triton.jit
def _expand(
    tokens,
    weight,
    scale,
    pairs,
    experts,
    begins,
    ends,
    inner_out,
    choices: tl.constexpr,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    block_pairs: tl.constexpr,
    block_out: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Computes gelu(first half) * (second half + 1) of the product with the first weight, by place in the lists."""
    out_blocks: tl.constexpr = (inner + block_out - 1) // block_out
    block, out_block = tl.program_id(0) // out_blocks, tl.program_id(0) % out_blocks
    expert = tl.load(experts + block)
    if expert >= num_experts:
        return
    place = tl.load(begins + block) + tl.arange(0, block_pairs)
    is_present = place < tl.load(ends + block)
    token = tl.load(pairs + place, mask=is_present, other=0) // choices
    row = out_block * block_out + tl.arange(0, block_out)
    known = tl.minimum(row, inner - 1)
    column = tl.arange(0, block_columns)
    left = weight + expert * (2 * inner * dim) + known[:, None] * dim + column[None, :]
    right = tokens + token[None, :] * dim + column[:, None]
    activated = tl.zeros((block_out, block_pairs), tl.float32)
    gate = tl.zeros((block_out, block_pairs), tl.float32)
    dtype: tl.constexpr = tokens.dtype.element_ty
    for begin in range(0, dim, block_columns):
        inside = begin + column < dim
        values = tl.load(right + begin, mask=inside[:, None], other=0.0)
        own = _tile(left + begin, scale, expert, known, 2 * inner, inside[None, :], dtype)
        more = _tile(left + inner * dim + begin, scale, expert, inner + known, 2 * inner, inside[None, :], dtype)
        activated = tl.dot(own, values, activated, input_precision="ieee")
        gate = tl.dot(more, values, gate, input_precision="ieee")
    result = activated * 0.5 * (1.0 + tl.erf(activated * 0.7071067811865476)) * (gate + 1.0)
    tl.store(
        inner_out + place[None, :] * inner + row[:, None],
        result.to(inner_out.dtype.element_ty),
        mask=(row < inner)[:, None] & is_present[None, :],
    )


@triton.jit(do_not_specialize=["num_pairs"])  # differs between batches
def _contract(
    inner_in,
    weight,
    scale,
    pairs,
    experts,
    begins,
    ends,
    out,
    num_pairs,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    block_pairs: tl.constexpr,
    block_out: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Returns the product with the second weight, by pair."""
    out_blocks: tl.constexpr = (dim + block_out - 1) // block_out
    block, out_block = tl.program_id(0) // out_blocks, tl.program_id(0) % out_blocks
    expert = tl.load(experts + block)
    if expert >= num_experts:
        return
    place = tl.load(begins + block) + tl.arange(0, block_pairs)
    is_present = place < tl.load(ends + block)
    pair = tl.load(pairs + place, mask=is_present, other=0)
    row = out_block * block_out + tl.arange(0, block_out)
    known = tl.minimum(row, dim - 1)
    column = tl.arange(0, block_columns)
    left = weight + expert * (dim * inner) + known[:, None] * inner + column[None, :]
    right = inner_in + tl.minimum(place, num_pairs - 1)[None, :] * inner + column[:, None]
    total = tl.zeros((block_out, block_pairs), tl.float32)
    dtype: tl.constexpr = inner_in.dtype.element_ty
    for begin in range(0, inner, block_columns):
        inside = begin + column < inner
        values = tl.load(right + begin, mask=inside[:, None] & is_present[None, :], other=0.0)
        own = _tile(left + begin, scale, expert, known, dim, inside[None, :], dtype)
        total = tl.dot(own, values, total, input_precision="ieee")
    tl.store(
        out + pair[None, :] * dim + row[:, None],
        total.to(out.dtype.element_ty),
        mask=(row < dim)[:, None] & is_present[None, :],
    )


@triton.jit
def _sum_choices(rows, weights, out, dim: tl.constexpr, choices: tl.constexpr, columns: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < dim
    total = tl.zeros((columns,), tl.float32)
    for rank in tl.static_range(choices):
        row = tl.load(rows + (token * choices + rank) * dim + column, mask=inside, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + token * choices + rank)
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=inside)
