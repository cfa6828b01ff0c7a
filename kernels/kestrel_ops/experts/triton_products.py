"""Computes the products of experts with the tokens in their lists, and the weighted sums of what the experts give.

The weight is the left operand, so that its rows fill the tiles of the tensor cores for any number of tokens. Each
program multiplies some rows of one expert with one item of its list. Programs of one item follow one another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.experts.triton_adapters import Addition, added, operands
from kestrel_ops.experts.triton_launch_configs import ProductConfig
from kestrel_ops.experts.triton_routing import Routing, quantised
from kestrel_ops.linear.triton_small_batch import converted, operand
from kestrel_ops.norms.reference import LARGEST_FLOAT8
from kestrel_ops.norms.triton_exact_gelu import exact_gelu
from kestrel_ops.shapes import FLOAT8

_SMALLEST_MAGNITUDE = tl.constexpr(1e-12)  # the scale of values that are all zero must not be 0
_LARGEST = tl.constexpr(LARGEST_FLOAT8)


class Inner(NamedTuple):
    """Describes the values between the experts' two products, for each place in the lists."""

    rows: Tensor
    """[pairs, inner], in float8 if it was quantised."""
    scales: Tensor | None
    """[pairs, blocks of `scale_columns`] float32 of quantised rows."""
    scale_columns: int
    """Columns with one scale; all of them where there is none."""


