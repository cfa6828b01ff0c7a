"""Programmatic dependent launch: a kernel starts while the one before ends, and fetches its weights meanwhile."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, cuda
from triton.language.extra import cuda as extra

_LINE_BYTES = tl.constexpr(128)


def has_dependent_launch(tensor: Tensor) -> bool:
    """Whether the tensor's device can do it: CUDA devices since Hopper."""
    return tensor.device.type == "cuda" and cuda.get_device_capability(tensor.device)[0] >= 9


def launch(
    kernel: Any,
    grid: tuple[Any, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int,
    is_dependent: bool,
    **constants: Any,
) -> None:
    """Launch a kernel that has a constant `is_dependent` and waits by `wait_for_previous` where it is set."""
    options = {"launch_pdl": True} if is_dependent else {}
    kernel[grid](
        *arguments, is_dependent=is_dependent, num_warps=num_warps, num_stages=num_stages, **constants, **options
    )


@triton.jit
def prefetch_rows(
    pointer, first_row, num_rows, columns_begin, stride: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
) -> None:
    """Bring `rows` rows of a matrix from column `columns_begin` on into the L2 cache, `columns` wide."""
    item_bytes: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(columns * item_bytes, _LINE_BYTES))
    row = first_row + tl.arange(0, rows)
    # Rows and columns past the end ask for the last ones again rather than for what lies behind the matrix.
    column = tl.minimum(columns_begin + tl.arange(0, lines) * (_LINE_BYTES // item_bytes), stride - 1)
    addresses = pointer + tl.minimum(row, num_rows - 1)[:, None].to(tl.int64) * stride + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_previous() -> None:
    """Wait until the kernel before has ended and its writes can be seen. Every program of a kernel must."""
    extra.gdc_wait()


@triton.jit
def let_next_start() -> None:
    """Allow the next kernel onto multiprocessors that have room, up to its own wait.

    After this kernel's own wait, so that never more than one runs ahead: the weights of two would crowd the cache.
    """
    extra.gdc_launch_dependents()
