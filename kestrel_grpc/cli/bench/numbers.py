"""Computes rates, percentiles of times, statuses and goodput of a recording, under the names of ghz and of vLLM.

Rates count a request by the share of its duration that lies in the window: a request that lies half in it counts as
a half. So a window is fair to requests that are nearly as long as itself. Percentiles cover the requests that began
in the window. So does the goodput of an open loop, which starts without running requests: it is the share of the
sent requests that were answered in time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from kestrel_grpc.cli.bench.loops import Sample, Window
from kestrel_grpc.cli.bench.processes import Recording

PERCENTILES = (50, 90, 95, 99)
OK = "OK"
_GHZ_PERCENTILES = (10, 25, 50, 75, 90, 95, 99)
_NUM_BUCKETS = 10
_PARTS: Mapping[int, float] = MappingProxyType({8: 2.365, 4: 3.182})
"""The numbers of parts of a window whose differences show how exact the numbers of the whole are.

Each has Student's t: 95% of the values lie within so many standard errors, given that number of values.
"""
_LEAST_PER_PART = 5
_NUM_POINTS = 40
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Objective:
    """Defines the longest times of a fast answer, in milliseconds; None if a time does not matter."""

    first_token_ms: float | None = None
    per_token_ms: float | None = None
    """The average over the tokens after the first piece."""
    total_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `first_token_ms=500,per_token_ms=50`. Raises ValueError."""
        names = [field.name for field in fields(cls)]
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                bounds[name] = float(value)
            except ValueError:
                bounds[name] = math.nan
            if name not in names or not bounds[name] > 0.0:
                raise ValueError(f"{part!r}: must be one of {', '.join(names)}, =, and milliseconds above 0")
        return cls(**bounds)

    @property
    def is_any(self) -> bool:
        """True if any time matters."""
        return any(getattr(self, field.name) is not None for field in fields(self))

    def is_met(self, sample: Sample) -> bool:
        """Returns True if a request succeeded in time."""
        if sample.error or not sample.arrivals:
            return False
        return (
            first_token_ms(sample) <= _bound(self.first_token_ms)
            and (per_token_ms(sample) or 0.0) <= _bound(self.per_token_ms)
            and total_ms(sample) <= _bound(self.total_ms)
        )

    def __str__(self) -> str:
        words = {"first_token_ms": "first token", "per_token_ms": "each further token", "total_ms": "whole answer"}
        bounds = ((words[field.name], getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} within {bound:g} ms" for name, bound in bounds if bound is not None)


def _bound(value: float | None) -> float:
    return math.inf if value is None else value


def first_token_ms(sample: Sample) -> float:
    """Returns the time from sending to the first piece of the answer, in milliseconds."""
    return 1e3 * (sample.arrivals[0] - sample.started)


def per_token_ms(sample: Sample) -> float | None:
    """Returns the average over the tokens after the first piece, in milliseconds; None if there are none."""
    num_tokens = sample.num_tokens - sample.num_first_tokens
    if num_tokens < 1 or not sample.arrivals:
        return None
    return 1e3 * (sample.ended - sample.arrivals[0]) / num_tokens


def total_ms(sample: Sample) -> float:
    """Returns the time from sending to the end of the answer, in milliseconds."""
    return 1e3 * (sample.ended - sample.started)


def rate(samples: Iterable[Sample], window: Window, worth: Callable[[Sample], float]) -> float:
    """Returns the sum of `worth` over the requests, each weighted by its share in the window, per second."""
    total = 0.0
    for sample in samples:
        overlap_s = min(sample.ended, window.end) - max(sample.started, window.start)
        if overlap_s > 0:
            total += worth(sample) * overlap_s / (sample.ended - sample.started)
    return total / max(window.duration_s, 1e-9)


def began_in(window: Window, samples: Iterable[Sample]) -> list[Sample]:
    """Returns the requests that percentiles cover.

    These began in the window or, if none did because answers take longer, overlap it.
    """
    samples = list(samples)
    return [sample for sample in samples if window.start <= sample.started < window.end] or samples


def goodput(recording: Recording, objective: Objective, *, is_open: bool) -> float:
    """Returns the requests per second that met the objective."""
    window = recording.window
    if is_open:
        began = [sample for sample in recording.samples if window.start <= sample.started < window.end]
        return sum(objective.is_met(sample) for sample in began) / max(window.duration_s, 1e-9)
    return rate(recording.samples, window, lambda sample: float(objective.is_met(sample)))


def percentiles(values: Iterable[float], ranks: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Returns `{"p50": …}`; empty if there are no values."""
    numbers = np.fromiter(values, dtype=np.float64)
    if not numbers.size:
        return {}
    return {f"p{rank}": float(np.percentile(numbers, rank)) for rank in ranks}


Times = Callable[[Sequence[Sample]], list[float]]
TIMES: tuple[tuple[str, Times], ...] = (
    ("ttft", lambda good: [first_token_ms(sample) for sample in good if sample.arrivals]),
    ("tpot", lambda good: [value for sample in good if (value := per_token_ms(sample)) is not None]),
    ("itl", lambda good: [1e3 * float(gap) for sample in good for gap in np.diff(sample.arrivals)]),
    ("e2el", lambda good: [total_ms(sample) for sample in good]),
)
"""vLLM's short names of the times, and the values in milliseconds: to the first token, per token after it, between
two pieces, and to the end."""
RATES: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("request_throughput", lambda sample: float(not sample.error)),
    ("output_throughput", lambda sample: 0.0 if sample.error else float(sample.num_tokens)),
    (
        "total_token_throughput",
        lambda sample: 0.0 if sample.error else float(sample.num_input_tokens + sample.num_tokens),
    ),
)


def numbers(recording: Recording, objective: Objective, *, is_open: bool) -> dict[str, Any]:
    """Returns the numbers of a recording: latencies of ghz in nanoseconds, those of vLLM in milliseconds."""
    window, samples = recording.window, recording.samples
    counted = began_in(window, samples)
    good = [sample for sample in counted if not sample.error]
    return {
        **_ghz(window, samples, counted, good),
        **_vllm(recording, good, counted, objective, is_open=is_open),
        "uncertainty": _uncertainty(recording, good, objective, is_open=is_open),
        "timeline": _timeline(window, samples, good),
        "is_partial": recording.is_partial,
        "busiest_client": recording.busiest_client,
        "client_lag_ms": recording.client_lag_ms,
    }


def _ghz(window: Window, samples: Sequence[Sample], counted: list[Sample], good: list[Sample]) -> dict[str, Any]:
    seconds = np.array([sample.ended - sample.started for sample in good])
    failed = [sample for sample in counted if sample.error]
    statuses = Counter(sample.error or OK for sample in counted)
    messages = Counter(sample.message or sample.error for sample in failed)
    return {
        "count": len(counted),
        "total": round(_NS * window.duration_s),
        "average": _ns(seconds.mean()) if good else 0,
        "fastest": _ns(seconds.min()) if good else 0,
        "slowest": _ns(seconds.max()) if good else 0,
        "rps": rate(samples, window, lambda sample: 1.0),
        "statusCodeDistribution": dict(statuses.most_common()),
        "errorDistribution": dict(messages.most_common()),
        "latencyDistribution": [
            {"percentage": rank, "latency": _ns(np.percentile(seconds, rank))} for rank in _GHZ_PERCENTILES if good
        ],
        "histogram": _histogram(seconds),
    }


def _ns(seconds: Any) -> int:
    return round(_NS * float(seconds))


def _histogram(seconds: Any) -> list[dict[str, Any]]:
    """Returns buckets that end at their marks, in seconds; the first holds the fastest alone."""
    if not seconds.size:
        return []
    marks = np.linspace(seconds.min(), seconds.max(), _NUM_BUCKETS + 1)
    # A value equal to a mark belongs below it, as does a value that rounding has moved beyond the last mark.
    buckets = np.minimum(np.searchsorted(marks, seconds, side="left"), _NUM_BUCKETS)
    counts = np.bincount(buckets, minlength=_NUM_BUCKETS + 1)
    return [
        {"mark": float(mark), "count": int(count), "frequency": float(count / seconds.size)}
        for mark, count in zip(marks, counts, strict=True)
    ]


def _vllm(
    recording: Recording, good: list[Sample], counted: list[Sample], objective: Objective, *, is_open: bool
) -> dict[str, Any]:
    window = recording.window
    found: dict[str, Any] = {
        "duration": window.duration_s,
        "completed": len(good),
        "failed": len(counted) - len(good),
        "total_input_tokens": sum(sample.num_input_tokens for sample in good),
        "total_cached_tokens": sum(sample.num_cached_tokens for sample in good),
        "total_output_tokens": sum(sample.num_tokens for sample in good),
    }
    found |= {name: rate(recording.samples, window, worth) for name, worth in RATES}
    found["request_goodput"] = goodput(recording, objective, is_open=is_open) if objective.is_any else None
    for name, times in TIMES:
        values = np.array(times(good))
        found |= {
            f"mean_{name}_ms": float(values.mean()) if values.size else None,
            f"median_{name}_ms": float(np.median(values)) if values.size else None,
            f"std_{name}_ms": float(values.std()) if values.size else None,
        }
        spread = percentiles(values, PERCENTILES[1:])
        found |= {f"p{rank}_{name}_ms": spread.get(f"p{rank}") for rank in PERCENTILES[1:]}
    return found


def _uncertainty(
    recording: Recording, good: list[Sample], objective: Objective, *, is_open: bool
) -> dict[str, float | None]:
    """Returns the uncertainty of the rates, medians and 99th percentiles; None if the parts have too few requests.

    The uncertainty is half the width of the 95% interval as a share of the value, from the differences between
    parts of the window.
    """
    parts, by_part = _comparable_parts(recording.window, good)
    found: dict[str, float | None] = {}
    for name, worth in RATES:
        found[name] = _half_width([rate(recording.samples, part, worth) for part in parts])
    in_time = [goodput(replace(recording, window=part), objective, is_open=is_open) for part in parts]
    found["request_goodput"] = _half_width(in_time) if objective.is_any else None
    for name, times in TIMES:
        values = [times(part) for part in by_part]
        for label, rank in ((f"median_{name}_ms", 50), (f"p99_{name}_ms", 99)):
            found[label] = (
                _half_width([float(np.percentile(part, rank)) for part in values]) if all(values) else None
            )
    return found


def _comparable_parts(window: Window, good: list[Sample]) -> tuple[Sequence[Window], list[list[Sample]]]:
    """Returns the parts of the window and the requests that began in each: as many parts as have enough requests.

    Both are empty if no number of parts has.
    """
    for count in _PARTS if window.duration_s > 0.0 else ():
        parts = window.parts(count)
        by_part = [[sample for sample in good if part.start <= sample.started < part.end] for part in parts]
        if min(map(len, by_part)) >= _LEAST_PER_PART:
            return parts, by_part
    return (), []


def _half_width(values: list[float]) -> float | None:
    if not values or (mean := np.mean(values)) <= 0.0:
        return None
    return float(_PARTS[len(values)] * np.std(values, ddof=1) / math.sqrt(len(values)) / mean)


def _timeline(window: Window, samples: Sequence[Sample], good: list[Sample]) -> dict[str, Any]:
    """Returns the course of the window in equal parts: rates, and medians of the requests that began in each."""
    count = max(1, min(_NUM_POINTS, len(good) // _LEAST_PER_PART))
    parts = window.parts(count)
    found: dict[str, Any] = {"interval_s": window.duration_s / count}
    found |= {name: [rate(samples, part, worth) for part in parts] for name, worth in RATES}
    for name, times in TIMES:
        if name in ("ttft", "e2el"):
            values = [times([item for item in good if part.start <= item.started < part.end]) for part in parts]
            found[f"median_{name}_ms"] = [float(np.median(part)) if part else None for part in values]
    return found
