"""Computes a mixture of experts of 4 bits for one token, as in `triton_single_token`; nothing is rounded to
float8.

A tile has all columns of some rows, as pairs of groups: each is summed by itself, and multiplied by its scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.reference_int4 import INT4_GROUP, INT4_UNIT
from kestrel_ops.experts.triton_int4_products import (
    as_operand,
    first_bits,
    first_scale,
    has_code,
    second_bits,
    second_scale,
)
from kestrel_ops.experts.triton_launch_configs import OneTokenConfig
from kestrel_ops.experts.triton_products import gated
from kestrel_ops.experts.triton_single_token import MOST_EXPERTS, chosen, padded_choices, rows_of_tile
from kestrel_ops.linear.triton_small_batch import operand

_GROUP = tl.constexpr(INT4_GROUP)
_UNIT = tl.constexpr(INT4_UNIT)
_LARGEST_TILE = 65_536  # bytes of the shortest tile, one row of each chosen expert


def fits_one_token_int4(up: Tensor, down: Tensor, choices: int) -> bool:
    """Returns True if a program can hold what these kernels load at once."""
    pairs = max(2 * _pairs(up), padded_choices(choices) * _pairs(down))
    return len(up) <= MOST_EXPERTS and pairs * INT4_GROUP <= _LARGEST_TILE


def mix_one_int4(
    hidden: Tensor,  # [1, dim], contiguous
    logits: Tensor,  # [1, E], contiguous
    up: Tensor,  # [E, pairs of dim, 2 * inner, 64] uint8, contiguous
    down: Tensor,  # [E, pairs of inner, dim, 64] uint8, contiguous
    choices: int,
    up_scale: Tensor,
    down_scale: Tensor,
    config: OneTokenConfig,
    *,
    is_dependent: bool,
) -> Tensor:  # [1, dim]
    """Returns the mixture for one token, whose sizes fit (`fits_one_token_int4`)."""
    num_experts, num_pairs, both, _ = up.shape
    dim, width = hidden.shape[1], both // 2
    inner = torch.empty(choices, width, dtype=hidden.dtype, device=hidden.device)
    out = torch.empty_like(hidden)
    sizes = {
        "dim": dim,
        "inner": width,
        "num_experts": num_experts,
        "experts_block": max(triton.next_power_of_2(num_experts), padded_choices(choices)),
        "choices_block": padded_choices(choices),
        "has_float8": DeviceLimits.of(hidden.device).has_float8,
        "takes_four": has_code(up),
        "is_dependent": is_dependent,
        "num_warps": config.num_warps,
        "num_stages": 1,
    }
    rows = rows_of_tile(config.expand_bytes, 2 * _pairs(up) * INT4_GROUP, width)
    num_blocks = triton.cdiv(width, rows)
    launch(
        _expand,
        (num_blocks * choices,),
        *(hidden, logits, up, up_scale.view(torch.int32), inner),
        num_pairs=num_pairs,
        num_blocks=num_blocks,
        block_rows=rows,
        pairs_block=_pairs(up),
        is_even=num_pairs == _pairs(up) and dim == 2 * num_pairs * INT4_GROUP and width % rows == 0,
        **sizes,
    )
    num_pairs = down.shape[1]
    rows = rows_of_tile(config.contract_bytes, padded_choices(choices) * _pairs(down) * INT4_GROUP, dim)
    launch(
        _contract,
        (triton.cdiv(dim, rows),),
        *(inner, logits, down, down_scale.view(torch.int32), out),
        num_pairs=num_pairs,
        choices=choices,
        block_rows=rows,
        pairs_block=_pairs(down),
        **sizes,
    )
    return out


def _pairs(stack: Tensor) -> int:
    return triton.next_power_of_2(stack.shape[1])


@triton.jit
def _to_float32(bits, has_float8: tl.constexpr) -> tl.tensor:
    """Bits of float8_e4m3fn as float32."""
    if has_float8:
        bits = bits.to(tl.float8e4nv, bitcast=True)
        return bits.to(tl.float32)
    return as_operand(bits, tl.float32)


@triton.jit
def _sums(tile, scales, values, others, has_float8: tl.constexpr, takes_four: tl.constexpr) -> tl.tensor:
    """Returns a tile [pairs, rows, 64] times values [pairs, 64] of both groups, by pair and row, with their
    scales."""
    first = tl.sum(_to_float32(first_bits(tile, takes_four), has_float8) * values[:, None, :], axis=2)
    second = tl.sum(_to_float32(second_bits(tile, takes_four), has_float8) * others[:, None, :], axis=2)
    return first * first_scale(scales) + second * second_scale(scales)


@triton.jit
def _expand(
    hidden,
    logits,
    weight,
    weight_scale,
    inner_out,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_pairs: tl.constexpr,
    num_experts: tl.constexpr,
    num_blocks: tl.constexpr,
    experts_block: tl.constexpr,
    choices_block: tl.constexpr,
    block_rows: tl.constexpr,
    pairs_block: tl.constexpr,
    is_even: tl.constexpr,
    has_float8: tl.constexpr,
    takes_four: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rank = tl.program_id(0) // num_blocks
    rows = tl.program_id(0) % num_blocks * block_rows + tl.arange(0, block_rows)
    pairs = tl.arange(0, pairs_block)
    columns = tl.arange(0, _GROUP)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    experts, _ = chosen(logits, experts_block, num_experts, choices_block)
    expert = tl.sum(tl.where(tl.arange(0, choices_block) == rank, experts, 0), axis=0).to(tl.int64)
    of_rows = expert * (num_pairs * 2 * inner) + pairs[:, None] * (2 * inner) + rows[None, :]
    own = weight + of_rows[:, :, None] * _GROUP + columns[None, None, :]
    if is_even:
        activated_tile = tl.load(own, eviction_policy="evict_first")
        gate_tile = tl.load(own + inner * _GROUP, eviction_policy="evict_first")
        activated_scale = tl.load(weight_scale + of_rows)
        gate_scale = tl.load(weight_scale + inner + of_rows)
    else:
        inside = (pairs < num_pairs)[:, None] & (rows < inner)[None, :]
        activated_tile = tl.load(own, mask=inside[:, :, None], other=0)
        gate_tile = tl.load(own + inner * _GROUP, mask=inside[:, :, None], other=0)
        activated_scale = tl.load(weight_scale + of_rows, mask=inside, other=0)
        gate_scale = tl.load(weight_scale + inner + of_rows, mask=inside, other=0)
    places = pairs[:, None] * (2 * _GROUP) + columns[None, :]
    values = tl.load(hidden + places, mask=places < dim, other=0.0).to(tl.float32) * (1 / _UNIT)
    places += _GROUP
    others = tl.load(hidden + places, mask=places < dim, other=0.0).to(tl.float32) * (1 / _UNIT)
    activated = tl.sum(_sums(activated_tile, activated_scale, values, others, has_float8, takes_four), axis=0)
    gate = tl.sum(_sums(gate_tile, gate_scale, values, others, has_float8, takes_four), axis=0)
    results = operand(gated(activated, gate), inner_out.dtype.element_ty)
    tl.store(inner_out + rank * inner + rows, results, mask=rows < inner)


@triton.jit
def _contract(
    inner_in,
    logits,
    weight,
    weight_scale,
    out,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_pairs: tl.constexpr,
    num_experts: tl.constexpr,
    choices: tl.constexpr,
    experts_block: tl.constexpr,
    choices_block: tl.constexpr,
    block_rows: tl.constexpr,
    pairs_block: tl.constexpr,
    has_float8: tl.constexpr,
    takes_four: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, _GROUP)
    ranks = tl.arange(0, choices_block)
    # The kernel before has waited for the logits, so that they are complete.
    experts, logits_of_experts = chosen(logits, experts_block, num_experts, choices_block)
    is_choice = ranks < choices
    largest = tl.max(tl.where(is_choice, logits_of_experts, float("-inf")), axis=0)
    share = tl.where(is_choice, tl.exp(logits_of_experts - largest), 0.0)
    share = share / tl.sum(share, axis=0)
    # All pairs of all chosen experts in one axis.
    num_all: tl.constexpr = choices_block * pairs_block
    experts = tl.reshape(tl.broadcast_to(experts[:, None], (choices_block, pairs_block)), (num_all,))
    share = tl.reshape(tl.broadcast_to(share[:, None], (choices_block, pairs_block)), (num_all,))
    rank, pair = tl.arange(0, num_all) // pairs_block, tl.arange(0, num_all) % pairs_block
    is_pair = (rank < choices) & (pair < num_pairs)
    first_row = tl.where(is_pair, experts, 0).to(tl.int64) * (num_pairs * dim) + pair * dim
    of_rows = first_row[:, None] + rows[None, :]
    inside = is_pair[:, None] & (rows < dim)[None, :]
    own = weight + of_rows[:, :, None] * _GROUP + columns[None, None, :]
    tile = tl.load(own, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    scales = tl.load(weight_scale + of_rows, mask=inside, other=0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    places = pair[:, None] * (2 * _GROUP) + columns[None, :]
    own_inner = inner_in + rank[:, None] * inner + places
    values = tl.load(own_inner, mask=is_pair[:, None] & (places < inner), other=0.0).to(tl.float32)
    is_inside = is_pair[:, None] & (places + _GROUP < inner)
    others = tl.load(own_inner + _GROUP, mask=is_inside, other=0.0).to(tl.float32)
    sums = _sums(tile, scales, values, others, has_float8, takes_four) * (share * (1 / _UNIT))[:, None]
    tl.store(out + rows, operand(tl.sum(sums, axis=0), out.dtype.element_ty), mask=rows < dim)
