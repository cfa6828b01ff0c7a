"""Divides the positions of a prompt between its images and its tokens. The first token (BOS) is at position 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kestrel_runtime.output.output_parser import Token


class ImagePlace(Protocol):
    """The positions of an image."""

    @property
    def start(self) -> int:
        """The first of its positions."""
        ...

    @property
    def num_positions(self) -> int:
        """The number of its positions."""
        ...


def bidirectional_spans(images: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the spans that attend to themselves both ways, for images at positions [start, end).

    The positions of an image attend to each other. The first token (BOS) is part of the span of an image that
    follows it directly. No step divides a span.
    """
    return tuple([(0 if start == 1 else start, end) for start, end in images if start < end])


def text_runs(
    tokens: Sequence[Token], images: Iterable[ImagePlace], start: int, end: int
) -> Iterator[tuple[int, Sequence[Token]]]:
    """Yields the tokens at positions [start, end), in runs between images: the first position of each run, and its
    tokens.

    `tokens` are all that are not of images, which are in the order of their positions.
    """
    position, num_image_positions = start, 0
    for image in images:
        stop = min(image.start, end)
        if position < stop:
            yield position, tokens[position - num_image_positions : stop - num_image_positions]
        position = max(position, image.start + image.num_positions)
        num_image_positions += image.num_positions
    if position < end:
        yield position, tokens[position - num_image_positions : end - num_image_positions]
