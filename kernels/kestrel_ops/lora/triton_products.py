"""Computes the two products of low-rank terms: rows times A gives coefficients, coefficients times B are added to
outputs.

Programs take items of `RowGroups`: rows that share a slot. Programs without an item, and those of ranks beyond the
rank of an item's adapter, end at once. A long sum of the first product is divided into parts; the last program of
a sum to end adds them in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_dependent_launch import launch, let_next_start, wait_for_previous
from kestrel_ops.lora.reference import BlockLowRank, LowRank, RowsBySlot
from kestrel_ops.lora.triton_rows_by_slot import ITEM_SIZE, NUM_KINDS, RowGroups

_MOST_LAYERS = 2


class Shrink(NamedTuple):
    """Divides the first product into programs."""

    part_columns: int
    """Columns of a part of the sum, a multiple of `block_k`."""
    block_k: int
    most_ranks: int
    """Ranks of a program, a power of two."""
    num_warps: int
    num_stages: int


class Expand(NamedTuple):
    """Divides the second product into programs."""

    block_columns: int
    num_warps: int


def groups_of(grouped: RowsBySlot) -> RowGroups:
    """Returns the lists that Triton's `rows_by_slot` has made."""
    assert isinstance(grouped.groups, RowGroups), "terms of Triton need rows_by_slot of Triton"
    return grouped.groups


