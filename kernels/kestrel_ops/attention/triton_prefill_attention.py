"""Computes flash attention of packed prompt chunks: over the pages of the context, and over the packed rows of
the chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_heads
from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Tiling:
    """Describes the blocks of one program and its resources."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers per thread. With fewer than the compiler selects, more programs fit on a multiprocessor."""
    masks_all_own_keys: bool = False
    """True where the own keys of a chunk fit in one tile, so that a loop over tiles without a mask has none."""


def tiling(max_chunk: int, dtype: torch.dtype, limits: DeviceLimits) -> Tiling:
    """Returns the fastest tiling for chunks of this length."""
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 2, 128)
    if max_chunk <= 64:  # last rows of prompts, prompts without an image, or questions after a cached image
        # A page number is read a tile before the page, which halves the stages: 5 keep two tiles in flight.
        return Tiling(16, 128, 4, 5 if limits.is_hopper else 3, masks_all_own_keys=True)
    return Tiling(128, 64, 8, 3, 128) if limits.is_hopper else Tiling(64, 64, 4, 3, 128)


def prefill_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other; any strides over T
    key: Tensor,  # [T, G, D]: the chunks' own keys
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn; read before a chunk's start alone
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; entries past a sequence's end are any valid page
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk; rows after the last are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end
    visible_until: Tensor,  # [T] int32: the row attends to the positions below it; position + 1, or its span's end
    max_chunk: int,  # tokens of the longest chunk
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
) -> Tensor:  # [T, H, D], contiguous
    """Computes attention of packed prompt chunks; scores and sums are float32.

    Same contract as `reference.prefill_attention`. The weights are rounded to the type of `query`.
    """
    return attend(
        query,
        key,
        value,
        (key_pages, value_pages, key_scale, value_scale),
        (page_table, query_starts, lengths, visible_until),
        max_chunk,
        tiling(max_chunk, query.dtype, DeviceLimits.of(query.device)),
    )


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.cache_dtype) or unsupported_heads(model)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    chunks: tuple[Tensor, Tensor, Tensor, Tensor],
    max_chunk: int,
    tiles: Tiling,
) -> Tensor:
    """Computes `prefill_attention` with a given tiling, for tuning."""
    key_pages, value_pages, key_scale, value_scale = pages
    page_table, query_starts, lengths, visible_until = chunks
    _, num_heads, head_dim = query.shape
    num_groups = key.shape[1]
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert query.stride()[1:] == key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert all(tensor.is_contiguous() for tensor in (key_pages, value_pages, page_table))
    # Heads vary first: concurrent programs then read neighbouring columns of the same packed rows.
    grid = (num_heads, triton.cdiv(max_chunk, tiles.queries), len(lengths))
    launcher(_prefill_attention, grid)(
        query,
        key,
        value,
        attended,
        key_pages,
        value_pages,
        page_table,
        query_starts,
        lengths,
        visible_until,
        key_scale,
        value_scale,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        page_table.stride(0),
        score_scale=head_dim**-0.5 * 1.4426950408889634,
        page_size=key_pages.shape[2],
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        dims=max(16, triton.next_power_of_2(head_dim)),
        num_queries=tiles.queries,
        num_keys=tiles.keys,
        masks_all_own_keys=tiles.masks_all_own_keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    return attended


@triton.jit
def _load(pointers, rows, row_limit, dims, head_dim: tl.constexpr, mask_rows: tl.constexpr):
    """Returns a tile [rows, dims], with 0 outside of the matrix."""
    if mask_rows:
        tile = tl.load(pointers, mask=(rows < row_limit)[:, None] & (dims < head_dim)[None, :], other=0.0)
    elif dims.shape[0] != head_dim:
        tile = tl.load(pointers, mask=(dims < head_dim)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _add_tile(queries, keys, values, visible, places, state, score_scale, masked: tl.constexpr):
    """Updates the running maxima, sums and weighted values with one tile of keys and values (FlashAttention)."""
    highest, total, weighted = state
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if masked:
        scores = tl.where(places[None, :] < visible[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * score_scale)
    weights = tl.exp2(scores * score_scale - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, axis=1)
    weighted = weighted * shrink[:, None]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    return new_highest, total, weighted


# Parameters that depend on a batch or a layer are not specialised: one kernel compiled at the start serves all.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["key_scale", "value_scale"])
def _prefill_attention(
    query,
    key,
    value,
    attended,
    key_pages,
    value_pages,
    page_table,
    query_starts,
    lengths,
    visible_until,
    key_scale,
    value_scale,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    score_scale: tl.constexpr,
    page_size: tl.constexpr,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    masks_all_own_keys: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(2)
    first_row = tl.load(query_starts + chunk)
    chunk_length = tl.load(query_starts + chunk + 1) - first_row
    length = tl.load(lengths + chunk)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks, the longest, start first
    if block * num_queries >= chunk_length:
        return
    start = length - chunk_length
    group = head // (num_heads // num_groups)
    element = query.dtype.element_ty

    dim = tl.arange(0, dims)
    rows = block * num_queries + tl.arange(0, num_queries)
    row_offsets = (first_row + rows).to(tl.int64)[:, None]
    own_queries = query + row_offsets * query_stride + head * head_dim + dim[None, :]
    queries = _load(own_queries, rows, chunk_length, dim, head_dim, True)
    state = (
        tl.full((num_queries,), float("-inf"), tl.float32),
        tl.zeros((num_queries,), tl.float32),
        tl.zeros((num_queries, dims), tl.float32),
    )
    columns = tl.arange(0, num_keys)

    own_visible = visible_until + first_row
    own_keys = key + first_row.to(tl.int64) * key_stride + group * head_dim + dim[None, :]
    own_values = value + first_row.to(tl.int64) * value_stride + group * head_dim + dim[None, :]

    # The context before the chunk, from the pages. All queries attend to all of it.
    page_score_scale = score_scale
    if key_scale is not None:
        page_score_scale = score_scale * tl.load(key_scale)
    read_scale = 1.0
    if value_scale is not None:
        read_scale = tl.load(value_scale)
    everything = tl.zeros((num_queries,), tl.int32) + start
    for position in range(0, start, num_keys):
        at = position + columns
        pages = tl.load(page_table + chunk * table_stride + at // page_size, mask=at < start, other=0)
        offsets = ((pages.to(tl.int64) * num_groups + group) * page_size + at % page_size) * head_dim
        offsets = offsets[:, None] + dim[None, :]
        keys = _load(key_pages + offsets, at, start, dim, head_dim, True)
        values = _load(value_pages + offsets, at, start, dim, head_dim, True)
        if value_scale is not None:
            values = values.to(tl.float32) * read_scale
        state = _add_tile(
            queries, keys.to(element), values.to(element), everything, at, state, page_score_scale, True
        )

    # The chunk's own keys. No row sees less than the one before it, so all queries of the block attend to the
    # positions before `common`, none to those from `limit` on. Rows behind the chunk, which are not stored, see
    # what its last row sees.
    visible = tl.load(own_visible + tl.minimum(rows, chunk_length - 1))
    whole = 0
    end = chunk_length
    if not masks_all_own_keys:
        common = tl.load(own_visible + block * num_queries)
        limit = tl.load(own_visible + tl.minimum(block * num_queries + num_queries, chunk_length) - 1)
        whole = (common - start) // num_keys * num_keys
        for own in range(0, whole, num_keys):
            at = own + columns
            keys = _load(own_keys + at[:, None] * key_stride, at, 0, dim, head_dim, False)
            values = _load(own_values + at[:, None] * value_stride, at, 0, dim, head_dim, False)
            state = _add_tile(queries, keys, values, visible, start + at, state, score_scale, False)
        end = limit - start
    # With one tile there is nothing to read ahead.
    for own in tl.range(whole, end, num_keys, num_stages=2 if masks_all_own_keys else None):
        at = own + columns
        keys = _load(own_keys + at[:, None] * key_stride, at, chunk_length, dim, head_dim, True)
        values = _load(own_values + at[:, None] * value_stride, at, chunk_length, dim, head_dim, True)
        state = _add_tile(queries, keys, values, visible, start + at, state, score_scale, True)

    _, total, weighted = state
    result = (weighted / total[:, None]).to(element)
    out = attended + row_offsets * (num_heads * head_dim) + head * head_dim + dim[None, :]
    tl.store(out, result, mask=(rows < chunk_length)[:, None] & (dim < head_dim)[None, :])
