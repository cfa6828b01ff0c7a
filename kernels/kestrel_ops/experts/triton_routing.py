"""Lists of tokens by expert, made on the device, in blocks for the products.

A pair is a token and one of its choices: token * choices + rank, rank 0 being the largest logit. Lists hold the
pairs in the order of their experts and, within an expert, of their tokens, so that all sums have one order. An item
is a block of an expert's list. Nothing is sorted, no sum is atomic and the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.norms.reference import LARGEST_FLOAT8
from kestrel_ops.shapes import FLOAT8

_TOKENS_OF_A_PROGRAM = 64
_COUNTS_AT_ONCE = 64  # programs whose counts are added up together
_LEAST_ITEMS_BLOCK = 512  # more than are used, for few numbers of tokens, so that fewer kernels are compiled
_MOST_QUANTISED_HERE = 1024  # tokens; for more, a kernel of fewer warps is worth its launch
_QUANTISED_TILE = 8192  # values of a program
_SMALLEST_MAGNITUDE = tl.constexpr(1e-12)  # the scale of a row of zeros must not be 0
_LARGEST = tl.constexpr(LARGEST_FLOAT8)
_LOWEST_LOGIT = tl.constexpr(-3.4028234663852886e38)


class Routing(NamedTuple):
    """Pairs by expert, and the rows that the experts read."""

    pairs: Tensor
    """[T * choices] int32: pairs in the order of their experts."""
    items: Tensor
    """[3, most items] int32: expert, first place in `pairs`, number of pairs; items that are not used have no
    pairs."""
    weights: Tensor
    """[T, choices] float32: the softmax over the chosen logits."""
    rows: Tensor
    """[T, dim]: the tokens, in float8 if they were to be quantised."""
    row_scales: Tensor | None
    """[T] float32 of quantised rows."""


def route(
    hidden: Tensor,  # [T, dim], contiguous
    logits: Tensor,  # [T, E], contiguous
    choices: int,
    block_tokens: int,  # the most pairs of an item
    positions: Tensor | None = None,  # [T]: tokens at negative ones are padding
    *,
    quantises: bool,
    is_dependent: bool,
) -> Routing:
    """Chooses the experts of each token, lists tokens by expert, and quantises the tokens if wanted.

    Padding is in no list and has weights of 0. Places in `pairs` behind all lists are then undefined.
    """
    num_tokens, dim = hidden.shape
    num_experts = logits.shape[1]
    num_blocks = triton.cdiv(num_tokens, _TOKENS_OF_A_PROGRAM)
    device = hidden.device
    rows, row_scales = hidden, None
    quantises_here = quantises and num_tokens <= _MOST_QUANTISED_HERE
    if quantises_here:
        rows = torch.empty(num_tokens, dim, dtype=FLOAT8, device=device)
        row_scales = torch.empty(num_tokens, dtype=torch.float32, device=device)
    elif quantises:
        rows, row_scales = quantised(hidden, is_dependent=is_dependent)
    routing = Routing(
        pairs=torch.empty(num_tokens * choices, dtype=torch.int32, device=device),
        items=torch.empty(
            3, most_items(num_tokens, num_experts, choices, block_tokens), dtype=torch.int32, device=device
        ),
        weights=torch.empty(num_tokens, choices, dtype=torch.float32, device=device),
        rows=rows,
        row_scales=row_scales,
    )
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device) if num_blocks > 1 else None
    sizes = {
        "choices": choices,
        "num_experts": num_experts,
        "block_tokens": block_tokens,
        "tokens_block": min(_TOKENS_OF_A_PROGRAM, triton.next_power_of_2(num_tokens)),
        "experts_block": triton.next_power_of_2(num_experts),
        "items_block": max(_LEAST_ITEMS_BLOCK, triton.next_power_of_2(routing.items.shape[1])),
        "is_dependent": is_dependent,
        "num_warps": _warps_for(num_tokens),
        "num_stages": 1,
    }
    launch(
        _choose,
        (num_blocks + (num_tokens if quantises_here else 0),),
        *(logits, hidden, positions),
        *(routing.pairs, routing.items, routing.weights),
        *((routing.rows, routing.row_scales) if quantises_here else (None, None)),
        counts,
        *(num_tokens, num_blocks, routing.items.shape[1]),
        dim=dim,
        columns=triton.next_power_of_2(dim),
        **sizes,
    )
    if counts is not None:
        launch(
            _list,
            (num_blocks,),
            *(logits, positions, routing.pairs, routing.items, counts),
            *(num_tokens, num_blocks, routing.items.shape[1]),
            counts_block=_COUNTS_AT_ONCE,
            **sizes,
        )
    return routing


def _warps_for(num_tokens: int) -> int:
    return 16 if num_tokens > 16 else 4


def quantised(rows: Tensor, *, is_dependent: bool) -> tuple[Tensor, Tensor]:
    """Rows [T, width] in float8, and the scale of each, float32 [T]."""
    count, width = rows.shape
    out = torch.empty(count, width, dtype=FLOAT8, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    columns = triton.next_power_of_2(width)
    block = max(1, min(4, _QUANTISED_TILE // columns))
    launch(
        _quantise,
        (triton.cdiv(count, block),),
        *(rows, out, scales, count),
        width=width,
        columns=columns,
        block=block,
        is_dependent=is_dependent,
        num_warps=4,
        num_stages=1,
    )
    return out, scales


def most_items(num_tokens: int, num_experts: int, choices: int, block_tokens: int) -> int:
    """Returns the most items that any routing of so many tokens needs: one of each expert, or of each pair if
    those are fewer, and one more for each full block."""
    num_pairs = num_tokens * choices
    return min(num_experts, num_pairs) + num_pairs // block_tokens


@triton.jit
def ordered_keys(values, experts, last: tl.constexpr, is_wide: tl.constexpr) -> tl.tensor:
    """Integers in the order of float32 values, of which none is equal to another: the expert, up to `last`, is in
    the last bits, the lower one first. 32 bits hold values that came from 16, other values need 64."""
    bits = values.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if is_wide:
        keys = keys.to(tl.int64) << 32
    return (keys & -(last + 1)) | (last - experts)


@triton.jit
def _are_present(positions, tokens, num_tokens):
    """Returns which tokens are no padding."""
    are_there = tokens < num_tokens
    if positions is not None:
        are_there = are_there & (tl.load(positions + tokens, mask=are_there, other=-1) >= 0)
    return are_there


@triton.jit
def _ranks(
    logits, tokens, experts, num_tokens, num_experts: tl.constexpr, last: tl.constexpr, choices: tl.constexpr
):
    """Returns the place of each expert among a token's choices, `choices` where it is none of them, and the
    logits."""
    is_wide: tl.constexpr = logits.dtype.element_ty == tl.float32
    lowest: tl.constexpr = -(2**63) if is_wide else -(2**31)
    is_expert = (experts < num_experts)[None, :]
    addresses = logits + tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    values = tl.load(addresses, mask=(tokens < num_tokens)[:, None] & is_expert, other=0.0).to(tl.float32)
    values = tl.where(values > _LOWEST_LOGIT, values, _LOWEST_LOGIT)  # also for what is no number
    keys = tl.where(is_expert, ordered_keys(values, experts[None, :], last, is_wide), lowest)
    ranks = tl.full(values.shape, choices, tl.int32)
    for rank in range(choices):
        is_best = keys == tl.max(keys, axis=1)[:, None]
        ranks = tl.where(is_best, rank, ranks)
        keys = tl.where(is_best, lowest, keys)
    return ranks, values


@triton.jit
def _store_lists(
    pairs,
    items,
    ranks,
    is_chosen,
    tokens,
    experts,
    totals,
    before,
    num_tokens,
    num_items,
    writes_items,
    choices: tl.constexpr,
    block_tokens: tl.constexpr,
    items_block: tl.constexpr,
):
    """Put a block of tokens into the lists: `before` of each expert's `totals` are of earlier blocks."""
    starts = tl.cumsum(totals, axis=0) - totals
    places = (starts + before)[None, :] + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(pairs + places, tokens[:, None] * choices + ranks, mask=is_chosen)
    if writes_items:
        num_blocks = (totals + block_tokens - 1) // block_tokens
        ends = tl.cumsum(num_blocks, axis=0)
        every = tl.arange(0, items_block)
        unused = (every >= tl.sum(num_blocks, axis=0)) & (every < num_items)
        tl.store(items + 2 * num_items + every, tl.zeros_like(every), mask=unused)
        for block in range(tl.max(num_blocks, axis=0)):
            exists = block < num_blocks
            item = ends - num_blocks + block
            tl.store(items + item, experts, mask=exists)
            tl.store(items + num_items + item, starts + block * block_tokens, mask=exists)
            tl.store(
                items + 2 * num_items + item, tl.minimum(totals - block * block_tokens, block_tokens), mask=exists
            )


