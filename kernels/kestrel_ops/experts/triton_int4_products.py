"""Computes the products of experts of 4 bits with the tokens in their lists.

As in `expert_products`, the weight is the left operand and each program multiplies some rows of one expert with one
item of its list. An iteration takes a pair of groups of columns: 64 bytes of each row. They become float8 by
operations on bits, and where the device or the tokens have another type they are converted. The scale of a row and
a group multiplies the sum of its products, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.reference_int4 import INT4_GROUP, INT4_UNIT
from kestrel_ops.experts.triton_adapters import Addition, added, operands
from kestrel_ops.experts.triton_launch_configs import ProductConfig
from kestrel_ops.experts.triton_products import Inner, gated, load_rows
from kestrel_ops.experts.triton_routing import Routing
from kestrel_ops.linear.triton_small_batch import converted, operand
from kestrel_ops.norms.reference import LARGEST_FLOAT8
from kestrel_ops.shapes import FLOAT8

_GROUP = tl.constexpr(INT4_GROUP)
_UNIT = tl.constexpr(INT4_UNIT)
_SMALLEST_MAGNITUDE = tl.constexpr(1e-12)  # the scale of values that are all zero must not be 0
_LARGEST = tl.constexpr(LARGEST_FLOAT8)


def expand_int4(
    routing: Routing,
    weight: Tensor,  # [E, pairs, 2 * inner, 64] uint8, contiguous
    weight_scale: Tensor,  # [E, pairs, 2 * inner, 2] bfloat16, contiguous
    addition: Addition | None,
    config: ProductConfig,
    block_tokens: int,
    dtype: torch.dtype,  # of the result; in float8 each program's columns have a scale of their own
    *,
    is_dependent: bool,
) -> Inner:
    """Multiplies by the first weights and applies the gate, as `triton_products.expand` does."""
    num_experts, num_pairs, both, _ = weight.shape
    dim, width, num_places = routing.rows.shape[1], both // 2, len(routing.pairs)
    num_blocks = triton.cdiv(width, config.rows)
    device = weight.device
    inner = Inner(
        rows=torch.empty(num_places, width, dtype=dtype, device=device),
        scales=torch.empty(num_places, num_blocks, dtype=torch.float32, device=device) if dtype == FLOAT8 else None,
        scale_columns=config.rows if dtype == FLOAT8 else width,
    )
    num_items = routing.items.shape[1]
    launch(
        _expand,
        (num_items * num_blocks,),
        *(routing.rows, routing.row_scales, weight, weight_scale.view(torch.int32)),
        *(routing.pairs, routing.items, inner.rows, inner.scales),
        *operands(addition),
        num_items,
        dim=dim,
        inner=width,
        num_pairs=num_pairs,
        choices=routing.weights.shape[1],
        rank=0 if addition is None else addition.b.shape[2],
        num_experts=num_experts,
        block_tokens=block_tokens,
        block_rows=config.rows,
        is_even=width % config.rows == 0 and dim == 2 * num_pairs * INT4_GROUP,
        is_read_once=config.is_read_once,
        takes_four=has_code(weight),
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return inner


def contract_int4(
    routing: Routing,
    inner: Inner,
    weight: Tensor,  # [E, pairs, dim, 64] uint8, contiguous
    weight_scale: Tensor,  # [E, pairs, dim, 2] bfloat16, contiguous
    addition: Addition | None,
    config: ProductConfig,
    block_tokens: int,
    dtype: torch.dtype,
    *,
    is_dependent: bool,
) -> Tensor:  # [T * choices, dim] `dtype`: rows by pair
    """Multiplies by the second weights, as `triton_products.contract` does. Values in float8 have a scale for
    each row, or for each group of columns."""
    num_experts, num_pairs, dim, _ = weight.shape
    width = inner.rows.shape[1]
    assert inner.scale_columns >= width or inner.scale_columns % INT4_GROUP == 0
    out = torch.empty(len(routing.pairs), dim, dtype=dtype, device=weight.device)
    num_items = routing.items.shape[1]
    is_even = dim % config.rows == 0 and width == 2 * num_pairs * INT4_GROUP
    launch(
        _contract,
        (num_items * triton.cdiv(dim, config.rows),),
        *(inner.rows, inner.scales, weight, weight_scale.view(torch.int32)),
        *(routing.pairs, routing.items, out),
        *operands(addition),
        num_items,
        dim=dim,
        inner=width,
        num_pairs=num_pairs,
        choices=routing.weights.shape[1],
        rank=0 if addition is None else addition.b.shape[2],
        num_experts=num_experts,
        scale_columns=inner.scale_columns,
        block_tokens=block_tokens,
        block_rows=config.rows,
        is_even=is_even,
        is_read_once=config.is_read_once,
        takes_four=has_code(weight),
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def has_code(weight: Tensor) -> bool:
    """Returns True if bytes are taken four at a time by CUDA instructions, which Triton's interpreter lacks."""
    return DeviceLimits.of(weight.device).capability is not None


