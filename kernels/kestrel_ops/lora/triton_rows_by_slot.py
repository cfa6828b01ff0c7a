"""Plans how the rows of a step meet their adapters, in one launch for all layers.

Rows are listed by slot and cut into items, blocks of rows that share a slot. For decode steps the ranks of all
slots that have rows are listed as well, one list for each kind of layer: then the second product of the low-rank
terms is a product with these ranks as columns, in which the coefficients of other slots are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.lora.reference import BlockLowRank, RowsBySlot
from kestrel_ops.shapes import ModelShape

NUM_KINDS = tl.constexpr(4)
ITEM_SIZE = tl.constexpr(11)
"""Slot, place of the first row in `order`, number of rows; the slot's rank in each kind of layer; the place of its
first rank in each list of ranks."""
RANK_MULTIPLE = tl.constexpr(16)
"""Lists have so many ranks of a slot or a multiple, those beyond the slot's rank with coefficients of 0."""
LIST_MULTIPLE = 64
"""Lists end at a multiple of this, with coefficients of 0."""
_MOST_COMPARED = 8192
"""Pairs of a row and a slot that a program compares at a time."""


class RowGroups(NamedTuple):
    """Lists the rows of one step by slot."""

    order: Tensor
    """[T] int32: the rows of slot 1 in ascending order, those of slot 2 and so on; undefined behind the last."""
    items: Tensor
    """[I, 11] int32, see `ITEM_SIZE`; undefined behind the last."""
    counts: Tensor
    """[5] int32: how many ranks each list has, then the number of items."""
    counters: Tensor
    """[4, I, blocks of ranks] int32: zeros, also after each use."""
    block_rows: int
    """The most rows of an item."""
    places: Tensor | None
    """[4, W] int32, for decode steps: the listed ranks of each kind of layer, (slot - 1) * R + rank, then 0."""
    coefficients: Tensor | None
    """[4, T, W] of the weights' type, for decode steps: coefficients of the listed ranks; 0 but for the own slot's.
    Every layer writes the same places."""

    @property
    def num_items(self) -> int:
        """Returns the most items that there can be."""
        return len(self.items)


