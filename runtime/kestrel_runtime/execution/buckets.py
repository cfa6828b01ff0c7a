"""Chooses the sizes of steps that have captured graphs. A step between two sizes is padded to the larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SINGLE_STEP_TOKENS, _LARGE_FROM_TOKENS = 64, 1024
_TOKEN_STEPS = ((256, 64), (_LARGE_FROM_TOKENS, 128))
"""Pairs for steps with several chunks: sizes up to so many tokens grow by this increment; larger ones by
`_LARGE_STEP_TOKENS`.
"""
_LARGE_STEP_TOKENS, _MIXED_STEP_TOKENS = 256, 512
"""Increments of larger sizes; the second is for long steps with many chunks, which are mixtures of all kinds."""
_SHORT_CHUNK = 64
_SHORT_CHUNK_COUNTS, _LONG_CHUNK_COUNTS = (4, 16, 64), (8, 64)
"""Numbers of chunks that have sizes of their own: where all chunks are short, and elsewhere, since a chunk of
padding costs little next to a long one.
"""
_USUAL_TEXT_TOKENS = (8, 16, 24, 32, 40)
"""Tokens of usual questions about an image, template included."""
_TYPICAL_TEXT_TOKENS = 16
_COARSE_RATIO = 4
"""The least ratio of a coarse size to the next smaller one of its kind."""
_SMALLEST_COARSE_BATCH = 8
"""The smallest coarse batch of several sequences. Smaller ones read the same weights."""


class DecodeSize(NamedTuple):
    """The size of a decode step."""

    num_rows: int
    max_pages: int
    """Columns of the page tables that are read."""


class PrefillSize(NamedTuple):
    """The size of a prefill step."""

    num_tokens: int
    num_chunks: int
    max_chunk: int
    """Tokens of the longest chunk."""
    num_samples: int
    """Tokens that are sampled."""
    max_pages: int

    @classmethod
    def bucket(cls, num_tokens: int, num_chunks: int, max_chunk: int, largest: PrefillSize) -> PrefillSize:
        """Returns the next size with a graph of its own.

        It samples after each chunk, and may be larger than `largest`.
        """
        if num_chunks == 1:
            step = _SINGLE_STEP_TOKENS if num_tokens <= _LARGE_FROM_TOKENS else _LARGE_STEP_TOKENS
            padded = _rounded_up(num_tokens, step)
            return cls(padded, 1, padded, 1, largest.max_pages)
        longest, counts = _SHORT_CHUNK, _SHORT_CHUNK_COUNTS
        if max_chunk > _SHORT_CHUNK:
            longest, counts = _power_of_two(max_chunk), _LONG_CHUNK_COUNTS
        chunks = next((count for count in counts if count >= num_chunks), _power_of_two(num_chunks))
        if chunks > largest.num_chunks >= num_chunks:
            chunks = largest.num_chunks
        step = next((step for most, step in _TOKEN_STEPS if num_tokens <= most), _LARGE_STEP_TOKENS)
        if chunks >= _LONG_CHUNK_COUNTS[-1] and num_tokens > 2 * _LARGE_FROM_TOKENS:
            step = _MIXED_STEP_TOKENS
        samples = min(chunks, largest.num_samples)
        return cls(_rounded_up(num_tokens, step), chunks, longest, samples, largest.max_pages)

    @classmethod
    def usual(
        cls,
        positions_per_image: int,
        largest: PrefillSize,
        *,
        max_tokens: int,
        max_prompts: int,
        max_context: int,
        shares_prefixes: bool,
        cuts_at_share_points: bool,
    ) -> list[PrefillSize]:
        """Returns the sizes of one prompt of moderate length, and of several short questions about an image each;
        the largest first.

        With `shares_prefixes` some or all of the images are cached. With `cuts_at_share_points` a question and its
        image are two chunks.
        """
        longest = min(max_tokens, _LARGE_FROM_TOKENS)
        sizes = {cls.bucket(length, 1, length, largest) for length in range(1, longest + 1)}
        chunks_of_image = 2 if cuts_at_share_points else 1
        for text in _USUAL_TEXT_TOKENS:
            length = positions_per_image + text
            for num_images in range(min(max_prompts, max_tokens // length) + 1):
                left = min(max_prompts - num_images, (max_tokens - num_images * length) // text)
                max_chunk = length if num_images else text
                for num_known in range(left + 1) if shares_prefixes else (0,):
                    num_chunks = num_images * chunks_of_image + num_known
                    if num_chunks:
                        tokens = num_images * length + num_known * text
                        sizes.add(cls.bucket(tokens, num_chunks, max_chunk, largest))
        # A chunk is no longer than a context.
        return sorted((size for size in sizes if size.num_tokens <= size.num_chunks * max_context), reverse=True)

    @classmethod
    def coarse(
        cls, usual: Sequence[PrefillSize], positions_per_image: int, largest: PrefillSize, *, chunks_of_image: int
    ) -> list[PrefillSize]:
        """Returns the few usual sizes with which a server begins, the largest first. Each usual one fits into one.

        Up to eight new images with a typical question have sizes of their own, since padding costs as much as
        tokens.
        """
        kept: set[PrefillSize] = set()
        length = positions_per_image + _TYPICAL_TEXT_TOKENS
        for num_images in range(1, largest.num_tokens // length + 1):
            own = cls.bucket(num_images * length, num_images * chunks_of_image, length, largest)
            if own.num_chunks <= _LONG_CHUNK_COUNTS[0]:
                kept.update({own}.intersection(usual))
        least: dict[tuple[int, int], int] = {}  # tokens of the last one kept, by kind
        for size in sorted(usual, reverse=True):
            kind = size.num_chunks, 0 if size.num_chunks == 1 else size.max_chunk
            if size.num_tokens * _COARSE_RATIO <= least.get(kind, size.num_tokens * _COARSE_RATIO):
                least[kind] = size.num_tokens
                kept.add(size)
        return sorted(kept, reverse=True)

    def holds(self, other: PrefillSize) -> bool:
        """Returns whether a step of the other size fits into this one."""
        return all(own >= its for own, its in zip(self, other, strict=True))


def coarse_batch_sizes(max_batch_size: int) -> list[int]:
    """Returns those of `batch_sizes` with which a server begins: 1, and from 8 on each half of the next."""
    sizes = [max_batch_size]
    for size in reversed(batch_sizes(max_batch_size)):
        if size == 1 or (size >= _SMALLEST_COARSE_BATCH and 2 * size <= sizes[-1]):
            sizes.append(size)
    return sorted(set(sizes))


def batch_sizes(max_batch_size: int) -> list[int]:
    """Returns 1, 2, 4, 8, then steps of a half: few sizes, with one near above every batch."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


def largest_prefill(
    max_tokens: int, max_prompts: int, max_pages: int, *, cuts_at_share_points: bool = False
) -> PrefillSize:
    """Returns the largest size with a graph, for buffers that all sizes share."""
    step = _MIXED_STEP_TOKENS if max_tokens > 2 * _LARGE_FROM_TOKENS else _LARGE_STEP_TOKENS
    tokens, prompts = _rounded_up(max_tokens, step), _power_of_two(max_prompts)
    return PrefillSize(tokens, prompts * (1 + cuts_at_share_points), tokens, prompts, max_pages)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
