"""Implements histograms for Prometheus to which adding a value is cheap.

Histograms of Prometheus' client lock every bucket, since any thread may add to them. Here one thread adds and any
thread reads: a reader may miss a value that is being added, but counts never decrease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """Counts the values under one set of labels."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value, in the unit of the bounds: in the first bucket whose bound is not below the value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[int], float]:
        """Returns the number of values at or below each bound, then of all values; and the sum of all values."""
        total = self._sum
        return list(accumulate(tuple(self._counts))), total


class Histogram(Collector):
    """Represents one metric with its series.

    `bounds` rise; the last bucket has none. A metric without labels has its series from the start.
    """

    def __init__(
        self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._bound_names = [*map(floatToGoString, bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.series()
        registry.register(self)

    def series(self, *values: str) -> Series:
        """Returns the series under these values of the labels. The first call makes it."""
        assert len(values) == len(self._labels), f"{self._name} has the labels {self._labels}"
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields the metric in the form that Prometheus reads."""
        family = self._family()
        for values, series in tuple(self._series.items()):
            counts, total = series.read()
            family.add_metric(values, list(zip(self._bound_names, counts, strict=True)), total)
        yield family

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yields the name of the metric, without samples."""
        yield self._family()

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._help, labels=self._labels)