@triton.jit
def quantise(hidden, quantised, row_scales, token, dim: tl.constexpr, columns: tl.constexpr) -> None:
    """One token in float8, as `quantise_rows` of the reference."""
    places = tl.arange(0, columns)
    inside = places < dim
    start = token.to(tl.int64) * dim
    row = tl.load(hidden + start + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(row), axis=0), _SMALLEST_MAGNITUDE) / _LARGEST
    tl.store(quantised + start + places, (row / scale).to(quantised.dtype.element_ty), mask=inside)
    tl.store(row_scales + token, scale)


@triton.jit(do_not_specialize=["count"])
def _quantise(
    rows_in,
    rows_out,
    scales,
    count,
    width: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    is_dependent: tl.constexpr,
):
    if is_dependent:
        wait_for_previous()
        let_next_start()
    rows, places = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, columns)
    addresses = rows.to(tl.int64)[:, None] * width + places[None, :]
    inside = (rows < count)[:, None] & (places < width)[None, :]
    values = tl.load(rows_in + addresses, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), _SMALLEST_MAGNITUDE) / _LARGEST
    tl.store(rows_out + addresses, (values / scale[:, None]).to(rows_out.dtype.element_ty), mask=inside)
    tl.store(scales + rows, scale, mask=rows < count)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_items"])
