"""Prefetches data of a program into the L2 cache while the program still waits for the previous kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers, num_bytes: tl.constexpr) -> None:
    """Load `num_bytes` from each pointer of a block into L2. Both are multiples of 16; compute capability 9.0."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
