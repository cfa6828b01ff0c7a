"""Computes flash attention whose row has the same bits in any batch: as a decoded token, and in any chunk of a
prompt.

Keys and values are read from pages, in blocks from position 0 on that are the same for every chunk. A row that does
not see a block keeps its bits: the weights are zeros there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_heads
from kestrel_ops.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Describes the queries of one program and its resources."""

    queries: int
    keys: int
    """Keys of a block. Results depend on it, so it is the same for any number of queries."""
    num_warps: int
    num_stages: int


def config_for(max_chunk: int, dtype: torch.dtype) -> AttentionConfig:
    """Returns the launch configuration for chunks of up to so many tokens."""
    if dtype == torch.float32:
        return AttentionConfig(16, 32, 4, 2)
    if max_chunk <= 16:
        return AttentionConfig(16, 64, 1, 3)
    return AttentionConfig(64, 64, 4, 2)


def invariant_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other; any strides over T
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn; the chunks' own keys are in them
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; entries past a sequence's end are any valid page
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk; rows after the last are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end; not needed here
    visible_until: Tensor,  # [T] int32: the row attends to the positions below it; position + 1, or its span's end
    max_chunk: int,  # tokens of the longest chunk
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
    config: AttentionConfig | None = None,  # None: that which the longest chunk asks for
) -> Tensor:  # [T, H, D], contiguous
    """Computes attention whose rows have the same bits in any batch.

    Same contract as `reference.invariant_attention`. The weights are rounded to the type of `query`.
    """
    _, num_heads, head_dim = query.shape
    num_groups, page_size = key_pages.shape[1:3]
    config = config or config_for(max_chunk, query.dtype)
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert query.stride()[1:] == (head_dim, 1)
    assert all(tensor.is_contiguous() for tensor in (key_pages, value_pages, page_table))
    grid = (num_heads, triton.cdiv(max_chunk, config.queries), len(page_table))
    launcher(_invariant_attention, grid)(
        query,
        attended,
        key_pages,
        value_pages,
        page_table,
        query_starts,
        visible_until,
        key_scale,
        value_scale,
        query.stride(0),
        page_table.stride(0),
        score_scale=head_dim**-0.5 * 1.4426950408889634,
        page_size=page_size,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        dims=max(16, triton.next_power_of_2(head_dim)),
        num_queries=config.queries,
        num_keys=config.keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return attended


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.cache_dtype) or unsupported_heads(model)


@triton.jit
def _load(pointers, at, limit, dim, head_dim: tl.constexpr, is_whole: tl.constexpr):
    """Returns a tile [rows, dims], with 0 outside of the context and of the head."""
    if not is_whole:
        return tl.load(pointers, mask=(at < limit)[:, None] & (dim < head_dim)[None, :], other=0.0)
    if dim.shape[0] != head_dim:
        return tl.load(pointers, mask=(dim < head_dim)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _add_block(
    queries,
    state,
    position,
    visible,
    limit,
    key_pages,
    value_pages,
    table,
    group,
    read_scale,
    score_scale,
    has_scale: tl.constexpr,
    page_size: tl.constexpr,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    num_keys: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Updates the running maxima, sums and weighted values with one block of keys and values (FlashAttention)."""
    highest, total, weighted = state
    dim = tl.arange(0, dims)
    at = position + tl.arange(0, num_keys)
    if is_whole:
        pages = tl.load(table + at // page_size)
    else:
        pages = tl.load(table + at // page_size, mask=at < limit, other=0)
    offsets = ((pages.to(tl.int64) * num_groups + group) * page_size + at % page_size) * head_dim
    offsets = offsets[:, None] + dim[None, :]
    keys = _load(key_pages + offsets, at, limit, dim, head_dim, is_whole)
    values = _load(value_pages + offsets, at, limit, dim, head_dim, is_whole)
    if has_scale:
        values = values.to(tl.float32) * read_scale
    values = values.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    if not is_whole:
        scores = tl.where(at[None, :] < visible[:, None], scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, axis=1) * score_scale)
    weights = tl.exp2(scores * score_scale - raised[:, None])
    shrink = tl.exp2(highest - raised)
    total = total * shrink + tl.sum(weights, axis=1)
    weighted = weighted * shrink[:, None]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    return raised, total, weighted


# Parameters that depend on a batch or a layer are not specialised: one kernel compiled at the start serves all.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["key_scale", "value_scale"])
def _invariant_attention(
    query,
    attended,
    key_pages,
    value_pages,
    page_table,
    query_starts,
    visible_until,
    key_scale,
    value_scale,
    query_stride,
    table_stride,
    score_scale: tl.constexpr,
    page_size: tl.constexpr,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(2)
    first_row = tl.load(query_starts + chunk)
    chunk_length = tl.load(query_starts + chunk + 1) - first_row
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks, the longest, start first
    if block * num_queries >= chunk_length:
        return
    group = head // (num_heads // num_groups)
    table = page_table + chunk.to(tl.int64) * table_stride

    dim = tl.arange(0, dims)
    rows = block * num_queries + tl.arange(0, num_queries)
    # It never falls from one row to the next: all queries of the block attend to the positions before `common`,
    # none to those from `limit` on. Rows behind the chunk, which are not stored, see what its last row sees.
    own_visible = visible_until + first_row
    common = tl.load(own_visible + block * num_queries)
    limit = tl.load(own_visible + tl.minimum(block * num_queries + num_queries, chunk_length) - 1)
    visible = tl.load(own_visible + tl.minimum(rows, chunk_length - 1))

    row_offsets = (first_row + rows).to(tl.int64)[:, None]
    in_chunk = (rows < chunk_length)[:, None] & (dim < head_dim)[None, :]
    queries = tl.load(query + row_offsets * query_stride + head * head_dim + dim[None, :], mask=in_chunk, other=0.0)
    state = (
        tl.full((num_queries,), float("-inf"), tl.float32),
        tl.zeros((num_queries,), tl.float32),
        tl.zeros((num_queries, dims), tl.float32),
    )
    scale = score_scale
    if key_scale is not None:
        scale = score_scale * tl.load(key_scale)
    read_scale = 1.0
    if value_scale is not None:
        read_scale = tl.load(value_scale)
    has_scale: tl.constexpr = value_scale is not None
    whole = common // num_keys * num_keys
    for position in range(0, whole, num_keys):
        state = _add_block(
            queries, state, position, visible, limit, key_pages, value_pages, table, group, read_scale, scale,
            has_scale, page_size, num_groups, head_dim, dims, num_keys, True,
        )  # fmt: skip
    for position in range(whole, limit, num_keys):
        state = _add_block(
            queries, state, position, visible, limit, key_pages, value_pages, table, group, read_scale, scale,
            has_scale, page_size, num_groups, head_dim, dims, num_keys, False,
        )  # fmt: skip
    _, total, weighted = state
    result = (weighted / total[:, None]).to(queries.dtype)
    out = attended + row_offsets * (num_heads * head_dim) + head * head_dim + dim[None, :]
    tl.store(out, result, mask=in_chunk)
