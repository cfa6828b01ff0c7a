"""Hashes words of pixels in one pass over them. Programs add their parts, in any order, modulo 2^64."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import QuickLauncher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.shapes import ModelShape

_NUM_WORDS = 4096
"""Words of one program: 243 programs share nine crops of Moondream."""


def hash_words(
    words: Tensor,  # [N, W] int32, contiguous
    multipliers: Tensor,  # [F, W] int64, contiguous
) -> Tensor:  # [N, F] int64
    """Sums words times multipliers modulo 2^64. Same contract as `reference.hash_words`."""
    count, num_words = words.shape
    assert words.is_contiguous()
    assert multipliers.is_contiguous()
    sums = multipliers.new_zeros(count, len(multipliers))
    grid = (triton.cdiv(num_words, _NUM_WORDS), count, 1)
    _launch(grid, words, multipliers, sums, num_words, num_sums=len(multipliers), block=_NUM_WORDS, num_warps=8)
    return sums


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model."""
    return unsupported_device(model)


@triton.jit(do_not_specialize=["num_words"])
def _hash_words(words, multipliers, sums, num_words, num_sums: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1)
    inside = place < num_words
    word = tl.load(words + row.to(tl.int64) * num_words + place, mask=inside, other=0).to(tl.int64)
    for number in tl.static_range(num_sums):
        factor = tl.load(multipliers + number * num_words + place, mask=inside, other=0)
        tl.atomic_add(sums + row * num_sums + number, tl.sum(word * factor, axis=0), sem="relaxed")


_launch = QuickLauncher(_hash_words)
