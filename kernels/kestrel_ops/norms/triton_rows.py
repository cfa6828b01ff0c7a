"""Divides rows into blocks for kernels that hold whole rows in registers. Sizes of blocks are powers of two.

A block with fewer elements than its program has threads is replicated: several threads hold each element. Triton
lets only one of them store it, but all of them load it, and the compiler may even load it twice, in two layouts. A
kernel that reads and writes the same place then races with itself. Two rules exclude that:

- `block_columns` never makes a block smaller than the program has threads, for any width;
- a kernel that updates memory in place loads everything, then calls `tl.debug_barrier()`, then stores. This is
  correct for every layout that the compiler may choose.

Two buffers for the stream, one to read and one to write, would also exclude the race and move as many bytes. But
they would take 64 MiB more for 8,192 prompt tokens, and 121 MB more for 72 tiles, which would displace other data
from the L2 cache. The barrier costs about 30 cycles of a program that waits for memory anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

THREADS_PER_WARP = 32
_LARGEST_FLOAT8 = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Describes the rows and the warps of a program; both are powers of two."""

    rows: int
    num_warps: int


def block_columns(width: int, blocks: RowBlocks) -> int:
    """Returns the smallest power of two that covers `width` and gives a block [rows, columns] one element per
    thread."""
    assert width > 0
    return max(1 << (width - 1).bit_length(), THREADS_PER_WARP * blocks.num_warps // blocks.rows, 1)


def pieces(width: int, blocks: RowBlocks) -> tuple[int, int]:
    """Columns of one or two blocks that cover `width` with few extra columns. The second is 0 if one is enough.

    4304 → 4096 and 256. Each is a power of two with at least as many elements as the program has threads. A width
    of 0 has no block.
    """
    if width == 0:
        return 0, 0
    whole = block_columns(width, blocks)
    main = whole // 2
    if 0 < main < width and main == block_columns(main, blocks):
        tail = block_columns(width - main, blocks)
        if tail < main:
            return main, tail
    return whole, 0


@triton.jit
def load_piece(
    pointer, row_starts, in_range, begin: tl.constexpr, size: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Columns from `begin` on, `size` columns of rows that are `width` wide, as float32; 0 beyond."""
    columns = begin + tl.arange(0, size)
    inside = in_range[:, None] & (columns < width)[None, :]
    return tl.load(pointer + row_starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_piece(
    pointer, row_starts, in_range, values, begin: tl.constexpr, size: tl.constexpr, width: tl.constexpr
) -> None:
    """Returns the counterpart of `load_piece`; rounds to the stored type."""
    columns = begin + tl.arange(0, size)
    inside = in_range[:, None] & (columns < width)[None, :]
    tl.store(pointer + row_starts[:, None] + columns[None, :], values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def clipped_to_float8(values, is_needed: tl.constexpr) -> tl.tensor:
    """Clips values to the range of float8_e4m3fn. Needed if their scale was not measured on them."""
    if is_needed:
        values = tl.minimum(tl.maximum(values, -_LARGEST_FLOAT8), _LARGEST_FLOAT8)
    return values
