"""Computes counter-based random numbers in one launch, by the generator of Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.sampling.reference import NUM_UNIFORMS
from kestrel_ops.shapes import ModelShape

_BLOCK_ROWS = 64


def philox_uniform(
    seeds: Tensor,  # [B] int64, may be strided
    counters: Tensor,  # [B] int64 in [0, 2**32), may be strided
) -> Tensor:  # [B, 4] float32
    """Draws uniform random numbers. Same contract as `reference.philox_uniform`, with the same bits."""
    num_rows = len(seeds)
    out = torch.empty(num_rows, NUM_UNIFORMS, dtype=torch.float32, device=seeds.device)
    launcher(_philox_uniform, (triton.cdiv(num_rows, _BLOCK_ROWS),))(
        seeds, counters, out, num_rows, seeds.stride(0), counters.stride(0), block=_BLOCK_ROWS
    )
    return out


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_device(model)


# Seeds and counters are columns of any rows.
@triton.jit(
    do_not_specialize=["num_rows", "seed_stride", "counter_stride"],
    do_not_specialize_on_alignment=["seeds", "counters"],
)
def _philox_uniform(seeds, counters, out, num_rows, seed_stride, counter_stride, block: tl.constexpr):
    rows = tl.program_id(0) * block + tl.arange(0, block)
    is_row = rows < num_rows
    seed = tl.load(seeds + rows * seed_stride, mask=is_row, other=0)
    counter = tl.load(counters + rows * counter_stride, mask=is_row, other=0).to(tl.uint32)
    zero = tl.zeros((block,), dtype=tl.uint32)
    first, second, third, fourth = tl.philox(seed, counter, zero, zero, zero)
    start = out + rows * 4
    scale: tl.constexpr = 5.9604644775390625e-08  # 2**-24
    tl.store(start, (first >> 8).to(tl.float32) * scale, mask=is_row)
    tl.store(start + 1, (second >> 8).to(tl.float32) * scale, mask=is_row)
    tl.store(start + 2, (third >> 8).to(tl.float32) * scale, mask=is_row)
    tl.store(start + 3, (fourth >> 8).to(tl.float32) * scale, mask=is_row)