def expand(
    routing: Routing,
    weight: Tensor,  # [E, 2 * inner, dim], contiguous
    weight_scale: Tensor | None,  # [E, 2 * inner] float32
    addition: Addition | None,
    config: ProductConfig,
    block_tokens: int,
    dtype: torch.dtype,  # of the result; in float8 each program's columns have a scale of their own
    *,
    is_dependent: bool,
) -> Inner:
    """Computes gelu(first half) * (second half + 1) of the product with the first weight, for each pair."""
    num_experts, both, dim = weight.shape
    width, num_pairs = both // 2, len(routing.pairs)
    num_blocks = triton.cdiv(width, config.rows)
    device = weight.device
    inner = Inner(
        rows=torch.empty(num_pairs, width, dtype=dtype, device=device),
        scales=torch.empty(num_pairs, num_blocks, dtype=torch.float32, device=device) if dtype == FLOAT8 else None,
        scale_columns=config.rows if dtype == FLOAT8 else width,
    )
    is_even = width % config.rows == 0 and dim % config.columns == 0
    num_items = routing.items.shape[1]
    launch(
        _expand,
        (num_items * num_blocks,),
        *(routing.rows, routing.row_scales, weight, weight_scale, routing.pairs, routing.items),
        *(inner.rows, inner.scales),
        *operands(addition),
        num_items,
        dim=dim,
        inner=width,
        choices=routing.weights.shape[1],
        rank=0 if addition is None else addition.b.shape[2],
        num_experts=num_experts,
        block_tokens=block_tokens,
        block_rows=config.rows,
        block_columns=config.columns,
        is_even=is_even,
        is_read_once=config.is_read_once,
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return inner


def contract(
    routing: Routing,
    inner: Inner,
    weight: Tensor,  # [E, dim, inner], contiguous
    weight_scale: Tensor | None,  # [E, dim] float32
    addition: Addition | None,
    config: ProductConfig,
    block_tokens: int,
    dtype: torch.dtype,
    *,
    is_dependent: bool,
) -> Tensor:  # [T * choices, dim] `dtype`: rows by pair
    """Returns the product with the second weight, for each pair."""
    num_experts, dim, width = weight.shape
    out = torch.empty(len(routing.pairs), dim, dtype=dtype, device=weight.device)
    columns = config.columns if inner.scale_columns >= width else min(config.columns, inner.scale_columns)
    turns = config.turns if width % (config.turns * columns) == 0 else 1
    is_even = dim % config.rows == 0 and width % columns == 0
    num_items = routing.items.shape[1]
    launch(
        _contract,
        (num_items * triton.cdiv(dim, config.rows),),
        *(inner.rows, inner.scales, weight, weight_scale, routing.pairs, routing.items, out),
        *operands(addition),
        num_items,
        dim=dim,
        inner=width,
        choices=routing.weights.shape[1],
        rank=0 if addition is None else addition.b.shape[2],
        num_experts=num_experts,
        scale_columns=inner.scale_columns,
        block_tokens=block_tokens,
        block_rows=config.rows,
        block_columns=columns,
        turns=turns,
        is_even=is_even,
        is_read_once=config.is_read_once,
        prefetched_bytes=_prefetched(config, width * weight.itemsize) if is_dependent and is_even else 0,
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def quantised_rows(
    inner: Inner,  # in the type of the tokens
    *,
    is_dependent: bool,
) -> Inner:
    """Returns the same in float8, with one scale for each row."""
    rows, scales = quantised(inner.rows, is_dependent=is_dependent)
    return Inner(rows, scales[:, None], inner.rows.shape[1])


def combine(
    routing: Routing,
    rows: Tensor,  # [T * choices, dim]
    *,
    is_dependent: bool,
) -> Tensor:  # [T, dim]
    """Returns the sum of each token's rows by their weights, in the order of the choices."""
    num_tokens, choices = routing.weights.shape
    dim = rows.shape[1]
    out = torch.empty(num_tokens, dim, dtype=rows.dtype, device=rows.device)
    columns = min(1024, triton.next_power_of_2(dim))
    launch(
        _combine,
        (num_tokens, triton.cdiv(dim, columns)),
        *(rows, routing.weights, out),
        dim=dim,
        choices=choices,
        columns=columns,
        is_dependent=is_dependent,
        num_warps=4,
        num_stages=1,
    )
    return out


def _prefetched(config: ProductConfig, row_bytes: int) -> int:
    """Bytes of each row of a weight that programs have loaded beforehand."""
    return min(config.prefetched_bytes, row_bytes) if row_bytes % 16 == 0 else 0


@triton.jit
def gated(activated, gate) -> tl.tensor:
    """Computes gelu(activated) * (gate + 1), with the exact GELU."""
    return exact_gelu(activated) * (gate + 1.0)


@triton.jit
def _load_weight(
    addresses,
    rows,
    columns,
    num_rows: tl.constexpr,
    width: tl.constexpr,
    is_even: tl.constexpr,
    is_read_once: tl.constexpr,
):
    """Returns a tile [rows, columns] of a weight, with 0 beyond its edges."""
    policy: tl.constexpr = "evict_first" if is_read_once else ""
    if is_even:
        return tl.load(addresses, eviction_policy=policy)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    return tl.load(addresses, mask=inside, other=0.0, eviction_policy=policy)


@triton.jit
def load_rows(addresses, is_present, columns, width: tl.constexpr, is_even: tl.constexpr) -> tl.tensor:
    """Returns a tile [columns, tokens], with 0 where there is none."""
    inside = is_present[None, :]
    if not is_even:
        inside = inside & (columns < width)[:, None]
    return tl.load(addresses, mask=inside, other=0.0)


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
    choices: tl.constexpr,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    is_even: tl.constexpr,
    is_read_once: tl.constexpr,
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
        columns = tl.arange(0, block_columns)
        own = weight + expert * (2 * inner * dim) + (rows[:, None] * dim + columns[None, :])
        right = tokens_in + tokens[None, :] * dim + columns[:, None]
        activated = tl.zeros((block_rows, block_tokens), tl.float32)
        gate = tl.zeros((block_rows, block_tokens), tl.float32)
        for begin in range(0, dim, block_columns):
            left = _load_weight(own + begin, rows, begin + columns, inner, dim, is_even, is_read_once)
            more = _load_weight(
                own + (inner * dim + begin), rows, begin + columns, inner, dim, is_even, is_read_once
            )
            values = load_rows(right + begin, is_present, begin + columns, dim, is_even)
            activated = tl.dot(converted(left, values.dtype), values, activated, input_precision="ieee")
            gate = tl.dot(converted(more, values.dtype), values, gate, input_precision="ieee")
        in_range = rows < inner
        if weight_scale is not None:
            own_scale = weight_scale + expert * (2 * inner) + rows
            activated *= tl.load(own_scale, mask=in_range, other=0.0)[:, None]
            gate *= tl.load(own_scale + inner, mask=in_range, other=0.0)[:, None]
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
        values = gated(activated, gate)
        inside = in_range[:, None] & is_present[None, :]
        addresses = inner_out + places[None, :] * inner + rows[:, None]
        if inner_scales is not None:
            values = tl.where(in_range[:, None], values, 0.0)
            scale = tl.maximum(tl.max(tl.abs(values), axis=0), _SMALLEST_MAGNITUDE) / _LARGEST
            tl.store(addresses, (values / scale[None, :]).to(inner_out.dtype.element_ty), mask=inside)
            tl.store(inner_scales + places * num_blocks + block, scale, mask=is_present)
        else:
            tl.store(addresses, operand(values, inner_out.dtype.element_ty), mask=inside)


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
    choices: tl.constexpr,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    scale_columns: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    turns: tl.constexpr,
    is_even: tl.constexpr,
    is_read_once: tl.constexpr,
    prefetched_bytes: tl.constexpr,
    is_dependent: tl.constexpr,
):
    num_blocks: tl.constexpr = (dim + block_rows - 1) // block_rows
    num_scales: tl.constexpr = (inner + scale_columns - 1) // scale_columns
    item, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    # The kernel before has waited for the lists. They are not read from the cache of the multiprocessor, since this
    # may run before that kernel has ended.
    count = tl.load(items + 2 * num_items + item, cache_modifier=".cg")
    if prefetched_bytes and count > 0:
        known = tl.load(items + item, cache_modifier=".cg").to(tl.int64) * dim + block * block_rows
        prefetch(weight + (known + tl.arange(0, block_rows)) * inner, prefetched_bytes)
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
        columns = tl.arange(0, block_columns)
        own = weight + expert * (dim * inner) + (rows[:, None] * inner + columns[None, :])
        right = inner_in + places[None, :] * inner + columns[:, None]
        product = tl.zeros((block_rows, block_tokens), tl.float32)
        for begin in range(0, inner, turns * block_columns):
            for turn in tl.static_range(turns):
                at = begin + turn * block_columns
                left = _load_weight(own + at, rows, at + columns, dim, inner, is_even, is_read_once)
                values = load_rows(right + at, is_present, at + columns, inner, is_even)
                if num_scales > 1:
                    own_scale = inner_scales + places * num_scales + at // scale_columns
                    scale = tl.load(own_scale, mask=is_present, other=0.0)
                    product += tl.dot(left, values) * scale[None, :]
                else:
                    product = tl.dot(converted(left, values.dtype), values, product, input_precision="ieee")
        if inner_scales is not None and num_scales == 1:
            product *= tl.load(inner_scales + places, mask=is_present, other=0.0)[None, :]
        in_range = rows < dim
        if weight_scale is not None:
            product *= tl.load(weight_scale + expert * dim + rows, mask=in_range, other=0.0)[:, None]
        if rank:
            slot = tl.load(slots + own_pairs // choices, mask=is_present, other=0)
            product = added(product, rows, dim, 0, places, slot, expert, coefficients, b, rank, num_experts, dim)
        tl.store(
            out + own_pairs[None, :] * dim + rows[:, None],
            operand(product, out.dtype.element_ty),
            mask=in_range[:, None] & is_present[None, :],
        )


@triton.jit
def _combine(
    rows_in,
    weights,
    out,
    dim: tl.constexpr,
    choices: tl.constexpr,
    columns: tl.constexpr,
    is_dependent: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = places < dim
    if is_dependent:
        wait_for_previous()
        let_next_start()
    total = tl.zeros((columns,), tl.float32)
    for rank in tl.static_range(choices):
        weight = tl.load(weights + token * choices + rank)
        row = tl.load(rows_in + (token * choices + rank) * dim + places, mask=inside, other=0.0)
        # Rows of padding, with a weight of 0, are undefined.
        total += tl.where(weight > 0.0, row.to(tl.float32) * weight, 0.0)
    tl.store(out + token * dim + places, operand(total, out.dtype.element_ty), mask=inside)


@triton.jit
def prefetch(pointers, num_bytes: tl.constexpr) -> None:
    """Loads `num_bytes` from each pointer of a block into L2. Both are multiples of 16; compute capability 9.0."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