def _choose(
    logits,
    hidden,
    positions,
    pairs,
    items,
    weights,
    quantised,
    row_scales,
    counts,
    num_tokens,
    num_blocks,
    num_items,
    dim: tl.constexpr,
    columns: tl.constexpr,
    choices: tl.constexpr,
    num_experts: tl.constexpr,
    block_tokens: tl.constexpr,
    tokens_block: tl.constexpr,
    experts_block: tl.constexpr,
    items_block: tl.constexpr,
    is_dependent: tl.constexpr,
):
    program = tl.program_id(0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    if program < num_blocks:
        tokens = program * tokens_block + tl.arange(0, tokens_block)
        experts = tl.arange(0, experts_block)
        ranks, values = _ranks(logits, tokens, experts, num_tokens, num_experts, experts_block - 1, choices)
        is_chosen = (ranks < choices) & _are_present(positions, tokens, num_tokens)[:, None]
        highest = tl.max(tl.where(ranks < choices, values, float("-inf")), axis=1)[:, None]
        shares = tl.where(ranks < choices, tl.exp(tl.where(ranks < choices, values, highest) - highest), 0.0)
        shares = shares / tl.sum(shares, axis=1)[:, None]
        places = tokens[:, None] * choices + ranks
        shares = tl.where(is_chosen, shares, 0.0)
        tl.store(weights + places, shares, mask=(ranks < choices) & (tokens < num_tokens)[:, None])
        own = tl.sum(is_chosen.to(tl.int32), axis=0)
        if counts is not None:
            tl.store(counts + program * num_experts + experts, own, mask=experts < num_experts)
        else:
            before = tl.zeros_like(own)
            _store_lists(
                pairs, items, ranks, is_chosen, tokens, experts, own, before, num_tokens, num_items,
                True, choices, block_tokens, items_block,
            )  # fmt: skip
    elif quantised is not None:
        quantise(hidden, quantised, row_scales, program - num_blocks, dim, columns)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_items"])
def _list(
    logits,
    positions,
    pairs,
    items,
    counts,
    num_tokens,
    num_blocks,
    num_items,
    counts_block: tl.constexpr,
    choices: tl.constexpr,
    num_experts: tl.constexpr,
    block_tokens: tl.constexpr,
    tokens_block: tl.constexpr,
    experts_block: tl.constexpr,
    items_block: tl.constexpr,
    is_dependent: tl.constexpr,
):
    program = tl.program_id(0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    tokens = program * tokens_block + tl.arange(0, tokens_block)
    experts = tl.arange(0, experts_block)
    totals = tl.zeros((experts_block,), tl.int32)
    before = tl.zeros((experts_block,), tl.int32)
    for first in range(0, num_blocks, counts_block):
        blocks = first + tl.arange(0, counts_block)
        inside = (blocks < num_blocks)[:, None] & (experts < num_experts)[None, :]
        own = tl.load(counts + blocks[:, None] * num_experts + experts[None, :], mask=inside, other=0)
        totals += tl.sum(own, axis=0)
        before += tl.sum(tl.where((blocks < program)[:, None], own, 0), axis=0)
    ranks, _ = _ranks(logits, tokens, experts, num_tokens, num_experts, experts_block - 1, choices)
    is_chosen = (ranks < choices) & _are_present(positions, tokens, num_tokens)[:, None]
    _store_lists(
        pairs, items, ranks, is_chosen, tokens, experts, totals, before, num_tokens, num_items,
        program == 0, choices, block_tokens, items_block,
    )  # fmt: skip
