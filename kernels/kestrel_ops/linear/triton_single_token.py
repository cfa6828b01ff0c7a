"""Computes the products of a decoder block for one token. The weight is loaded from memory directly into registers.

Tensor cores need the weight in shared memory, converted there, and at least sixteen tokens. Here a program loads a
tile of a few rows, before it does anything else and even before it waits for the previous kernel. It multiplies and
adds in float32. A second token would double this arithmetic, which already takes as long as loading the weight.

A tile is [rows, turns, columns of a turn]. A turn is the data that one warp loads at once, 16 bytes per lane. So
each warp has its own rows, and sums stay within a warp.

If a row is wider than a tile, one program reads it tile by tile, and loads the next tile while it multiplies one.
One program computes a sum in one order, so the sum is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import (
    has_dependent_launch,
    launch,
    let_next_start,
    wait_for_previous,
)
from kestrel_ops.linear.triton_small_batch import operand

WIDEST_TILE = 2048
"""The most columns of the weight in a tile, a power of two. With more columns a program has too few rows."""
_TURN_BYTES = 512  # 32 lanes, 16 bytes each


@dataclass(frozen=True, slots=True)
class SingleTokenConfig:
    """Divides a product [1, K] @ [N, K].T into programs of one tile each."""

    block_n: int
    """Rows of the weight in a tile."""
    num_warps: int
    dependent_launch: bool = True
    """True if it starts before the previous kernel has ended, on devices that support it."""
    tile_bytes: int = 2048
    """Bytes of a row in a tile if rows are read tile by tile, with two tiles in registers; a power of two."""


def expand_one(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    row_sums: Tensor,
    bias: Tensor,
    epsilon: float,
    num_plain: int,
    plain_out: Tensor,
    activated_out: Tensor,
    config: SingleTokenConfig,
) -> None:
    """Computes `decode_expand` of one token, no wider than `WIDEST_TILE`."""
    num_tokens, width = hidden.shape
    num_rows = len(weight)
    assert num_tokens == 1
    assert width <= WIDEST_TILE
    num_turns, turn = _turns(width, weight)
    launch(
        _expand,
        (triton.cdiv(num_rows, config.block_n),),
        hidden,
        delta,
        weight,
        weight_scale,
        row_sums,
        bias,
        plain_out,
        activated_out,
        num_rows,
        epsilon,
        num_plain=num_plain,
        width=width,
        block_n=config.block_n,
        num_turns=num_turns,
        turn=turn,
        is_even=num_rows % config.block_n == 0 and width == num_turns * turn,
        is_dependent=config.dependent_launch and has_dependent_launch(weight),
        num_warps=config.num_warps,
        num_stages=1,
    )


def contract_one(
    activations: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor,
    hidden: Tensor,
    delta: Tensor | None,
    total: Tensor | None,
    config: SingleTokenConfig,
) -> None:
    """Computes `decode_contract` of one token."""
    num_tokens, width = activations.shape
    num_rows = len(weight)
    assert num_tokens == 1
    num_turns, turn = _turns(min(width, config.tile_bytes // weight.itemsize), weight)
    num_tiles = triton.cdiv(width, num_turns * turn)
    launch(
        _contract,
        (triton.cdiv(num_rows, config.block_n),),
        activations,
        weight,
        weight_scale,
        bias,
        hidden,
        delta,
        total,
        num_rows,
        width=width,
        block_n=config.block_n,
        num_tiles=num_tiles,
        num_turns=num_turns,
        turn=turn,
        is_even=num_rows % config.block_n == 0 and width == num_tiles * num_turns * turn,
        is_dependent=config.dependent_launch and has_dependent_launch(weight),
        num_warps=config.num_warps,
        num_stages=1,
    )


def _turns(num_columns: int, weight: Tensor) -> tuple[int, int]:
    """Returns the number of turns of a tile and the columns of a turn, both powers of two."""
    block_k = 1 << (num_columns - 1).bit_length()
    turn = min(_TURN_BYTES // weight.itemsize, block_k)
    return block_k // turn, turn


@triton.jit
def _load_tile(pointer, rows, columns, num_rows, width: tl.constexpr, is_even: tl.constexpr):
    """Returns a tile of the weight, with 0 beyond its edges. Each byte is used once per step."""
    addresses = pointer + rows[:, None, None].to(tl.int64) * width + columns[None, :, :]
    if is_even:
        return tl.load(addresses, eviction_policy="evict_first")
    inside = (rows < num_rows)[:, None, None] & (columns < width)[None, :, :]
    return tl.load(addresses, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _columns(begin, num_turns: tl.constexpr, turn: tl.constexpr):
    return begin + tl.arange(0, num_turns)[:, None] * turn + tl.arange(0, turn)[None, :]


@triton.jit
def _multiply(tile, token):
    """Returns a sum for each row."""
    products = tile.to(tl.float32) * token.to(tl.float32)[None, :, :]
    return tl.sum(tl.sum(products, axis=1), axis=1)


@triton.jit
def _add_pairs(left, left_more, right, right_more):
    return left + right, left_more + right_more


@triton.jit
def _expand(
    hidden,
    delta,
    weight,
    weight_scale,
    row_sums,
    bias,
    plain_out,
    activated_out,
    num_rows,
    epsilon,
    num_plain: tl.constexpr,
    width: tl.constexpr,
    block_n: tl.constexpr,
    num_turns: tl.constexpr,
    turn: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    first_row = tl.program_id(0) * block_n
    rows = first_row + tl.arange(0, block_n)
    columns = _columns(0, num_turns, turn)
    in_range = rows < num_rows
    tile = _load_tile(weight, rows, columns, num_rows, width, is_even)
    shift = tl.load(row_sums + rows, mask=in_range, other=0.0)
    offset = tl.load(bias + rows, mask=in_range, other=0.0)
    scale = 1.0
    if weight_scale is not None:
        scale = tl.load(weight_scale + rows, mask=in_range, other=0.0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    token = tl.load(hidden + columns, mask=columns < width, other=0.0)
    # Loaded once more with one thread per value: in the layout of the product every warp has all values.
    places = tl.arange(0, num_turns * turn)
    values = tl.load(hidden + places, mask=places < width, other=0.0)
    if delta is not None:
        token += tl.load(delta + columns, mask=columns < width, other=0.0).to(tl.float32)
        values += tl.load(delta + places, mask=places < width, other=0.0).to(tl.float32)
    total, squares = tl.reduce((values, values * values), 0, _add_pairs)
    mean = total / width
    variance = tl.maximum(squares / width - mean * mean, 0.0)
    product = _multiply(tile, token) * scale
    product = (product - shift * mean) * tl.rsqrt(variance + epsilon) + offset
    if first_row < num_plain:
        is_plain = in_range & (rows < num_plain)
        tl.store(plain_out + rows, operand(product, plain_out.dtype.element_ty), mask=is_plain)
    if first_row + block_n > num_plain:
        bent = 1.5957691216057308 * (product + 0.044715 * product * product * product)
        activated = operand(product * tl.sigmoid(bent), activated_out.dtype.element_ty)
        tl.store(activated_out + (rows - num_plain), activated, mask=in_range & (rows >= num_plain))


@triton.jit
def _contract(
    activations,
    weight,
    weight_scale,
    bias,
    hidden,
    delta,
    total,
    num_rows,
    width: tl.constexpr,
    block_n: tl.constexpr,
    num_tiles: tl.constexpr,
    num_turns: tl.constexpr,
    turn: tl.constexpr,
    is_even: tl.constexpr,
    is_dependent: tl.constexpr,
):
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    in_range = rows < num_rows
    columns = _columns(0, num_turns, turn)
    tile = _load_tile(weight, rows, columns, num_rows, width, is_even)
    if num_tiles > 1:
        next_columns = _columns(num_turns * turn, num_turns, turn)
        next_tile = _load_tile(weight, rows, next_columns, num_rows, width, is_even)
    offset = tl.load(bias + rows, mask=in_range, other=0.0)
    scale = 1.0
    if weight_scale is not None:
        scale = tl.load(weight_scale + rows, mask=in_range, other=0.0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    token = tl.load(activations + columns, mask=columns < width, other=0.0)
    if num_tiles > 1:
        next_token = tl.load(activations + next_columns, mask=next_columns < width, other=0.0)
    before = tl.load(hidden + rows, mask=in_range, other=0.0)
    if delta is not None:
        before += tl.load(delta + rows, mask=in_range, other=0.0).to(tl.float32)
    sums = tl.zeros((block_n, turn), tl.float32)
    for each in tl.static_range(num_tiles):
        sums += tl.sum(tile.to(tl.float32) * token.to(tl.float32)[None, :, :], axis=1)
        if each + 1 < num_tiles:
            tile, token = next_tile, next_token
        if each + 2 < num_tiles:
            next_columns = _columns((each + 2) * num_turns * turn, num_turns, turn)
            next_tile = _load_tile(weight, rows, next_columns, num_rows, width, is_even)
            next_token = tl.load(activations + next_columns, mask=next_columns < width, other=0.0)
    product = tl.sum(sums, axis=1) * scale + offset
    if total is not None:
        tl.store(total + rows, before + product, mask=in_range)
    else:
        tl.debug_barrier()  # `hidden` is updated in place, and many threads hold the same row
        tl.store(hidden + rows, before + product, mask=in_range)
