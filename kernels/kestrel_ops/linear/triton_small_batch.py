"""Holds common parts of the products of a decode step: the tiling for a small batch, and the loop over columns.

The weight is the left operand, so its rows fill the tiles of the tensor cores for any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class SmallBatchConfig:
    """Divides a product [B, K] @ [N, K].T into programs."""

    block_n: int
    """Rows of the weight per program."""
    block_k: int
    """Columns of the weight per iteration."""
    num_warps: int
    num_stages: int
    """Iterations whose loads run concurrently, plus one."""
    num_splits: int = 1
    """Programs that share the columns of one block of rows."""
    dependent_launch: bool = False
    """True if it starts before the previous kernel has ended, on devices that support it."""


DEPENDENT_LAUNCH_FROM = 17
"""The fewest tokens for which a product starts before attention has ended. With fewer tokens this would delay the
loads of attention."""


def batch_block(batch: int) -> int:
    """Tokens per program: a power of two that tensor cores support, enough for all up to 128."""
    return min(max(16, 1 << (batch - 1).bit_length()), 128)


def operand_type(weight_dtype: torch.dtype) -> torch.dtype:
    """Returns the operand type of tensor cores: float8 weights become float16, which represents each of them
    exactly."""
    return torch.float16 if weight_dtype == torch.float8_e4m3fn else weight_dtype


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Returns the name of an operand's type in Triton."""
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


@triton.jit
def operand(values, operand_dtype: tl.constexpr) -> tl.tensor:
    """Converts float32 or a narrower type to the operand type; values are clipped to the range of float16."""
    if operand_dtype == tl.float16 and values.dtype != tl.float16 and values.dtype.primitive_bitwidth > 8:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -65504.0), 65504.0)
    return values.to(operand_dtype)


@triton.jit
def converted(values, dtype: tl.constexpr) -> tl.tensor:
    """Converts to a wider type; of float8_e4m3fn that is given as bytes every value is represented exactly."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint16)
        # Sign, exponent and mantissa in their places of a float16, whose exponents begin at another number.
        values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return values.to(dtype)


@triton.jit
def load_weight(pointer, rows, columns, num_rows, num_columns: tl.constexpr, is_even: tl.constexpr) -> tl.tensor:
    """Returns a tile [rows, columns] of the weight, with 0 beyond its columns. Each byte is used once per step."""
    addresses = pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    if is_even:
        return tl.load(addresses, eviction_policy="evict_first")
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(addresses, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_tokens(
    pointer, tokens, columns, batch, stride, num_columns: tl.constexpr, is_even: tl.constexpr
) -> tl.tensor:
    """Returns a tile [columns, tokens] of the right operand, with 0 outside of it."""
    inside = (tokens < batch)[None, :]
    if not is_even:
        inside = inside & (columns < num_columns)[:, None]
    return tl.load(pointer + tokens[None, :] * stride + columns[:, None], mask=inside, other=0.0)
