"""Computes the low-rank terms of the experts' products: each pair times the matrices of its slot and expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.experts.triton_routing import Routing
from kestrel_ops.lora.reference import LowRank


class Addition(NamedTuple):
    """Describes the low-rank term of a product: for each place in the lists, coefficients of the rows of its
    slot."""

    coefficients: Tensor
    """[pairs, R] float32; undefined where the slot is 0."""
    b: Tensor
    """[S, E, R, out]."""
    slots: Tensor
    """[T] int64: the slot of each token, 0 for none."""


def addition_to_rows(
    routing: Routing,
    rows: Tensor,  # [T, width] or, by place in the lists, [pairs, width]
    scales: Tensor | None,  # [pairs, blocks] float32 of rows by place
    scale_columns: int,
    weights: LowRank,
    slots: Tensor,
    block_tokens: int,
    *,
    is_by_place: bool,
    is_dependent: bool,
) -> Addition:
    """Returns the product of each pair's row with the first matrices of its slot and expert."""
    _, num_experts, rank, width = weights.a.shape
    coefficients = torch.empty(len(routing.pairs), rank, dtype=torch.float32, device=rows.device)
    num_items = routing.items.shape[1]
    launch(
        _project,
        (num_items, block_tokens),
        *(rows, scales, weights.a, slots, routing.pairs, routing.items, coefficients, num_items),
        width=width,
        choices=routing.weights.shape[1],
        rank=rank,
        num_experts=num_experts,
        scale_columns=scale_columns,
        is_by_place=is_by_place,
        block_rank=triton.next_power_of_2(rank),
        block_columns=min(512, triton.next_power_of_2(width)),
        is_dependent=is_dependent,
        num_warps=4,
        num_stages=2,
    )
    return Addition(coefficients, weights.b, slots)


def operands(addition: Addition | None) -> tuple[Tensor | None, ...]:
    """Returns the arguments of a kernel."""
    return (None, None, None) if addition is None else tuple(addition)


@triton.jit
def added(
    product,
    rows,
    num_rows: tl.constexpr,
    first_row,
    places,
    slot,
    expert,
    coefficients,
    b,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Returns the product and what adapters add to it. `b` has `width` columns, of which ours start at
    `first_row`."""
    has_slot = slot > 0
    matrix = b + ((slot - 1) * num_experts + expert) * (rank * width)
    inside = has_slot[None, :] & (rows < num_rows)[:, None]
    for each in range(rank):
        factor = tl.load(coefficients + places * rank + each, mask=has_slot, other=0.0)
        column = tl.load(matrix[None, :] + (each * width + first_row) + rows[:, None], mask=inside, other=0.0)
        product += column.to(tl.float32) * factor[None, :]
    return product


@triton.jit(do_not_specialize=["num_items"])
def _project(
    rows_in,
    row_scales,
    a,
    slots,
    pairs,
    items,
    coefficients,
    num_items,
    width: tl.constexpr,
    choices: tl.constexpr,
    rank: tl.constexpr,
    num_experts: tl.constexpr,
    scale_columns: tl.constexpr,
    is_by_place: tl.constexpr,
    block_rank: tl.constexpr,
    block_columns: tl.constexpr,
    is_dependent: tl.constexpr,
):
    num_scales: tl.constexpr = (width + scale_columns - 1) // scale_columns
    item = tl.program_id(0)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    if tl.program_id(1) < tl.load(items + 2 * num_items + item):
        place = (tl.load(items + num_items + item) + tl.program_id(1)).to(tl.int64)
        token = (tl.load(pairs + place) // choices).to(tl.int64)
        slot = tl.load(slots + token)
        if slot > 0:
            expert = tl.load(items + item)
            ranks = tl.arange(0, block_rank)
            matrix = a + ((slot - 1) * num_experts + expert) * (rank * width)
            own = rows_in + (place if is_by_place else token) * width
            total = tl.zeros((block_rank,), tl.float32)
            for begin in range(0, width, block_columns):
                columns = begin + tl.arange(0, block_columns)
                inside = columns < width
                row = tl.load(own + columns, mask=inside, other=0.0).to(tl.float32)
                if row_scales is not None:
                    row *= tl.load(
                        row_scales + place * num_scales + columns // scale_columns, mask=inside, other=0.0
                    )
                tile = tl.load(
                    matrix + ranks[:, None] * width + columns[None, :],
                    mask=(ranks < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                total += tl.sum(tile.to(tl.float32) * row[None, :], axis=1)
            tl.store(coefficients + place * rank + ranks, total, mask=ranks < rank)
