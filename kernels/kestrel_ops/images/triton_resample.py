"""Resizes 8-bit pixels along one axis. Reads only the few source pixels of each result."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import QuickLauncher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.images.reference import RESAMPLE_WEIGHT_BITS
from kestrel_ops.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Blocks:
    """Describes the block of one program."""

    num_bytes: int = 512
    """Bytes of each row."""
    num_rows: int = 4
    num_warps: int = 4


def resample(
    pixels: Tensor,  # [height, width, channels] uint8, contiguous; channels behind the third are padding
    taps: Tensor,  # [1 + K, length] int32: first source places, then the weights of K places from there on
    dim: int,  # 0 resamples rows, 1 columns
    windows: Tensor | None = None,  # [N, 2] int32: the first row and column of parts of the result
    side: int = 0,  # rows and columns of each window
    blocks: Blocks = Blocks(),
) -> Tensor:  # uint8, contiguous: `length` rows or columns, the other axis as it was; or [N, side, side, channels]
    """Resamples one dimension of images. Same contract as `reference.resample`.

    Programs compute blocks of the result's bytes: some rows, and a part of each.
    """
    height, width, source_channels = pixels.shape
    num_weights, length = taps.shape[0] - 1, taps.shape[1]
    channels = min(source_channels, 3)
    assert pixels.is_contiguous()
    assert taps.is_contiguous()
    if windows is None:
        rows, columns = (length, width) if dim == 0 else (height, length)
        resampled = pixels.new_empty(rows, columns, channels)
    else:
        rows = columns = side
        resampled = pixels.new_empty(len(windows), side, side, channels)
    row_bytes = columns * channels
    num_parts = 1 if windows is None else len(windows)
    grid = (triton.cdiv(row_bytes, blocks.num_bytes), triton.cdiv(rows, blocks.num_rows), num_parts)
    _launch(
        grid,
        pixels,
        taps,
        taps if windows is None else windows,
        resampled,
        rows,
        row_bytes,
        width,
        length,
        num_weights,
        channels=channels,
        source_channels=source_channels,
        of_rows=dim == 0,
        has_windows=windows is not None,
        weight_bits=RESAMPLE_WEIGHT_BITS,
        half=1 << (RESAMPLE_WEIGHT_BITS - 1),
        num_rows=blocks.num_rows,
        num_bytes=blocks.num_bytes,
        num_warps=blocks.num_warps,
    )
    return resampled


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model. Images may have up to 2^31 bytes."""
    return unsupported_device(model)


# Sizes of images have any value, so kernels are not specialised for them.
@triton.jit(do_not_specialize=["rows", "row_bytes", "width", "length", "num_weights"])
def _resample(
    pixels,
    taps,
    windows,
    resampled,
    rows,
    row_bytes,
    width,  # of the source
    length,
    num_weights,
    channels: tl.constexpr,
    source_channels: tl.constexpr,
    of_rows: tl.constexpr,
    has_windows: tl.constexpr,
    weight_bits: tl.constexpr,
    half: tl.constexpr,
    num_rows: tl.constexpr,
    num_bytes: tl.constexpr,
):
    byte = tl.program_id(0) * num_bytes + tl.arange(0, num_bytes)
    row = tl.program_id(1) * num_rows + tl.arange(0, num_rows)
    part = tl.program_id(2)
    inside = (row < rows)[:, None] & (byte < row_bytes)[None, :]
    source_row, column = row, byte // channels
    if has_windows:
        source_row += tl.load(windows + 2 * part)
        column += tl.load(windows + 2 * part + 1)
    if of_rows:
        place, in_axis, step = source_row, row < rows, width * source_channels
        source_row = tl.load(taps + place, mask=in_axis, other=0)
    else:
        place, in_axis, step = column, byte < row_bytes, source_channels
        column = tl.load(taps + place, mask=in_axis, other=0)
    source = (source_row * width * source_channels)[:, None] + (column * source_channels + byte % channels)[None, :]
    weights = taps + length + place
    across: tl.constexpr = 1 if of_rows else 0
    total = tl.full((num_rows, num_bytes), half, tl.int32)
    num_left = num_weights
    while num_left > 0:
        weight = tl.load(weights, mask=in_axis, other=0)
        total += tl.load(pixels + source, mask=inside, other=0).to(tl.int32) * tl.expand_dims(weight, across)
        weights += length
        source += step
        num_left -= 1
    rounded = tl.minimum(tl.maximum(total >> weight_bits, 0), 255)
    result = ((part * rows + row) * row_bytes)[:, None] + byte[None, :]
    tl.store(resampled + result, rounded.to(tl.uint8), mask=inside)


_launch = QuickLauncher(_resample)
