"""Computes 95 % intervals of scores by the bootstrap, which draws whole pictures.

Questions about one picture share its difficulties, so they are no independent samples. A resample therefore draws
as many pictures as there are, with replacement, and takes all questions about each of them: the cluster bootstrap
(Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8). The draws follow from a fixed
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 1000
Weights = NDArray[np.float64]
"""The number of times that a resample has each picture."""
Interval = tuple[float, float]
_SEED = 0
_TAIL_PERCENT = 2.5


def bootstrap_intervals(
    statistics: Callable[[Weights], Sequence[float]], num_pictures: int
) -> list[Interval | None]:
    """Returns the interval of each number that `statistics` computes from a resample.

    An interval is None with fewer than two pictures, or if its number is not defined (NaN) in every resample.
    """
    if num_pictures < 2:
        return [None for _ in statistics(np.ones(num_pictures))]
    rng = np.random.default_rng(_SEED)
    rows: list[Sequence[float]] = []
    for _ in range(NUM_RESAMPLES):
        drawn = rng.integers(0, num_pictures, num_pictures)
        rows.append(statistics(np.bincount(drawn, minlength=num_pictures).astype(np.float64)))
    return [_interval(column) for column in np.asarray(rows, np.float64).T]


def mean_interval(values: Sequence[float], pictures: Sequence[str]) -> Interval | None:
    """Returns the interval of the mean of values, each of which belongs to the picture of that name."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(pictures))}
    places = np.asarray([numbers[name] for name in pictures], np.intp)
    sums = np.bincount(places, weights=values, minlength=len(numbers))
    counts = np.bincount(places, minlength=len(numbers))
    return bootstrap_intervals(lambda weights: [float(weights @ sums / (weights @ counts))], len(numbers))[0]


def _interval(column: NDArray[np.float64]) -> Interval | None:
    known = column[~np.isnan(column)]
    if known.size == 0:
        return None
    low, high = np.percentile(known, (_TAIL_PERCENT, 100.0 - _TAIL_PERCENT))
    return float(low), float(high)