def rows_by_slot(
    slots: Tensor,  # [T] int64, contiguous
    ranks: Tensor,  # [4, S] int32, contiguous
    max_rank: int,
    *,
    is_decode: bool,
    dtype: torch.dtype,
    block_rows: int | None = None,  # None: what the number of rows asks for
) -> RowsBySlot:
    """Lists the rows of a step by slot, as `RowGroups`. Same contract as `reference.rows_by_slot`.

    Does not synchronise.
    """
    num_rows, num_slots = len(slots), ranks.shape[1]
    block_rows = block_rows or _block_rows(num_rows)
    assert slots.is_contiguous()
    assert ranks.is_contiguous()
    num_items = min(num_rows, -(-num_rows // block_rows) + num_slots)
    # Each begins at a multiple of 16 bytes, so that kernels are compiled once.
    sizes = [-(-size // 4) * 4 for size in (num_rows, 11 * num_items, 5)]
    order, items, counts = torch.empty(sum(sizes), dtype=torch.int32, device=slots.device).split(sizes)
    num_counters = 4 * num_items * -(-max_rank // 16)
    width = 0
    if is_decode:
        used = min(num_rows, num_slots) * -(-max_rank // 16) * 16
        width = -(-used // LIST_MULTIPLE) * LIST_MULTIPLE
    num_coefficients = 4 * num_rows * width * dtype.itemsize // 4
    zeros = torch.zeros(num_coefficients + 4 * width + num_counters, dtype=torch.int32, device=slots.device)
    coefficients, places, counters = zeros.split((num_coefficients, 4 * width, num_counters))
    block_slots = triton.next_power_of_2(num_slots)
    launcher(_group, (num_slots,))(
        *(slots, ranks, order, items, counts, places if is_decode else None),
        num_rows,
        width,
        num_slots=num_slots,
        max_rank=max_rank,
        block_slots=block_slots,
        block_rank=triton.next_power_of_2(max_rank),
        block_rows=block_rows,
        block=max(32, min(1024, _MOST_COMPARED // block_slots, triton.next_power_of_2(num_rows))),
        num_warps=4,
    )
    groups = RowGroups(order, items[: 11 * num_items].view(num_items, 11), counts, counters, block_rows, None, None)
    if is_decode:
        groups = groups._replace(
            places=places.view(4, width), coefficients=coefficients.view(dtype).view(4, num_rows, width)
        )
    return RowsBySlot(slots, groups)


def with_groups(low_rank: BlockLowRank, *, is_decode: bool) -> BlockLowRank:
    """Returns the same terms with `RowGroups`, which the reference does not make."""
    if isinstance(low_rank.rows.groups, RowGroups):
        return low_rank
    num_slots, max_rank, _ = low_rank.up[0].a.shape
    slots, dtype = low_rank.rows.slots, low_rank.up[0].a.dtype
    ranks = torch.full((4, num_slots), max_rank, dtype=torch.int32, device=slots.device)
    return low_rank._replace(rows=rows_by_slot(slots, ranks, max_rank, is_decode=is_decode, dtype=dtype))


def normed_operands(low_rank: BlockLowRank | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Weight and bias of the norm, and where the rows go that have both, for a kernel that normalises."""
    if low_rank is None:
        return None, None, None
    assert low_rank.normed.is_contiguous()
    return low_rank.norm_weight, low_rank.norm_bias, low_rank.normed


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model)


def _block_rows(num_rows: int) -> int:
    """Rows of an item: few where there are few, so that their slots make enough programs."""
    return 16 if num_rows <= 512 else 32 if num_rows <= 2048 else 64


@triton.jit(do_not_specialize=["num_rows"])
def _group(
    slots,
    ranks,
    order,
    items,
    counted,
    listed,
    num_rows,
    list_width,
    num_slots: tl.constexpr,
    max_rank: tl.constexpr,
    block_slots: tl.constexpr,
    block_rank: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Runs one program for each slot: it counts the rows of all slots and lists its own."""
    own = tl.program_id(0) + 1
    numbers = tl.arange(0, block_slots) + 1
    counts = tl.zeros((block_slots,), tl.int32)
    for begin in range(0, num_rows, block):
        rows = begin + tl.arange(0, block)
        found = tl.load(slots + rows, mask=rows < num_rows, other=0).to(tl.int32)
        counts += tl.sum((found[None, :] == numbers[:, None]).to(tl.int32), axis=1)
    blocks = (counts + block_rows - 1) // block_rows
    smaller = (numbers < own).to(tl.int32)
    first = tl.sum(counts * smaller, axis=0)
    count = tl.sum(tl.where(numbers == own, counts, 0), axis=0)
    first_item = tl.sum(blocks * smaller, axis=0)
    num_items = tl.where(count > 0, (count + block_rows - 1) // block_rows, 0)
    if own == 1:
        tl.store(counted + NUM_KINDS, tl.sum(blocks, axis=0))
    for kind in tl.static_range(NUM_KINDS):
        every = tl.load(ranks + kind * num_slots + numbers - 1, mask=numbers <= num_slots, other=0)
        padded = tl.where(counts > 0, (every + RANK_MULTIPLE - 1) // RANK_MULTIPLE * RANK_MULTIPLE, 0)
        rank = tl.sum(tl.where((numbers == own) & (counts > 0), every, 0), axis=0)
        start = tl.sum(padded * smaller, axis=0)
        if own == 1:
            tl.store(counted + kind, tl.sum(padded, axis=0))
        for item in range(first_item, first_item + num_items):
            tl.store(items + item * ITEM_SIZE + 3 + kind, rank)
            tl.store(items + item * ITEM_SIZE + 3 + NUM_KINDS + kind, start)
        if listed is not None:
            each = tl.arange(0, block_rank)
            places = listed + kind * list_width + start + each
            tl.store(places, (own - 1) * max_rank + each, mask=each < rank)
    for item in range(first_item, first_item + num_items):
        begin = (item - first_item) * block_rows
        tl.store(items + item * ITEM_SIZE, own)
        tl.store(items + item * ITEM_SIZE + 1, first + begin)
        tl.store(items + item * ITEM_SIZE + 2, tl.minimum(count - begin, block_rows))
    if count > 0:
        for begin in range(0, num_rows, block):
            rows = begin + tl.arange(0, block)
            found = tl.load(slots + rows, mask=rows < num_rows, other=0).to(tl.int32)
            is_own = (found == own).to(tl.int32)
            at = first + tl.cumsum(is_own, axis=0) - 1
            tl.store(order + at, rows, mask=is_own != 0)
            first += tl.sum(is_own, axis=0)
