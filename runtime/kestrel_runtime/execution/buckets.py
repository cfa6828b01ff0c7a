"""The sizes of steps that have captured graphs. A step between two sizes is padded to the larger one."""

from __future__ import annotations

from typing import NamedTuple

_STEP_TOKENS, _LARGE_STEP_TOKENS = 64, 128
_LARGE_FROM_TOKENS = 1024
"""From here on products take rows by the larger step anyway."""
_USUAL_TEXT_TOKENS = (8, 16, 24, 32, 40)
"""Of questions about an image, template included."""


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
    def bucket(
        cls, num_tokens: int, num_chunks: int, max_chunk: int, num_samples: int, max_pages: int
    ) -> PrefillSize:
        """The next size with a graph of its own. It samples at least once."""
        step = _STEP_TOKENS if num_tokens <= _LARGE_FROM_TOKENS else _LARGE_STEP_TOKENS
        padded = _rounded_up(num_tokens, step)
        if num_chunks == 1:
            return cls(padded, 1, padded, 1, max_pages)
        longest = max(_power_of_two(max_chunk), _STEP_TOKENS)
        return cls(padded, _power_of_two(num_chunks), longest, _power_of_two(max(num_samples, 1)), max_pages)

    @classmethod
    def usual(
        cls,
        positions_per_image: int,
        max_pages: int,
        *,
        max_tokens: int,
        max_prompts: int,
        max_context: int,
        shares_prefixes: bool,
        cuts_at_share_points: bool,
    ) -> list[PrefillSize]:
        """The sizes of one prompt of moderate length, and of several short questions about an image each; the
        largest first.

        With `shares_prefixes` there are steps of questions alone, whose images are cached. With
        `cuts_at_share_points` a question and its image are two chunks.
        """
        longest = min(max_tokens, _LARGE_FROM_TOKENS)
        sizes = {cls.bucket(length, 1, length, 1, max_pages) for length in range(1, longest + 1)}
        for text in _USUAL_TEXT_TOKENS:
            length = positions_per_image + text
            counts = range(1, min(max_prompts, max_tokens // length) + 1)
            if shares_prefixes:
                known = range(2, min(max_prompts, max_tokens // text) + 1)
                sizes |= {cls.bucket(count * text, count, text, count, max_pages) for count in known}
            if cuts_at_share_points:
                sizes |= {
                    cls.bucket(count * length, 2 * count, positions_per_image, count, max_pages) for count in counts
                }
            else:
                sizes |= {cls.bucket(count * length, count, length, count, max_pages) for count in counts}
        # A chunk is no longer than a context.
        return sorted((size for size in sizes if size.num_tokens <= size.num_chunks * max_context), reverse=True)


def batch_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then by half as much: few, and near enough above every batch."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


def largest_prefill(
    max_tokens: int, max_prompts: int, max_pages: int, *, cuts_at_share_points: bool = False
) -> PrefillSize:
    """The largest size with a graph, for buffers that all sizes share."""
    tokens, prompts = _rounded_up(max_tokens, _LARGE_STEP_TOKENS), _power_of_two(max_prompts)
    return PrefillSize(tokens, prompts * (1 + cuts_at_share_points), tokens, prompts, max_pages)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
