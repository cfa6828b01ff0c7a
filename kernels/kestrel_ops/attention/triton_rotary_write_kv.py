"""Rotates, scales and stores queries, keys and values in one pass over the packed tokens.

`qkv` is updated in place: a program loads everything before it stores anything, see `rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_heads, unsupported_rows
from kestrel_ops.norms.triton_rows import RowBlocks, block_columns
from kestrel_ops.shapes import ModelShape

_NUM_WARPS = 4
_LARGEST_FLOAT8 = tl.constexpr(448.0)


def rotary_write_kv(
    qkv: Tensor,  # [T, (H + 2 * G) * D], rows may be strided; rotated in place
    positions: Tensor,  # [T] int64
    cosine: Tensor,  # [longest context, R / 2] float32
    sine: Tensor,  # [longest context, R / 2] float32
    key_pages: Tensor,  # [P, G, S, D] in the type of `qkv` or float8_e4m3fn, written in place
    value_pages: Tensor,  # [P, G, S, D], likewise
    slots: Tensor,  # [T] int64: page * S + place in the page; tokens with a negative one are not stored
    key_scale: Tensor | None = None,  # [1] float32: factor of stored keys when they are read
    value_scale: Tensor | None = None,  # [1] float32
    query_scale: Tensor | None = None,  # [T, H]: multiplies queries before the rotation
    value_factor: Tensor | None = None,  # [T, G]: multiplies values before they are stored
) -> tuple[Tensor, Tensor, Tensor]:  # query [T, H, D], key [T, G, D], value [T, G, D]: views of `qkv`
    """Rotates and scales packed tokens, and stores their keys and values; one program for each token.

    Same contract as `reference.rotary_write_kv`. Dimensions that do not change are not written.
    """
    num_tokens, num_groups, head_dim = len(qkv), key_pages.shape[1], key_pages.shape[3]
    key_value = num_groups * head_dim
    num_heads = qkv.shape[1] // head_dim - 2 * num_groups
    half = cosine.shape[1]
    assert qkv.stride(1) == 1
    whole = (key_pages, value_pages, cosine, sine, query_scale, value_factor)
    assert all(tensor is None or tensor.is_contiguous() for tensor in whole)
    all_heads, all_groups = triton.next_power_of_2(num_heads), triton.next_power_of_2(num_groups)
    blocks = RowBlocks(rows=min(all_heads, all_groups), num_warps=_NUM_WARPS)
    launcher(_rotary_write_kv, (num_tokens,))(
        qkv,
        positions,
        cosine,
        sine,
        key_pages,
        value_pages,
        slots,
        key_scale,
        value_scale,
        query_scale,
        value_factor,
        qkv.stride(0),
        num_heads=num_heads,
        num_groups=num_groups,
        page_size=key_pages.shape[2],
        head_dim=head_dim,
        half=half,
        all_heads=all_heads,
        all_groups=all_groups,
        half_block=block_columns(half, blocks),
        rest_lanes=block_columns(head_dim - 2 * half, blocks) if head_dim > 2 * half else 0,
        all_lanes=block_columns(head_dim, blocks),
        is_float8=key_pages.dtype == torch.float8_e4m3fn,
        num_warps=_NUM_WARPS,
    )
    query, key, value = qkv.split((num_heads * head_dim, key_value, key_value), dim=1)
    return query.unflatten(1, (-1, head_dim)), key.unflatten(1, (-1, head_dim)), value.unflatten(1, (-1, head_dim))


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    if model.text is None:
        return None
    return unsupported_device(model, model.text.cache_dtype) or unsupported_heads(model) or unsupported_rows(model)


@triton.jit
def _stored(rows, inverse_scale, pages, is_float8: tl.constexpr):
    rows = rows.to(tl.float32) * inverse_scale
    if is_float8:
        rows = tl.minimum(tl.maximum(rows, -_LARGEST_FLOAT8), _LARGEST_FLOAT8)
    return rows.to(pages.dtype.element_ty)


# Scales of a layer are at any offset in those of all layers. One kernel, compiled at the start, serves all.
@triton.jit(do_not_specialize_on_alignment=["key_scale", "value_scale"])
def _rotary_write_kv(
    qkv,
    positions,
    cosine,
    sine,
    key_pages,
    value_pages,
    slots,
    key_scale,
    value_scale,
    query_scale,
    value_factor,
    row_stride,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    all_heads: tl.constexpr,
    all_groups: tl.constexpr,
    half_block: tl.constexpr,
    rest_lanes: tl.constexpr,
    all_lanes: tl.constexpr,
    is_float8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * row_stride
    heads = tl.arange(0, all_heads)
    groups = tl.arange(0, all_groups)
    dims = tl.arange(0, half_block)
    value_lanes = tl.arange(0, all_lanes)
    is_head = (heads < num_heads)[:, None]
    is_group = (groups < num_groups)[:, None]
    in_half = (dims < half)[None, :]
    is_value = is_group & (value_lanes < head_dim)[None, :]

    # All loads from `qkv`, which is then updated in place.
    queries = row + heads[:, None] * head_dim + dims[None, :]
    query_left = tl.load(queries, mask=is_head & in_half, other=0.0).to(tl.float32)
    query_right = tl.load(queries + half, mask=is_head & in_half, other=0.0).to(tl.float32)
    keys = row + (num_heads + groups)[:, None] * head_dim
    key_left = tl.load(keys + dims[None, :], mask=is_group & in_half, other=0.0).to(tl.float32)
    key_right = tl.load(keys + half + dims[None, :], mask=is_group & in_half, other=0.0).to(tl.float32)
    values = row + (num_heads + num_groups + groups)[:, None] * head_dim + value_lanes[None, :]
    value = tl.load(values, mask=is_value, other=0.0)
    if rest_lanes > 0:
        rest = 2 * half + tl.arange(0, rest_lanes)
        in_rest = (rest < head_dim)[None, :]
        key_rest = tl.load(keys + rest[None, :], mask=is_group & in_rest, other=0.0)
        if query_scale is not None:
            query_rests = row + heads[:, None] * head_dim + rest[None, :]
            query_rest = tl.load(query_rests, mask=is_head & in_rest, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read before any thread writes

    angle = tl.load(positions + token) * half + dims
    turn_cosine = tl.load(cosine + angle, mask=dims < half, other=0.0)[None, :]
    turn_sine = tl.load(sine + angle, mask=dims < half, other=0.0)[None, :]
    if query_scale is not None:
        scale = tl.load(query_scale + token * num_heads + heads, mask=heads < num_heads, other=0.0).to(tl.float32)
        query_left *= scale[:, None]
        query_right *= scale[:, None]
        if rest_lanes > 0:
            scaled = (query_rest * scale[:, None]).to(qkv.dtype.element_ty)
            tl.store(query_rests, scaled, mask=is_head & in_rest)
    left = query_left * turn_cosine - query_right * turn_sine
    right = query_left * turn_sine + query_right * turn_cosine
    tl.store(queries, left.to(qkv.dtype.element_ty), mask=is_head & in_half)
    tl.store(queries + half, right.to(qkv.dtype.element_ty), mask=is_head & in_half)

    slot = tl.load(slots + token)
    place = ((slot // page_size * num_groups + groups) * page_size + slot % page_size)[:, None] * head_dim
    stays = (groups < tl.where(slot >= 0, num_groups, 0))[:, None]  # the token has a place in the cache
    inverse_key = 1.0
    inverse_value = 1.0
    if key_scale is not None:
        inverse_key = 1.0 / tl.load(key_scale)
    if value_scale is not None:
        inverse_value = 1.0 / tl.load(value_scale)

    left = (key_left * turn_cosine - key_right * turn_sine).to(qkv.dtype.element_ty)
    right = (key_left * turn_sine + key_right * turn_cosine).to(qkv.dtype.element_ty)
    tl.store(keys + dims[None, :], left, mask=is_group & in_half)
    tl.store(keys + half + dims[None, :], right, mask=is_group & in_half)
    stored = key_pages + place + dims[None, :]
    tl.store(stored, _stored(left, inverse_key, key_pages, is_float8), mask=stays & in_half)
    tl.store(stored + half, _stored(right, inverse_key, key_pages, is_float8), mask=stays & in_half)
    if rest_lanes > 0:
        stored = key_pages + place + rest[None, :]
        tl.store(stored, _stored(key_rest, inverse_key, key_pages, is_float8), mask=stays & in_rest)

    if value_factor is not None:
        factor = tl.load(value_factor + token * num_groups + groups, mask=groups < num_groups, other=0.0)
        value = (value.to(tl.float32) * factor.to(tl.float32)[:, None]).to(qkv.dtype.element_ty)
        tl.store(values, value, mask=is_value)
    stored = value_pages + place + value_lanes[None, :]
    tl.store(stored, _stored(value, inverse_value, value_pages, is_float8), mask=is_value & stays)
