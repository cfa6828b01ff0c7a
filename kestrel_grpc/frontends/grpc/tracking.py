"""Names objects through the frames of a stream, by how far their boxes overlap those of the frames before.

Pairs are taken by their overlap, the largest first. An optimal assignment, such as that of scipy's
`linear_sum_assignment`, differs only where two boxes claim the same earlier one, and a server would need scipy for
nothing else.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kestrel_runtime.api.events import Box

MIN_OVERLAP = 0.3
"""The least intersection over union of the boxes of one object in two answered frames that follow each other."""
MAX_MISSED_FRAMES = 10
"""The answered frames in a row in which an object may be missing before its name is forgotten."""


@dataclass(slots=True)
class _Track:
    id: int
    box: Box
    num_missed: int = 0


class Tracker:
    """Names the objects of one stream. The objects of each kind, which have the same text, are compared alone."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._tracks: dict[str, list[_Track]] = {}

    def name(self, kind: str, boxes: Sequence[Box]) -> list[int]:
        """Returns the name of each box of the next answered frame: that of an earlier box, or a new one, from 1
        on."""
        tracks, names = self._tracks.get(kind, []), [0] * len(boxes)
        pairs = sorted(_overlaps([track.box for track in tracks], boxes), key=lambda pair: -pair[0])
        free = set(range(len(tracks)))
        for _, place, index in pairs:
            if place in free and not names[index]:
                free.remove(place)
                names[index] = tracks[place].id
        kept = [tracks[place] for place in sorted(free)]
        for track in kept:
            track.num_missed += 1
        names = [name or next(self._ids) for name in names]
        found = [_Track(name, box) for name, box in zip(names, boxes, strict=True)]
        self._tracks[kind] = found + [track for track in kept if track.num_missed <= MAX_MISSED_FRAMES]
        return names


def _overlaps(before: Sequence[Box], now: Sequence[Box]) -> Iterator[tuple[float, int, int]]:
    """Yields the pairs of an earlier box and a box of now that overlap enough, each with its overlap."""
    places = sorted(range(len(before)), key=lambda place: before[place].x_min)
    starts = [before[place].x_min for place in places]
    for index, box in enumerate(now):
        for place in places[: bisect_left(starts, box.x_max)]:
            overlap = _overlap(before[place], box)
            if overlap >= MIN_OVERLAP:
                yield overlap, place, index


def _overlap(one: Box, two: Box) -> float:
    """Returns the intersection over union of two boxes."""
    width = min(one.x_max, two.x_max) - max(one.x_min, two.x_min)
    height = min(one.y_max, two.y_max) - max(one.y_min, two.y_min)
    if width <= 0.0 or height <= 0.0:
        return 0.0
    both = width * height
    return both / (_area(one) + _area(two) - both)


def _area(box: Box) -> float:
    return (box.x_max - box.x_min) * (box.y_max - box.y_min)
