"""Rotates, stores and attends to one token per sequence in one launch; long contexts in parts.

A program computes one query head of one sequence or, in a small batch, one part of its context. Each lane of a tile
has a softmax over its own positions; lanes are combined at the end. The last program of a context to end combines
the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_dependent_launch import (
    has_dependent_launch,
    launch,
    let_next_start,
    wait_for_previous,
)
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_heads
from kestrel_ops.linear.triton_small_batch import operand
from kestrel_ops.shapes import ModelShape

_LOWEST = tl.constexpr(-1e30)  # finite, so that the difference of two of these is 0
_USUAL_PARTS = 32  # one compiled kernel serves any number of parts up to this
_FEW_PROGRAMS_BELOW = 8  # tokens
_BATCHES_OF_SHORT_TILES = range(9, 33)  # in bfloat16; with 48 and 64 sequences such tiles are slower
_WARP_BYTES = 512  # bytes that a program reads at once, 16 per lane
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Describes the loop of a program over its positions."""

    tile: int
    """Half of the positions per iteration."""
    num_warps: int
    num_stages: int
    """Iterations whose loads run concurrently."""
    dependent_launch: bool = False
    """True if it starts before the previous kernel has ended, on devices that support it."""
    lets_next_start: bool = True
    """True if the next kernel may start early as well."""
    in_steps: bool = False
    """True if an iteration proceeds in steps of the bytes that the program reads at once, instead of two tiles.
    With many programs this takes fewer instructions and has more concurrent loads."""