@triton.jit
def as_operand(bits, dtype: tl.constexpr) -> tl.tensor:
    """Bits of float8_e4m3fn as the left operand of a product with values of this type."""
    return bits.to(tl.float8e4nv, bitcast=True) if dtype == tl.float8e4nv else converted(bits, dtype)


@triton.jit
def first_bits(packed, takes_four: tl.constexpr) -> tl.tensor:
    """Returns the weights of the first group of a pair as the bits of float8_e4m3fn (`reference_int4`)."""
    if takes_four:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x9C9C9C9C, 0x02020202, 0xEA;",  # (a & b) | c
            "=r,r",
            [packed],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return (packed & 0x9C) | 0x02


@triton.jit
def second_bits(packed, takes_four: tl.constexpr) -> tl.tensor:
    """Returns the weights of the second group of a pair as the bits of float8_e4m3fn."""
    if takes_four:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 up, down;
            shl.b32 up, $1, 2;
            shr.u32 down, $1, 2;
            lop3.b32 up, up, 0x8C8C8C8C, 0x02020202, 0xEA;
            lop3.b32 $0, down, 0x10101010, up, 0xEA;
            }""",
            "=r,r",
            [packed],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return ((packed << 2) & 0x8C) | ((packed >> 2) & 0x10) | 0x02


@triton.jit
def first_scale(both) -> tl.tensor:
    """Returns the first of two bfloat16 in 32 bits, as float32."""
    return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def second_scale(both) -> tl.tensor:
    """Returns the second of two bfloat16 in 32 bits, as float32."""
    return (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load(addresses, inside, is_even: tl.constexpr, is_read_once: tl.constexpr):
    policy: tl.constexpr = "evict_first" if is_read_once else ""
    if is_even:
        return tl.load(addresses, eviction_policy=policy)
    return tl.load(addresses, mask=inside, other=0, eviction_policy=policy)


@triton.jit(do_not_specialize=["num_items"])
def _expand(
    tokens_in,
    token_scales,
    weight,
    weight_scale,
    pairs,
    items,
    inner_out,
    inner_scales,
    coefficients,
    b,
    slots,
    num_items,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_pairs: tl.constexpr,
    choices: tl.constexpr,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    is_even: tl.constexpr,
    is_read_once: tl.constexpr,
    takes_four: tl.constexpr,
    is_dependent: tl.constexpr,
):
    num_blocks: tl.constexpr = (inner + block_rows - 1) // block_rows
    item, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    if is_dependent:
        wait_for_previous()
        let_next_start()
    count = tl.load(items + 2 * num_items + item)
    if count > 0:
        expert = tl.load(items + item).to(tl.int64)
        first = tl.load(items + num_items + item)
        within = tl.arange(0, block_tokens)
        is_present = within < count
        places = (first + within).to(tl.int64)
        tokens = (tl.load(pairs + places, mask=is_present, other=0) // choices).to(tl.int64)
        rows = block * block_rows + tl.arange(0, block_rows)
        columns = tl.arange(0, _GROUP)
        in_range = rows < inner
        # Rows of both halves of the weight in one tile, since each product is waited for.
        stacked = tl.arange(0, 2 * block_rows)
        half, row = stacked // block_rows, block * block_rows + stacked % block_rows
        is_inside = row < inner
        row += half * inner
        own = weight + expert * (num_pairs * 2 * inner * _GROUP) + (row[:, None] * _GROUP + columns[None, :])
        scales = weight_scale + expert * (num_pairs * 2 * inner) + row
        right = tokens_in + tokens[None, :] * dim + columns[:, None]
        both = tl.zeros((2 * block_rows, block_tokens), tl.float32)
        # Triton loads ahead what products read. Scales are loaded an iteration ahead here.
        scale = _load(scales, is_inside, is_even, is_read_once)
        for pair in range(num_pairs):
            following = tl.minimum(pair + 1, num_pairs - 1)
            next_scale = _load(scales + following * (2 * inner), is_inside, is_even, is_read_once)
            left = _load(own + pair * (2 * inner * _GROUP), is_inside[:, None], is_even, is_read_once)
            column = pair * (2 * _GROUP)
            values = load_rows(right + column, is_present, column + columns, dim, is_even)
            column += _GROUP
            others = load_rows(right + column, is_present, column + columns, dim, is_even)
            both += multiplied(first_bits(left, takes_four), values) * first_scale(scale)[:, None]
            both += multiplied(second_bits(left, takes_four), others) * second_scale(scale)[:, None]
            scale = next_scale
        both *= 1 / _UNIT
        both = tl.permute(tl.reshape(both, (2, block_rows, block_tokens)), (1, 2, 0))
        activated, gate = tl.split(both)
        if token_scales is not None:
            scale = tl.load(token_scales + tokens, mask=is_present, other=0.0)[None, :]
            activated *= scale
            gate *= scale
        if rank:
            slot = tl.load(slots + tokens, mask=is_present, other=0)
            activated = added(
                activated, rows, inner, 0, places, slot, expert, coefficients, b, rank, num_experts, 2 * inner
            )
            gate = added(
                gate, rows, inner, inner, places, slot, expert, coefficients, b, rank, num_experts, 2 * inner
            )
        results = gated(activated, gate)
        inside = in_range[:, None] & is_present[None, :]
        addresses = inner_out + places[None, :] * inner + rows[:, None]
        if inner_scales is not None:
            results = tl.where(in_range[:, None], results, 0.0)
            scale = tl.maximum(tl.max(tl.abs(results), axis=0), _SMALLEST_MAGNITUDE) / _LARGEST
            tl.store(addresses, (results / scale[None, :]).to(inner_out.dtype.element_ty), mask=inside)
            tl.store(inner_scales + places * num_blocks + block, scale, mask=is_present)
        else:
            tl.store(addresses, operand(results, inner_out.dtype.element_ty), mask=inside)


@triton.jit
def multiplied(bits, values) -> tl.tensor:
    """Returns the product of a tile of weights, as bits of float8, and values [columns, tokens], in float32."""
    return tl.dot(as_operand(bits, values.dtype), values, input_precision="ieee")


@triton.jit
def _scales_of_rows(addresses, is_present, pair, num_scales: tl.constexpr, scale_columns: tl.constexpr):
    """Returns the scales of the values that both groups of a pair multiply; 1 where rows have one scale each, or
    none."""
    if num_scales > 1:
        groups: tl.constexpr = scale_columns // _GROUP
        first = tl.load(addresses + 2 * pair // groups, mask=is_present, other=0.0)
        # Where the last pair has one group of columns, all values of the second are 0.
        last = tl.minimum((2 * pair + 1) // groups, num_scales - 1)
        second = tl.load(addresses + last, mask=is_present, other=0.0)
    else:
        first, second = 1.0, 1.0
    return first, second


@triton.jit(do_not_specialize=["num_items"])
def _contract(
    inner_in,
    inner_scales,
    weight,
    weight_scale,
    pairs,
    items,
    out,
    coefficients,
    b,
    slots,
    num_items,
    dim: tl.constexpr,
    inner: tl.constexpr,
    num_pairs: tl.constexpr,
    choices: tl.constexpr,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    scale_columns: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    is_even: tl.constexpr,
    is_read_once: tl.constexpr,
    takes_four: tl.constexpr,
    is_dependent: tl.constexpr,
):
    num_blocks: tl.constexpr = (dim + block_rows - 1) // block_rows
    num_scales: tl.constexpr = (inner + scale_columns - 1) // scale_columns
    item, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    # The kernel before has waited for the lists. They are not read from the cache of the multiprocessor, since this
    # may run before that kernel has ended.
    count = tl.load(items + 2 * num_items + item, cache_modifier=".cg")
    if is_dependent:
        wait_for_previous()
        let_next_start()
    if count > 0:
        expert = tl.load(items + item).to(tl.int64)
        first = tl.load(items + num_items + item)
        within = tl.arange(0, block_tokens)
        is_present = within < count
        places = (first + within).to(tl.int64)
        own_pairs = tl.load(pairs + places, mask=is_present, other=0).to(tl.int64)
        rows = block * block_rows + tl.arange(0, block_rows)
        columns = tl.arange(0, _GROUP)
        in_range = rows < dim
        own = weight + expert * (num_pairs * dim * _GROUP) + (rows[:, None] * _GROUP + columns[None, :])
        scales = weight_scale + expert * (num_pairs * dim) + rows
        right = inner_in + places[None, :] * inner + columns[:, None]
        product = tl.zeros((block_rows, block_tokens), tl.float32)
        of_rows = inner_scales + places * num_scales if num_scales > 1 else None
        scale = _load(scales, in_range, is_even, is_read_once)
        first_of_rows, second_of_rows = _scales_of_rows(of_rows, is_present, 0, num_scales, scale_columns)
        for pair in range(num_pairs):
            following = tl.minimum(pair + 1, num_pairs - 1)
            next_scale = _load(scales + following * dim, in_range, is_even, is_read_once)
            next_first, next_second = _scales_of_rows(of_rows, is_present, following, num_scales, scale_columns)
            left = _load(own + pair * (dim * _GROUP), in_range[:, None], is_even, is_read_once)
            column = pair * (2 * _GROUP)
            values = load_rows(right + column, is_present, column + columns, inner, is_even)
            others = load_rows(right + column + _GROUP, is_present, column + _GROUP + columns, inner, is_even)
            part = multiplied(first_bits(left, takes_four), values) * first_scale(scale)[:, None]
            other = multiplied(second_bits(left, takes_four), others) * second_scale(scale)[:, None]
            if num_scales > 1:
                part *= first_of_rows[None, :]
                other *= second_of_rows[None, :]
            product += part
            product += other
            scale, first_of_rows, second_of_rows = next_scale, next_first, next_second
        product *= 1 / _UNIT
        if inner_scales is not None and num_scales == 1:
            product *= tl.load(inner_scales + places, mask=is_present, other=0.0)[None, :]
        if rank:
            slot = tl.load(slots + own_pairs // choices, mask=is_present, other=0)
            product = added(product, rows, dim, 0, places, slot, expert, coefficients, b, rank, num_experts, dim)
        tl.store(
            out + own_pairs[None, :] * dim + rows[:, None],
            operand(product, out.dtype.element_ty),
            mask=in_range[:, None] & is_present[None, :],
        )
