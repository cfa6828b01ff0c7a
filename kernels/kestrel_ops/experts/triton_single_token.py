"""Computes a mixture of experts for one token: two kernels that read the chosen experts from memory directly into
registers.

Every program finds the chosen experts itself, from the router's logits, which is cheaper than a kernel that does so
beforehand. It loads its whole tile at once and multiplies in float32; nothing is rounded to float8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.experts.triton_launch_configs import OneTokenConfig
from kestrel_ops.experts.triton_products import gated
from kestrel_ops.experts.triton_routing import ordered_keys
from kestrel_ops.linear.triton_small_batch import converted, operand

MOST_EXPERTS = 128  # their numbers take the last bits of the logits
_LARGEST_TILE = 65_536  # bytes of the shortest tile, one row of each chosen expert


def fits_one_token(up: Tensor, choices: int) -> bool:
    """Returns True if a program can hold what these kernels load at once."""
    num_experts, both, dim = up.shape
    columns = max(2 * triton.next_power_of_2(dim), padded_choices(choices) * triton.next_power_of_2(both // 2))
    return num_experts <= MOST_EXPERTS and columns * up.itemsize <= _LARGEST_TILE


def mix_one(
    hidden: Tensor,  # [1, dim], contiguous
    logits: Tensor,  # [1, E], contiguous
    up: Tensor,  # [E, 2 * inner, dim], contiguous
    down: Tensor,  # [E, dim, inner], contiguous
    choices: int,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    config: OneTokenConfig,
    *,
    is_dependent: bool,
) -> Tensor:  # [1, dim]
    """Returns the mixture for one token, whose sizes fit (`fits_one_token`)."""
    num_experts, both, dim = up.shape
    width = both // 2
    inner = torch.empty(choices, width, dtype=hidden.dtype, device=hidden.device)
    out = torch.empty_like(hidden)
    experts_block = max(triton.next_power_of_2(num_experts), padded_choices(choices))
    columns = triton.next_power_of_2(dim)
    rows = rows_of_tile(config.expand_bytes, 2 * columns * up.itemsize, width)
    num_blocks = triton.cdiv(width, rows)
    launch(
        _expand,
        (num_blocks * choices,),
        *(hidden, logits, up, up_scale, inner),
        dim=dim,
        inner=width,
        num_experts=num_experts,
        num_blocks=num_blocks,
        experts_block=experts_block,
        choices_block=padded_choices(choices),
        block_rows=rows,
        block_columns=columns,
        is_even=dim == columns and width % rows == 0,
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=1,
    )
    columns = triton.next_power_of_2(width)
    rows = rows_of_tile(config.contract_bytes, padded_choices(choices) * columns * down.itemsize, dim)
    launch(
        _contract,
        (triton.cdiv(dim, rows),),
        *(inner, logits, down, down_scale, out),
        dim=dim,
        inner=width,
        num_experts=num_experts,
        choices=choices,
        experts_block=experts_block,
        choices_block=padded_choices(choices),
        block_rows=rows,
        block_columns=columns,
        is_even=width == columns and dim % rows == 0 and choices == padded_choices(choices),
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out


def padded_choices(choices: int) -> int:
    """Returns the choices that a program holds."""
    return max(2, triton.next_power_of_2(choices))  # `topk` of Triton 3.6 cannot take one alone


def rows_of_tile(tile_bytes: int, row_bytes: int, num_rows: int) -> int:
    """Rows of a tile: a power of two, at least one."""
    return max(1, min(tile_bytes // row_bytes, triton.next_power_of_2(num_rows)))


@triton.jit
def chosen(
    logits, experts_block: tl.constexpr, num_experts: tl.constexpr, choices_block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the numbers of the experts with the largest logits, the best first, and these logits; of two
    equals the lower one comes first, and what is no expert comes last."""
    experts = tl.arange(0, experts_block)
    is_expert = experts < num_experts
    # Not from the cache of the multiprocessor, since this may run before the kernel before has ended.
    values = tl.load(logits + experts, mask=is_expert, other=0.0, cache_modifier=".cg").to(tl.float32)
    is_wide: tl.constexpr = logits.dtype.element_ty == tl.float32
    lowest: tl.constexpr = -(2**63) if is_wide else -(2**31)
    keys = ordered_keys(values, experts, experts_block - 1, is_wide)
    keys = tl.topk(tl.where(is_expert, keys, lowest), choices_block)
    found = experts_block - 1 - (keys & (experts_block - 1)).to(tl.int32)
    keys = (keys >> 32).to(tl.int32) if is_wide else keys & -experts_block
    return found, (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _expand(
    hidden,
    logits,
    weight,
    weight_scale,
    inner_out,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    num_blocks: tl.constexpr,
    experts_block: tl.constexpr,
    choices_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rank = tl.program_id(0) // num_blocks
    rows = tl.program_id(0) % num_blocks * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, block_columns)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    experts, _ = chosen(logits, experts_block, num_experts, choices_block)
    expert = tl.sum(tl.where(tl.arange(0, choices_block) == rank, experts, 0), axis=0).to(tl.int64)
    own = weight + expert * (2 * inner * dim) + (rows[:, None] * dim + columns[None, :])
    in_range = rows < inner
    if is_even:
        activated_tile = tl.load(own, eviction_policy="evict_first")
        gate_tile = tl.load(own + inner * dim, eviction_policy="evict_first")
    else:
        inside = in_range[:, None] & (columns < dim)[None, :]
        activated_tile = tl.load(own, mask=inside, other=0.0)
        gate_tile = tl.load(own + inner * dim, mask=inside, other=0.0)
    token = tl.load(hidden + columns, mask=columns < dim, other=0.0).to(tl.float32)
    activated = tl.sum(converted(activated_tile, tl.float32) * token[None, :], axis=1)
    gate = tl.sum(converted(gate_tile, tl.float32) * token[None, :], axis=1)
    if weight_scale is not None:
        scale = weight_scale + expert * (2 * inner) + rows
        activated *= tl.load(scale, mask=in_range, other=0.0)
        gate *= tl.load(scale + inner, mask=in_range, other=0.0)
    values = operand(gated(activated, gate), inner_out.dtype.element_ty)
    tl.store(inner_out + rank * inner + rows, values, mask=in_range)


@triton.jit
def _contract(
    inner_in,
    logits,
    weight,
    weight_scale,
    out,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    choices: tl.constexpr,
    experts_block: tl.constexpr,
    choices_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, block_columns)
    places = tl.arange(0, choices_block)
    # The kernel before has waited for the logits, so that they are complete.
    experts, values = chosen(logits, experts_block, num_experts, choices_block)
    is_choice = places < choices
    share = tl.where(is_choice, tl.exp(values - tl.max(tl.where(is_choice, values, float("-inf")), axis=0)), 0.0)
    share = share / tl.sum(share, axis=0)
    experts = tl.where(is_choice, experts, 0).to(tl.int64)
    in_range = rows < dim
    own = weight + experts[None, :, None] * (dim * inner) + rows[:, None, None] * inner + columns[None, None, :]
    inside = is_choice[:, None] & (columns < inner)[None, :]
    if is_even:
        tile = tl.load(own, eviction_policy="evict_first")
    else:
        tile = tl.load(own, mask=in_range[:, None, None] & inside[None, :, :], other=0.0)
    if weight_scale is not None:
        is_scale = in_range[:, None] & is_choice[None, :]
        scale = tl.load(weight_scale + experts[None, :] * dim + rows[:, None], mask=is_scale, other=0.0)
        factors = scale * share[None, :]
    else:
        factors = tl.broadcast_to(share[None, :], (block_rows, choices_block))
    if is_dependent:
        wait_for_previous()
        let_next_start()
    token = tl.load(inner_in + places[:, None] * inner + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(converted(tile, tl.float32) * token[None, :, :], axis=2)
    tl.store(out + rows, operand(tl.sum(sums * factors, axis=1), out.dtype.element_ty), mask=in_range)