def rotary_decode_attention(
    qkv: Tensor,  # [B, (H + 2 * G) * D], contiguous
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_pages: Tensor,  # [P, G, S, D], contiguous
    value_pages: Tensor,  # [P, G, S, D], contiguous
    page_table: Tensor,  # [B, most pages of a sequence], rows may be strided
    out: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,  # [B, H], contiguous
    value_factor: Tensor | None,  # [B, G], contiguous
    partials: Tensor,  # [B, H, most parts, D + 2], contiguous
    counters: Tensor,  # [B, H], contiguous
    config: AttentionConfig | None = None,  # None: that which the batch asks for
) -> None:
    """Rotates, stores and attends to one token of each sequence.

    Same contract as `reference.rotary_decode_attention`.
    """
    num_groups, page_size, head_dim = key_pages.shape[1:]
    batch, num_heads, num_parts, _ = partials.shape
    assert key_pages.is_contiguous()
    assert value_pages.is_contiguous()
    assert partials.is_contiguous()
    assert counters.is_contiguous()
    assert query_scale is None or query_scale.is_contiguous()
    assert value_factor is None or value_factor.is_contiguous()
    assert qkv.stride(1) == out.stride(1) == page_table.stride(1) == 1
    config = config or config_for(batch, key_pages.dtype)
    block_d = triton.next_power_of_2(head_dim)
    launch(
        _attend,
        (num_heads, batch, num_parts),
        qkv,
        positions,
        cosine,
        sine,
        key_pages,
        value_pages,
        page_table,
        out,
        key_scale,
        value_scale,
        query_scale,
        value_factor,
        partials,
        counters,
        qkv.stride(0),
        page_table.stride(0),
        out.stride(0),
        _LOG2_E / head_dim**0.5,
        num_parts,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        page_size=page_size,
        half=cosine.shape[1],
        is_split=num_parts > 1,
        block_d=block_d,
        block_parts=max(_USUAL_PARTS, triton.next_power_of_2(num_parts)),
        tile=config.tile,
        tile_stages=config.num_stages,
        in_steps=config.in_steps,
        step=min(max(config.num_warps * _WARP_BYTES // (block_d * key_pages.itemsize), 1), 2 * config.tile),
        lets_next_start=config.lets_next_start,
        is_dependent=config.dependent_launch and has_dependent_launch(qkv),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.cache_dtype) or unsupported_heads(model)


def config_for(batch: int, dtype: torch.dtype) -> AttentionConfig:
    """Returns the tiling for a batch and the type of the cache."""
    if dtype == torch.float32:
        return AttentionConfig(tile=16, num_warps=4, num_stages=1)
    is_float8 = dtype == torch.float8_e4m3fn
    if batch >= _FEW_PROGRAMS_BELOW:
        # Starting before the previous product has ended makes steps of 24 to 48 tokens a quarter longer.
        tile, num_warps, num_stages = (16, 1, 4) if is_float8 else (32, 2, 3)
        if not is_float8 and batch in _BATCHES_OF_SHORT_TILES:
            tile, num_warps = 16, 4
        return AttentionConfig(tile, num_warps, num_stages, in_steps=True)
    config = AttentionConfig(64, num_warps=4, num_stages=1) if is_float8 else AttentionConfig(32, 2, 1)
    if batch > 1:
        return config
    # Early loads of weights by the next kernel would delay the few loads of this one, which depend on each other.
    return replace(config, dependent_launch=True, lets_next_start=False)


@triton.jit
def _turned(row, position, cosine, sine, half: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr):
    """Returns the vector of one head at `row` in float32, its first 2 * half dims rotated by the position's
    angles."""
    dims = tl.arange(0, block_d)
    angles = tl.where(dims < half, dims, dims - half)
    partners = tl.where(dims < half, dims + half, dims - half)
    is_turned = dims < 2 * half
    own = tl.load(row + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    other = tl.load(row + partners, mask=is_turned, other=0.0).to(tl.float32)
    cosines = tl.load(cosine + position * half + angles, mask=is_turned, other=1.0)
    sines = tl.load(sine + position * half + angles, mask=is_turned, other=0.0)
    return own * cosines + tl.where(dims < half, -other, other) * sines


@triton.jit
def _as_stored(values, scale, dtype: tl.constexpr):
    """Returns a key or a value as stored, in the type of the cache."""
    if scale is not None:
        values = tl.minimum(tl.maximum(values / tl.load(scale), -448.0), 448.0)
    return values.to(dtype)


@triton.jit
def _slot(page, place, group, num_groups: tl.constexpr, page_size: tl.constexpr):
    """Returns the row of the pages with a head's key or value at a place of the page."""
    return (page.to(tl.int64) * num_groups + group) * page_size + place % page_size


@triton.jit
def _slots(table_row, places, end, group, num_groups: tl.constexpr, page_size: tl.constexpr):
    """Returns the rows of the pages with a head's keys and values at the places."""
    page = tl.load(table_row + places // page_size, mask=places < end, other=0)
    return _slot(page, places, group, num_groups, page_size)


@triton.jit
def _rows(pages, slots, is_there, head_dim: tl.constexpr, block_d: tl.constexpr):
    dims = tl.arange(0, block_d)
    mask = is_there[:, None] & (dims < head_dim)[None, :]
    return tl.load(pages + slots[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _run_slots(
    table_row,
    start,
    end,
    group,
    index,
    run: tl.constexpr,
    runs: tl.constexpr,
    num_groups: tl.constexpr,
    page_size: tl.constexpr,
):
    """Returns the row of the pages with the first place of run `index`; a run is within one page.

    For a run beyond the end it is that of the last run. Each page is looked up separately: lanes would have to
    exchange a vector of pages, whereas the run of each register is known at compile time.
    """
    slots = tl.zeros(index.shape, tl.int64)
    for each in tl.static_range(runs):
        place = tl.minimum(start + each * run, (end - 1) // run * run)
        page = tl.load(table_row + place // page_size)
        slots = tl.where(index == each, _slot(page, place, group, num_groups, page_size), slots)
    return slots


@triton.jit
def _attend_in_steps(
    query,
    key_pages,
    value_pages,
    table_row,
    begin,
    end,
    group,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_d: tl.constexpr,
    turn: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Returns highest score, weights and weighted values of each row of a step, over the places from `begin` to
    `end`.

    A tile is loaded as [rows of a turn, lanes]: Triton spreads a step, its first rows, over the lanes of the warps,
    so that values common to the steps stay in the registers of a lane.
    """
    steps: tl.constexpr = turn // step
    is_shared: tl.constexpr = page_size % step == 0  # a step is then within one page
    dims = tl.arange(0, block_d)
    rows = tl.arange(0, turn)
    highest = tl.full((step,), _LOWEST, tl.float32)
    weight = tl.zeros((step,), tl.float32)
    total = tl.zeros((step, block_d), tl.float32)
    for start in tl.range(begin, end, turn, num_stages=stages):
        # Beyond the end, where memory is undefined, the last position is read with weight 0.
        places = start + rows
        places_there = tl.minimum(places, end - 1)
        if is_shared:
            slots = _run_slots(table_row, start, end, group, rows // step, step, steps, num_groups, page_size)
            slots += places_there % step
        else:
            slots = _slots(table_row, places_there, end, group, num_groups, page_size)
        addresses = slots[:, None] * head_dim + dims[None, :]
        if head_dim == block_d:
            keys = tl.load(key_pages + addresses)
            values = tl.load(value_pages + addresses)
        else:
            in_head = (dims < head_dim)[None, :]
            keys = tl.load(key_pages + addresses, mask=in_head, other=0.0)
            values = tl.load(value_pages + addresses, mask=in_head, other=0.0)
        scores = tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
        scores = tl.reshape(tl.where(places < end, scores, float("-inf")), (steps, step))
        values = tl.reshape(values, (steps, step, block_d))
        higher = tl.maximum(highest, tl.max(scores, axis=0))
        decay = tl.exp2(highest - higher)
        shares = tl.exp2(scores - higher[None, :])
        weight = weight * decay + tl.sum(shares, axis=0)
        total = total * decay[:, None] + tl.sum(values.to(tl.float32) * shares[:, :, None], axis=0)
        highest = higher
    return highest, weight, total


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["key_scale", "value_scale"])
def _attend(
    qkv,
    positions,
    cosine,
    sine,
    key_pages,
    value_pages,
    page_table,
    out,
    key_scale,
    value_scale,
    query_scale,
    value_factor,
    partials,
    counters,
    qkv_stride,
    table_stride,
    out_stride,
    softmax_scale,
    num_parts,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,
    is_split: tl.constexpr,
    block_d: tl.constexpr,
    block_parts: tl.constexpr,
    tile: tl.constexpr,
    tile_stages: tl.constexpr,
    in_steps: tl.constexpr,
    step: tl.constexpr,
    lets_next_start: tl.constexpr,
    is_dependent: tl.constexpr,
):
    head, sequence, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if is_dependent:
        wait_for_previous()
        if lets_next_start:
            let_next_start()
    dims = tl.arange(0, block_d)
    in_head = dims < head_dim
    out_row = out + sequence.to(tl.int64) * out_stride + head * head_dim
    position = tl.load(positions + sequence).to(tl.int32)
    if position < 0:
        if part == 0:
            tl.store(out_row + dims, tl.zeros((block_d,), out.dtype.element_ty), mask=in_head)
        return
    # The tokens before this one are divided among parts. Part 0 also has the token itself, so it is never empty.
    turn: tl.constexpr = 2 * tile
    part_length = tl.maximum(tl.cdiv(tl.cdiv(position, turn), num_parts), 1) * turn
    num_active = tl.maximum(tl.cdiv(position, part_length), 1)
    if part >= num_active:
        return

    group = head // (num_heads // num_groups)
    table_row = page_table + sequence.to(tl.int64) * table_stride
    row = qkv + sequence.to(tl.int64) * qkv_stride
    query = _turned(row + head * head_dim, position, cosine, sine, half, head_dim, block_d) * softmax_scale
    if query_scale is not None:
        query *= tl.load(query_scale + sequence * num_heads + head).to(tl.float32)
    if key_scale is not None:
        query *= tl.load(key_scale)

    begin = part * part_length
    end = tl.minimum(position, begin + part_length)
    if in_steps:
        highest, weight, total = _attend_in_steps(
            query,
            key_pages,
            value_pages,
            table_row,
            begin,
            end,
            group,
            num_groups,
            head_dim,
            page_size,
            block_d,
            turn,
            step,
            tile_stages,
        )
    else:
        highest = tl.full((tile,), _LOWEST, tl.float32)
        weight = tl.zeros((tile,), tl.float32)
        total = tl.zeros((tile, block_d), tl.float32)
        for start in tl.range(begin, end, turn, num_stages=tile_stages):
            # Two tiles per iteration: the previous sums are scaled once for both.
            places = start + tl.arange(0, tile)
            slots = _slots(table_row, places, end, group, num_groups, page_size)
            more_slots = _slots(table_row, places + tile, end, group, num_groups, page_size)
            key = _rows(key_pages, slots, places < end, head_dim, block_d)
            more_keys = _rows(key_pages, more_slots, places + tile < end, head_dim, block_d)
            value = _rows(value_pages, slots, places < end, head_dim, block_d)
            more_values = _rows(value_pages, more_slots, places + tile < end, head_dim, block_d)
            scores = tl.sum(key.to(tl.float32) * query[None, :], axis=1)
            scores = tl.where(places < end, scores, float("-inf"))
            more_scores = tl.sum(more_keys.to(tl.float32) * query[None, :], axis=1)
            more_scores = tl.where(places + tile < end, more_scores, float("-inf"))
            higher = tl.maximum(highest, tl.maximum(scores, more_scores))
            decay = tl.exp2(highest - higher)
            share = tl.exp2(scores - higher)
            more_share = tl.exp2(more_scores - higher)
            weight = weight * decay + share + more_share
            total = total * decay[:, None] + value.to(tl.float32) * share[:, None]
            total += more_values.to(tl.float32) * more_share[:, None]
            highest = higher
    top = tl.max(highest, axis=0)
    lane_share = tl.exp2(highest - top)
    sum_of_weights = tl.sum(weight * lane_share, axis=0)
    attended = tl.sum(total * lane_share[:, None], axis=0)

    if part == 0:
        key_row = row + (num_heads + group) * head_dim
        value_row = row + (num_heads + num_groups + group) * head_dim
        new_key = _turned(key_row, position, cosine, sine, half, head_dim, block_d)
        new_key = _as_stored(new_key, key_scale, key_pages.dtype.element_ty)
        new_value = tl.load(value_row + dims, mask=in_head, other=0.0).to(tl.float32)
        if value_factor is not None:
            new_value *= tl.load(value_factor + sequence * num_groups + group).to(tl.float32)
        new_value = _as_stored(new_value, value_scale, value_pages.dtype.element_ty)
        if head % (num_heads // num_groups) == 0:
            own_page = tl.load(table_row + position // page_size)
            own_slot = _slot(own_page, position, group, num_groups, page_size)
            tl.store(key_pages + own_slot * head_dim + dims, new_key, mask=in_head)
            tl.store(value_pages + own_slot * head_dim + dims, new_value, mask=in_head)
        score = tl.sum(new_key.to(tl.float32) * query, axis=0)
        higher_top = tl.maximum(top, score)
        decay_of_top = tl.exp2(top - higher_top)
        own_share = tl.exp2(score - higher_top)
        sum_of_weights = sum_of_weights * decay_of_top + own_share
        attended = attended * decay_of_top + new_value.to(tl.float32) * own_share
        top = higher_top

    if is_split:
        row_of_parts = partials + (sequence * num_heads + head).to(tl.int64) * num_parts * (head_dim + 2)
        if num_active > 1:
            own_part = row_of_parts + part * (head_dim + 2)
            tl.store(own_part + dims, attended, mask=in_head)
            tl.store(own_part + head_dim, top)
            tl.store(own_part + head_dim + 1, sum_of_weights)
            counter = counters + sequence * num_heads + head
            tl.debug_barrier()  # all threads have stored the part before one of them counts it
            if tl.atomic_add(counter, 1, sem="acq_rel") < num_active - 1:
                return
            tl.debug_barrier()
            tl.store(counter, 0)
            parts = tl.arange(0, block_parts)
            is_part = parts < num_active
            part_rows = row_of_parts + parts * (head_dim + 2)
            # Bypasses the L1 cache, which does not have the writes of other multiprocessors.
            tops = tl.load(part_rows + head_dim, mask=is_part, other=_LOWEST, cache_modifier=".cg")
            sums = tl.load(part_rows + head_dim + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            rows = tl.load(
                part_rows[:, None] + dims[None, :],
                mask=is_part[:, None] & in_head[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            part_shares = tl.exp2(tops - tl.max(tops, axis=0))
            sum_of_weights = tl.sum(sums * part_shares, axis=0)
            attended = tl.sum(rows * part_shares[:, None], axis=0)
    attended /= sum_of_weights
    if value_scale is not None:
        attended *= tl.load(value_scale)
    tl.store(out_row + dims, operand(attended, out.dtype.element_ty), mask=in_head)
