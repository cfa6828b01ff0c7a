"""What the products of a decode step share: how a matrix is cut for a small batch, and the loop over its columns.

The weight is the left operand: its rows fill the tensor cores' tiles however few tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class SmallBatchPlan:
    """How a product [B, K] @ [N, K].T is cut into programs."""

    block_n: int
    """Rows of the weight a program takes."""
    block_k: int
    """Columns of the weight per turn of its loop."""
    num_warps: int
    num_stages: int
    """Turns whose loads are under way at once, one more than that."""
    num_splits: int = 1
    """Programs that share the columns of one block of rows."""
    dependent_launch: bool = False
    """Whether it starts before the kernel before has ended, where the device can do that."""


DEPENDENT_LAUNCH_FROM = 17
"""Tokens from which on it pays for a product to start before attention has ended: with fewer it is the loads of
attention which suffer."""


def batch_block(batch: int) -> int:
    """Tokens a program takes: a power of two that the tensor cores can take, enough for all up to 128."""
    return min(max(16, 1 << (batch - 1).bit_length()), 128)


def operand_type(weight_dtype: torch.dtype) -> torch.dtype:
    """What the tensor cores take: float8 weights become float16, which holds each of them."""
    return torch.float16 if weight_dtype == torch.float8_e4m3fn else weight_dtype


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of an operand's type."""
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


@triton.jit
def operand(values, operand_dtype: tl.constexpr) -> tl.tensor:
    """Float32 or narrower to what the tensor cores take; float16 is held within its range."""
    if operand_dtype == tl.float16 and values.dtype != tl.float16 and values.dtype.primitive_bitwidth > 8:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -65504.0), 65504.0)
    return values.to(operand_dtype)


@triton.jit
def load_weight(pointer, rows, columns, num_rows, num_columns: tl.constexpr, is_even: tl.constexpr) -> tl.tensor:
    """A tile [rows, columns] of the weight; 0 beyond its columns. Every byte is used once in a step."""
    addresses = pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    if is_even:
        return tl.load(addresses, eviction_policy="evict_first")
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(addresses, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_tokens(
    pointer, tokens, columns, batch, stride, num_columns: tl.constexpr, is_even: tl.constexpr
) -> tl.tensor:
    """A tile [columns, tokens] of what the weight is multiplied with; 0 beyond."""
    inside = (tokens < batch)[None, :]
    if not is_even:
        inside = inside & (columns < num_columns)[:, None]
    return tl.load(pointer + tokens[None, :] * stride + columns[:, None], mask=inside, other=0.0)
