"""Attention within crops for heads whose width is no power of two: 72 lanes as 64 and 8, not as 128."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.triton.rows import cut_to_float8, pieces

_FEWEST_LANES = 16  # of a matrix product


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """How many queries a program takes, how many keys at a time, with how many warps and loads under way."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Small enough that three programs share a multiprocessor: while one computes exponents, another multiplies.
_BLOCKS = AttentionBlocks(queries=64, keys=64, num_warps=4, num_stages=3)
_SMALL_BLOCKS = AttentionBlocks(queries=16, keys=16, num_warps=4, num_stages=2)


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
    blocks: AttentionBlocks | None = None,  # None: those that the crop asks for
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """As the definition says; one program for some queries of a head, which reads that head's keys and values."""
    dim = packed.shape[1] // 3
    head_dim = dim // num_heads
    blocks = blocks or (_BLOCKS if num_patches >= _BLOCKS.keys else _SMALL_BLOCKS)
    assert packed.stride(1) == 1
    out_dtype = packed.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(len(packed), dim, dtype=out_dtype, device=packed.device)
    main, tail = pieces(head_dim)
    _crop_attention[(triton.cdiv(num_patches, blocks.queries), num_heads, len(packed) // num_patches)](
        packed,
        out,
        packed.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        None if out_scale is None else 1 / out_scale,
        num_patches=num_patches,
        num_heads=num_heads,
        head_dim=head_dim,
        main=max(main, _FEWEST_LANES),
        tail=max(tail, _FEWEST_LANES) if head_dim > max(main, _FEWEST_LANES) else 0,
        queries=blocks.queries,
        keys=blocks.keys,
        num_warps=blocks.num_warps,  # pyright: ignore[reportCallIssue]
        num_stages=blocks.num_stages,  # pyright: ignore[reportCallIssue]
    )
    return out


@triton.jit
def _lanes(pointer, places, stride, num_places, begin: tl.constexpr, size: tl.constexpr, head_dim: tl.constexpr):
    # Rows of one head, [places, size]; 0 beyond the crop and beyond the head.
    lanes = begin + tl.arange(0, size)
    inside = (places < num_places)[:, None] & (lanes < head_dim)[None, :]
    return tl.load(pointer + places[:, None] * stride + lanes[None, :], mask=inside, other=0.0)


@triton.jit
def _attend_block(
    query_main,
    query_tail,
    key,
    value,
    first,
    stride,
    scale,
    highest,
    total,
    sum_main,
    sum_tail,
    num_patches: tl.constexpr,
    head_dim: tl.constexpr,
    main: tl.constexpr,
    tail: tl.constexpr,
    keys: tl.constexpr,
    is_whole: tl.constexpr,
):
    places = first + tl.arange(0, keys)
    key_main = _lanes(key, places, stride, num_patches, 0, main, head_dim)
    scores = tl.dot(query_main, key_main.T, input_precision="ieee")
    if tail > 0:
        key_tail = _lanes(key, places, stride, num_patches, main, tail, head_dim)
        scores = tl.dot(query_tail, key_tail.T, scores, input_precision="ieee")
    if not is_whole:
        scores = tl.where((places < num_patches)[None, :], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    fading = tl.exp2(highest - higher)
    total = total * fading + tl.sum(weights, axis=1)
    rounded = weights.to(value.dtype.element_ty)
    value_main = _lanes(value, places, stride, num_patches, 0, main, head_dim)
    sum_main = tl.dot(rounded, value_main, sum_main * fading[:, None], input_precision="ieee")
    if tail > 0:
        value_tail = _lanes(value, places, stride, num_patches, main, tail, head_dim)
        sum_tail = tl.dot(rounded, value_tail, sum_tail * fading[:, None], input_precision="ieee")
    return higher, total, sum_main, sum_tail


@triton.jit
def _crop_attention(
    packed,
    out,
    stride,
    scale,
    out_factor,
    num_patches: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    main: tl.constexpr,
    tail: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    dim: tl.constexpr = num_heads * head_dim
    head = tl.program_id(1)
    first_row = tl.program_id(2).to(tl.int64) * num_patches
    query = packed + first_row * stride + head * head_dim
    key, value = query + dim, query + 2 * dim
    places = tl.program_id(0) * queries + tl.arange(0, queries)
    query_main = _lanes(query, places, stride, num_patches, 0, main, head_dim)
    query_tail = query_main
    sum_main = tl.zeros((queries, main), tl.float32)
    sum_tail = sum_main
    if tail > 0:
        query_tail = _lanes(query, places, stride, num_patches, main, tail, head_dim)
        sum_tail = tl.zeros((queries, tail), tl.float32)
    highest = tl.full((queries,), float("-inf"), tl.float32)
    total = tl.zeros((queries,), tl.float32)
    whole: tl.constexpr = num_patches // keys * keys
    for first in range(0, whole, keys):
        highest, total, sum_main, sum_tail = _attend_block(
            query_main, query_tail, key, value, first, stride, scale, highest, total, sum_main, sum_tail,
            num_patches, head_dim, main, tail, keys, True,
        )  # fmt: skip
    if whole < num_patches:
        highest, total, sum_main, sum_tail = _attend_block(
            query_main, query_tail, key, value, whole, stride, scale, highest, total, sum_main, sum_tail,
            num_patches, head_dim, main, tail, keys, False,
        )  # fmt: skip
    factor = 1.0 / total
    if out_factor is not None:
        factor *= out_factor
    target = out + (first_row + places)[:, None] * dim + head * head_dim
    lanes = tl.arange(0, main)
    inside = (places < num_patches)[:, None] & (lanes < head_dim)[None, :]
    attended = cut_to_float8(sum_main * factor[:, None], out_factor is not None)
    tl.store(target + lanes[None, :], attended.to(out.dtype.element_ty), mask=inside)
    if tail > 0:
        lanes = main + tl.arange(0, tail)
        inside = (places < num_patches)[:, None] & (lanes < head_dim)[None, :]
        attended = cut_to_float8(sum_tail * factor[:, None], out_factor is not None)
        tl.store(target + lanes[None, :], attended.to(out.dtype.element_ty), mask=inside)
