"""How kernels that hold whole rows in registers cut them into blocks, which must be powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

_LARGEST_FLOAT8 = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """How many rows a program takes, and how many warps it has."""

    rows: int
    num_warps: int


def pieces(width: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, that cover `width` with few lanes to spare: 4304 → 4096 and 256."""
    if width == 0:
        return 0, 0
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    return main, 1 << (rest - 1).bit_length() if rest else 0


@triton.jit
def load_piece(
    pointer, row_starts, in_range, begin: tl.constexpr, size: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Columns from `begin` on, `size` lanes of rows that are `width` wide, as float32; 0 beyond."""
    lanes = begin + tl.arange(0, size)
    inside = in_range[:, None] & (lanes < width)[None, :]
    return tl.load(pointer + row_starts[:, None] + lanes[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_piece(
    pointer, row_starts, in_range, values, begin: tl.constexpr, size: tl.constexpr, width: tl.constexpr
) -> None:
    """The counterpart of `load_piece`, rounding to the type that is stored."""
    lanes = begin + tl.arange(0, size)
    inside = in_range[:, None] & (lanes < width)[None, :]
    tl.store(pointer + row_starts[:, None] + lanes[None, :], values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def cut_to_float8(values, is_needed: tl.constexpr) -> tl.tensor:
    """Values beyond the range of float8_e4m3fn at its ends; needed where their scale was not measured on them."""
    if is_needed:
        values = tl.minimum(tl.maximum(values, -_LARGEST_FLOAT8), _LARGEST_FLOAT8)
    return values
