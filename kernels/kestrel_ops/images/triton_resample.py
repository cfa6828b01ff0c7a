"""Resizes 8-bit pixels along one axis. Reads only the few source pixels of each result."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.images.reference import RESAMPLE_WEIGHT_BITS
from kestrel_ops.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Blocks:
    """Describes the block of one program."""

    num_bytes: int = 512
    """Bytes of each row."""
    num_rows: int = 4
    """Rows that use the same weights."""
    num_warps: int = 4


def resample(
    pixels: Tensor,  # [height, width, channels] uint8, contiguous
    taps: Tensor,  # [1 + K, length] int32: first source places, then the weights of K places from there on
    dim: int,  # 0 resamples rows, 1 columns
    blocks: Blocks = Blocks(),
) -> Tensor:  # uint8, contiguous: `length` rows or columns, the other axis as it was
    """Resamples one dimension of images. Same contract as `reference.resample`.

    Programs compute blocks of the result's bytes; the bytes of a row are contiguous.
    """
    height, width, channels = pixels.shape
    num_weights, length = taps.shape[0] - 1, taps.shape[1]
    assert pixels.is_contiguous()
    assert taps.is_contiguous()
    if dim == 0:
        resampled = pixels.new_empty(length, width, channels)
        rows, source_row, result_row, step = 1, 0, length * width * channels, width * channels
    else:
        resampled = pixels.new_empty(height, length, channels)
        rows, source_row, result_row, step = height, width * channels, length * channels, channels
    rows_per_program = 1 if rows == 1 else blocks.num_rows  # no other value, which would be compiled separately
    grid = (triton.cdiv(result_row, blocks.num_bytes), triton.cdiv(rows, rows_per_program))
    launcher(_resample, grid)(
        pixels,
        taps,
        resampled,
        rows,
        source_row,
        result_row,
        step,
        length,
        num_weights,
        weight_bits=RESAMPLE_WEIGHT_BITS,
        half=1 << (RESAMPLE_WEIGHT_BITS - 1),
        rows_per_program=rows_per_program,
        num_bytes=blocks.num_bytes,
        num_warps=blocks.num_warps,
    )
    return resampled


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model. Images may have up to 2^31 bytes."""
    return unsupported_device(model)


# Sizes of images have any value, so kernels are not specialised for them.
@triton.jit(do_not_specialize=["rows", "source_row", "result_row", "step", "length", "num_weights"])
def _resample(
    pixels,
    taps,
    resampled,
    rows,
    source_row,
    result_row,
    step,  # bytes between neighbouring source pixels
    length,
    num_weights,
    weight_bits: tl.constexpr,
    half: tl.constexpr,
    rows_per_program: tl.constexpr,
    num_bytes: tl.constexpr,
):
    byte = tl.program_id(0) * num_bytes + tl.arange(0, num_bytes)
    row = tl.program_id(1) * rows_per_program + tl.arange(0, rows_per_program)
    in_row = byte < result_row
    place = byte // step
    first = tl.load(taps + place, mask=in_row, other=0)
    inside = in_row[None, :] & (row < rows)[:, None]
    source = pixels + row.to(tl.int64)[:, None] * source_row + (first * step + byte % step)[None, :]
    weights = taps + length + place
    total = tl.full((rows_per_program, num_bytes), half, tl.int32)
    num_left = num_weights
    while num_left > 0:
        weight = tl.load(weights, mask=in_row, other=0)
        total += tl.load(source, mask=inside, other=0).to(tl.int32) * weight[None, :]
        weights += length
        source += step
        num_left -= 1
    rounded = tl.minimum(tl.maximum(total >> weight_bits, 0), 255)
    tl.store(resampled + row.to(tl.int64)[:, None] * result_row + byte[None, :], rounded.to(tl.uint8), mask=inside)