def shrink(
    sources: tuple[Tensor, ...],  # [T, in] of one floating type for each layer, rows may be strided
    layers: tuple[LowRank, ...],
    grouped: RowsBySlot,
    block: BlockLowRank | None = None,  # where the first layer may read the block's input
    *,
    scale: Tensor | None = None,  # [T, 1] float32: sources * scale is meant
    is_dependent: bool = False,
    config: Shrink | None = None,
) -> Tensor:  # [layers, T, R] of the weights' type, or the groups's for decode steps
    """Returns the coefficients of one or two layers. Undefined where a row has no adapter and beyond the
    adapter's rank."""
    assert len(sources) == len(layers) <= _MOST_LAYERS
    groups = groups_of(grouped)
    num_rows, dtype = len(grouped.slots), layers[0].a.dtype
    max_rank, both = layers[0].a.shape[1], len(layers) > 1
    config = config or shrink_config(num_rows, dtype.itemsize)
    widths = [layer.a.shape[2] for layer in layers]
    num_parts = [triton.cdiv(width, config.part_columns) for width in widths]
    block_rank = _block_rank(max_rank, config.most_ranks)
    device = grouped.slots.device
    parts = torch.empty(
        sum(num_parts), groups.num_items * groups.block_rows, max_rank, dtype=torch.float32, device=device
    )
    if groups.coefficients is None:
        coefficients = torch.empty(len(layers), num_rows, max_rank, dtype=dtype, device=device)
        outs = [coefficients[place] for place in range(len(layers))]
    else:
        coefficients = groups.coefficients
        outs = [coefficients[layer.kind] for layer in layers]
    assert all(source.stride(1) == 1 for source in sources)
    assert scale is None or scale.is_contiguous()
    normed, flags = sources[0], None  # without flags it is not read
    if block is not None and block.normed.shape[1] == widths[0]:
        normed, flags = block.normed, block.reads_block_input.view(torch.uint8)
        assert normed.is_contiguous()
    launch(
        _shrink,
        (groups.num_items, sum(num_parts), triton.cdiv(max_rank, block_rank)),
        *(sources[0], sources[1] if both else None, scale),
        *(normed, flags),
        *(layers[0].a, layers[1].a if both else None),
        *(groups.order, groups.items, groups.counts, groups.counters, parts),
        *(outs[0], outs[1] if both else None),
        groups.num_items,
        sources[0].stride(0),
        sources[1].stride(0) if both else 0,
        outs[0].stride(0),
        max_rank=max_rank,
        width_0=widths[0],
        width_1=widths[-1],
        parts_0=num_parts[0],
        parts_1=num_parts[-1],
        part_columns=config.part_columns,
        kind_0=layers[0].kind,
        kind_1=layers[-1].kind,
        block_rows=groups.block_rows,
        block_rank=block_rank,
        block_k=config.block_k,
        is_spread=groups.coefficients is not None,
        is_dependent=is_dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return coefficients


def shrink_config(num_rows: int, itemsize: int) -> Shrink:
    """Returns the launch configuration for a number of rows and the size of a weight."""
    if num_rows <= 512:
        return Shrink(512, 128, 32, num_warps=4, num_stages=4)
    part_columns = 1024 if num_rows <= 2048 else 2048
    return Shrink(part_columns, 64 if itemsize < 4 else 32, 32, num_warps=4, num_stages=4)


def expand_add(
    out: Tensor,  # [T, N], rows may be strided, changed in place
    coefficients: Tensor,  # [layers, T, R]
    layers: tuple[LowRank, ...],
    grouped: RowsBySlot,
    *,
    adds_both: bool,  # whether both layers add to the same columns, or to one after the other
    config: Expand | None = None,
) -> None:
    """Adds coefficients times the second matrices of each row's slot."""
    assert out.stride(1) == 1
    groups = groups_of(grouped)
    block_columns, num_warps = config or Expand(128, num_warps=4)
    max_rank, both = layers[0].b.shape[1], len(layers) > 1
    widths = [layer.b.shape[2] for layer in layers]
    blocks = [triton.cdiv(width, block_columns) for width in widths]
    launcher(_expand_add, (blocks[0] if adds_both else sum(blocks), groups.num_items))(
        out,
        *(coefficients[0], coefficients[1] if both else None),
        *(layers[0].b, layers[1].b if both else None),
        *(groups.order, groups.items, groups.counts),
        out.stride(0),
        max_rank=max_rank,
        width_0=widths[0],
        width_1=widths[-1],
        blocks_0=blocks[0],
        kind_0=layers[0].kind,
        kind_1=layers[-1].kind,
        adds_both=adds_both and both,
        block_rows=groups.block_rows,
        block_columns=block_columns,
        block_rank=_block_rank(max_rank, 64),
        num_warps=num_warps,
    )


class Terms(NamedTuple):
    """Holds the terms that a product of a decode step adds in its epilogue, as its kernel takes them."""

    coefficients_0: Tensor | None
    coefficients_1: Tensor | None
    places_0: Tensor | None
    places_1: Tensor | None
    b_0: Tensor | None
    b_1: Tensor | None
    counts: Tensor | None
    stride: int
    """Between tokens of the coefficients."""

    @classmethod
    def of(cls, layers: tuple[LowRank, ...], grouped: RowsBySlot) -> tuple[Terms, dict[str, int]]:
        """Returns the arguments of a kernel, and its constants."""
        groups = groups_of(grouped)
        assert groups.coefficients is not None, "made for a decode step"
        assert groups.places is not None
        first, second = layers[0], layers[1] if len(layers) > 1 else None
        terms = cls(
            groups.coefficients[first.kind],
            None if second is None else groups.coefficients[second.kind],
            groups.places[first.kind],
            None if second is None else groups.places[second.kind],
            first.b,
            None if second is None else second.b,
            groups.counts,
            groups.coefficients.stride(1),
        )
        return terms, {"kind_0": first.kind, "kind_1": layers[-1].kind}

    @classmethod
    def none(cls) -> tuple[Terms, dict[str, int]]:
        """Returns terms that add nothing."""
        return cls(*(None,) * 7, 0), {"kind_0": 0, "kind_1": 0}


def _block_rank(max_rank: int, most: int) -> int:
    """Ranks of a block: a power of two that tensor cores support."""
    return min(max(16, triton.next_power_of_2(max_rank)), most)


@triton.jit
def _times_a(
    source,
    rows,
    stride,
    scale,
    a,
    in_range,
    ranks,
    begin,
    width: tl.constexpr,
    max_rank: tl.constexpr,
    part_columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_rank: tl.constexpr,
    block_k: tl.constexpr,
):
    """Returns a part of the sum: rows of `source` [block_rows], each with its scale, times the matrix at `a`."""
    total = tl.zeros((block_rows, block_rank), tl.float32)
    is_rank = ranks < max_rank
    for step in range(0, part_columns, block_k):
        columns = begin + step + tl.arange(0, block_k)
        left_mask, right_mask = in_range[:, None], is_rank[None, :]
        if width % block_k != 0 or width % part_columns != 0:
            left_mask = left_mask & (columns < width)[None, :]
            right_mask = right_mask & (columns < width)[:, None]
        tile = tl.load(source + (rows * stride)[:, None] + columns[None, :], mask=left_mask, other=0.0)
        matrix = tl.load(a + ranks[None, :] * width + columns[:, None], mask=right_mask, other=0.0)
        total = tl.dot(tile.to(matrix.dtype), matrix, total, input_precision="ieee")
    if scale is not None:
        total *= tl.load(scale + rows, mask=in_range, other=0.0)[:, None]
    return total


@triton.jit
def _finish(
    total,
    parts,
    part,
    part_stride,
    num_parts: tl.constexpr,
    offsets,
    mask,
    counter,
    out,
):
    """Stores a sum, or a part of it; the last program to do so adds the parts in their order."""
    if num_parts == 1:
        tl.store(out, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + part * part_stride + offsets, total, mask=mask)
        tl.debug_barrier()  # all threads have stored the part before one of them counts it
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            tl.store(counter, 0)
            # Bypasses the L1 cache, which does not have the writes of other multiprocessors.
            whole = tl.load(parts + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            for each in tl.static_range(1, num_parts):
                whole += tl.load(parts + each * part_stride + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out, whole.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _shrink(
    rows_0,
    rows_1,
    scale,
    normed,
    reads_block_input,
    a_0,
    a_1,
    order,
    items,
    counts,
    counters,
    parts,
    out_0,
    out_1,
    num_items,
    stride_0,
    stride_1,
    out_stride,
    max_rank: tl.constexpr,
    width_0: tl.constexpr,
    width_1: tl.constexpr,
    parts_0: tl.constexpr,
    parts_1: tl.constexpr,
    part_columns: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    block_rows: tl.constexpr,
    block_rank: tl.constexpr,
    block_k: tl.constexpr,
    is_spread: tl.constexpr,
    is_dependent: tl.constexpr,
):
    item, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_first = part < parts_0
    kind = tl.where(is_first, kind_0, kind_1)
    # The groups was written before the kernel before began. Behind the last item it has any values.
    known = item < tl.load(counts + NUM_KINDS)
    about = items + item * ITEM_SIZE
    slot = tl.load(about, mask=known, other=0)
    rank = tl.load(about + 3 + kind, mask=known, other=0)
    is_used = block * block_rank < rank
    places = tl.arange(0, block_rows)
    in_range = places < tl.where(is_used, tl.load(about + 2, mask=known, other=0), 0)
    rows = tl.load(order + tl.load(about + 1, mask=known, other=0) + places, mask=in_range, other=0).to(tl.int64)
    if is_dependent:
        wait_for_previous()
        let_next_start()
    if is_used:
        ranks = block * block_rank + tl.arange(0, block_rank)
        matrix = (slot - 1).to(tl.int64) * max_rank
        start = 0
        if is_spread:
            start = tl.load(about + 3 + NUM_KINDS + kind)
        offsets = (item * block_rows + places)[:, None] * max_rank + ranks[None, :]
        part_stride = num_items * block_rows * max_rank
        out_offsets = rows[:, None] * out_stride + start + ranks[None, :]
        mask = in_range[:, None] & (ranks < rank)[None, :]
        counter = counters + (kind * num_items + item) * ((max_rank + block_rank - 1) // block_rank) + block
        begin = tl.where(is_first, part, part - parts_0) * part_columns
        if is_first:
            reads_input = 0 if reads_block_input is None else tl.load(reads_block_input + slot)
            if reads_input != 0:
                total = _times_a(
                    normed,
                    rows,
                    width_0,
                    None,
                    a_0 + matrix * width_0,
                    in_range,
                    ranks,
                    begin,
                    width_0,
                    max_rank,
                    part_columns,
                    block_rows,
                    block_rank,
                    block_k,
                )
            else:
                total = _times_a(
                    rows_0,
                    rows,
                    stride_0,
                    scale,
                    a_0 + matrix * width_0,
                    in_range,
                    ranks,
                    begin,
                    width_0,
                    max_rank,
                    part_columns,
                    block_rows,
                    block_rank,
                    block_k,
                )
            _finish(total, parts, part, part_stride, parts_0, offsets, mask, counter, out_0 + out_offsets)
        else:
            if a_1 is not None:
                total = _times_a(
                    rows_1,
                    rows,
                    stride_1,
                    scale,
                    a_1 + matrix * width_1,
                    in_range,
                    ranks,
                    begin,
                    width_1,
                    max_rank,
                    part_columns,
                    block_rows,
                    block_rank,
                    block_k,
                )
                own_parts = parts + parts_0 * part_stride
                _finish(
                    total,
                    own_parts,
                    part - parts_0,
                    part_stride,
                    parts_1,
                    offsets,
                    mask,
                    counter,
                    out_1 + out_offsets,
                )


@triton.jit
def _times_b(
    product,
    coefficients,
    rows,
    in_range,
    b,
    rank,
    columns,
    width: tl.constexpr,
    max_rank: tl.constexpr,
    is_even: tl.constexpr,
    block_rank: tl.constexpr,
):
    """Adds the coefficients of rows times the matrix at `b` to a product [rows, columns]."""
    for begin in range(0, 1 if max_rank <= block_rank else rank, block_rank):
        ranks = begin + tl.arange(0, block_rank)
        is_rank = ranks < rank
        left = tl.load(
            coefficients + rows[:, None] * max_rank + ranks[None, :],
            mask=in_range[:, None] & is_rank[None, :],
            other=0.0,
        )
        right_mask = is_rank[:, None]
        if not is_even:
            right_mask = right_mask & (columns < width)[None, :]
        right = tl.load(b + ranks[:, None] * width + columns[None, :], mask=right_mask, other=0.0)
        product = tl.dot(left, right, product, input_precision="ieee")
    return product


@triton.jit
def _add_columns(
    out,
    stride,
    rows,
    in_range,
    block,
    coefficients_0,
    coefficients_1,
    rank_0,
    rank_1,
    b_0,
    b_1,
    width: tl.constexpr,
    max_rank: tl.constexpr,
    block_columns: tl.constexpr,
    block_rank: tl.constexpr,
):
    """Adds terms of one or two layers of one width to a block of columns."""
    is_even: tl.constexpr = width % block_columns == 0
    columns = block * block_columns + tl.arange(0, block_columns)
    pointers = out + rows[:, None] * stride + columns[None, :]
    inside = in_range[:, None]
    if not is_even:
        inside = inside & (columns < width)[None, :]
    # It is loaded before the factors, whose addresses are known at the same time.
    product = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    product = _times_b(
        product,
        coefficients_0,
        rows,
        in_range,
        b_0,
        rank_0,
        columns,
        width,
        max_rank,
        is_even,
        block_rank,
    )
    if b_1 is not None:
        product = _times_b(
            product,
            coefficients_1,
            rows,
            in_range,
            b_1,
            rank_1,
            columns,
            width,
            max_rank,
            is_even,
            block_rank,
        )
    tl.debug_barrier()  # `out` is changed in place
    tl.store(pointers, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand_add(
    out,
    coefficients_0,
    coefficients_1,
    b_0,
    b_1,
    order,
    items,
    counts,
    stride,
    max_rank: tl.constexpr,
    width_0: tl.constexpr,
    width_1: tl.constexpr,
    blocks_0: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    adds_both: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_rank: tl.constexpr,
):
    block, item = tl.program_id(0), tl.program_id(1)
    if item < tl.load(counts + NUM_KINDS):
        about = items + item * ITEM_SIZE
        matrix = (tl.load(about) - 1).to(tl.int64) * max_rank
        rank_0 = tl.load(about + 3 + kind_0)
        rank_1 = tl.load(about + 3 + kind_1)
        places = tl.arange(0, block_rows)
        in_range = places < tl.load(about + 2)
        rows = tl.load(order + tl.load(about + 1) + places, mask=in_range, other=0).to(tl.int64)
        if adds_both:
            if rank_0 + rank_1 > 0:
                _add_columns(
                    out,
                    stride,
                    rows,
                    in_range,
                    block,
                    coefficients_0,
                    coefficients_1,
                    rank_0,
                    rank_1,
                    b_0 + matrix * width_0,
                    b_1 + matrix * width_1,
                    width_0,
                    max_rank,
                    block_columns,
                    block_rank,
                )
        elif block < blocks_0:
            if rank_0 > 0:
                _add_columns(
                    out,
                    stride,
                    rows,
                    in_range,
                    block,
                    coefficients_0,
                    None,
                    rank_0,
                    0,
                    b_0 + matrix * width_0,
                    None,
                    width_0,
                    max_rank,
                    block_columns,
                    block_rank,
                )
        elif b_1 is not None:  # noqa: SIM102 - decided when the kernel is compiled
            if rank_1 > 0:
                _add_columns(
                    out + width_0,
                    stride,
                    rows,
                    in_range,
                    block - blocks_0,
                    coefficients_1,
                    None,
                    rank_1,
                    0,
                    b_1 + matrix * width_1,
                    None,
                    width_1,
                    max_rank,
                    block_columns,
                    block_rank,
                )


@triton.jit
def _add_layer(
    product,
    columns,
    width,
    tokens,
    batch,
    begin,
    step,
    count,
    coefficients,
    stride,
    places,
    b,
    block_rank: tl.constexpr,
    is_even: tl.constexpr,
) -> tl.tensor:
    """Adds blocks of listed ranks from `begin` on, in steps, to a product [columns, tokens].

    `b` has `width` columns. Those of `columns` that are none of them are left out, unless `is_even` says that all
    are.
    """
    is_token = (tokens < batch)[None, :]
    for first in range(begin, count, step):
        each = first + tl.arange(0, block_rank)
        place = tl.load(places + each).to(tl.int64)
        addresses = b + place[None, :] * width + columns[:, None]
        if is_even:
            left = tl.load(addresses)
        else:
            left = tl.load(addresses, mask=((columns >= 0) & (columns < width))[:, None], other=0.0)
        right = tl.load(coefficients + tokens[None, :] * stride + each[:, None], mask=is_token, other=0.0)
        product = tl.dot(left, right, product, input_precision="ieee")
    return product


@triton.jit
def add_terms(
    product,
    tokens,
    batch,
    first_0,
    first_1,
    width_0,
    width_1,
    part,
    coefficients_0,
    coefficients_1,
    places_0,
    places_1,
    b_0,
    b_1,
    counts,
    stride,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    num_parts: tl.constexpr,
    block_n: tl.constexpr,
    block_rank: tl.constexpr,
    is_even: tl.constexpr,
) -> tl.tensor:
    """Adds the terms of one or two layers, if there are any, to a product [columns, tokens] of a decode step.

    `first_0` and `first_1` say where the product's columns begin among the layer's, which are `width_0` and
    `width_1`. Of blocks of listed ranks one in `num_parts` is added. `is_even`: no product lies partly in a layer.
    """
    if coefficients_0 is not None:
        each = tl.arange(0, block_n)
        begin, step = part * block_rank, num_parts * block_rank
        if first_0 < width_0:
            product = _add_layer(
                product,
                first_0 + each,
                width_0,
                tokens,
                batch,
                begin,
                step,
                tl.load(counts + kind_0),
                coefficients_0,
                stride,
                places_0,
                b_0,
                block_rank,
                is_even,
            )
        if b_1 is not None:  # noqa: SIM102 - decided when the kernel is compiled
            if first_1 + block_n > 0:
                product = _add_layer(
                    product,
                    first_1 + each,
                    width_1,
                    tokens,
                    batch,
                    begin,
                    step,
                    tl.load(counts + kind_1),
                    coefficients_1,
                    stride,
                    places_1,
                    b_1,
                    block_rank,
                    is_even,
                )
    return product
