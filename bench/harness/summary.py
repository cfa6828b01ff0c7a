"""What a recording amounts to: rates, percentiles of times, errors, goodput; and ours beside the peer's.

Rates count a request by the part of its life that lies in the window: half of it, half a request. So a window is
fair to requests that are nearly as long as itself. Percentiles are of the requests that began in the window, and so
is the goodput of an open loop, which sets out with nothing running: of what was sent, how much came in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from bench.harness.closed_loop import Sample, Window
from bench.harness.load import Recording

PERCENTILES = (50, 90, 99)
Percentiles = dict[str, float]


@dataclass(frozen=True, slots=True)
class Objective:
    """When an answer came fast enough: its first token, and on average each one after."""

    first_token_ms: float
    per_token_ms: float

    def is_met(self, sample: Sample) -> bool:
        """Whether a request succeeded in time."""
        if sample.error or not sample.arrivals:
            return False
        return first_token_ms(sample) <= self.first_token_ms and (per_token_ms(sample) or 0.0) <= self.per_token_ms


@dataclass(frozen=True, slots=True)
class Row:
    """One load and how the server fared under it. The same fields, whichever engine answered."""

    workload: str
    load: float
    """Requests kept running, or requests sent per second."""
    is_open: bool
    window_s: float
    num_requests: int
    """Requests that began in the window."""
    errors: dict[str, int]
    wrong_lengths: int
    """Answers that were not as long as asked; the rates count their true length."""
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float
    """Requests per second that met the objective."""
    first_token_ms: Percentiles = field(default_factory=dict)
    inter_token_ms: Percentiles = field(default_factory=dict)
    per_token_ms: Percentiles = field(default_factory=dict)
    """Time per output token after the first, one value per request."""
    total_ms: Percentiles = field(default_factory=dict)
    hit_share: float = 0.0
    """Of the answers, those to prompts of which the server had keys and values."""
    busiest_client: float = 0.0
    """Cores that the busiest load process used; near 1 the row measures the client."""
    client_lag_ms: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Plain values, with six digits that count."""
        return asdict(self, dict_factory=lambda items: {name: _rounded(value) for name, value in items})


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def summarise(
    workload: str, load: float, recording: Recording, num_tokens: int, objective: Objective, *, is_open: bool
) -> Row:
    """The row of one recording of requests for `num_tokens` tokens each."""
    window = recording.window
    began = [sample for sample in recording.samples if window.start <= sample.started < window.end]
    # A window shorter than one answer has none that began in it; what it overlaps has to do.
    counted = began or list(recording.samples)
    if is_open:
        goodput_per_s = sum(objective.is_met(sample) for sample in began) / window.duration_s
    else:
        goodput_per_s = _rate(recording.samples, window, lambda sample: float(objective.is_met(sample)))
    good = [sample for sample in counted if not sample.error]
    return Row(
        workload=workload,
        load=load,
        is_open=is_open,
        window_s=window.duration_s,
        num_requests=len(counted),
        errors=dict(Counter(sample.error for sample in counted if sample.error)),
        wrong_lengths=sum(sample.num_tokens != num_tokens for sample in good),
        requests_per_s=_rate(recording.samples, window, lambda sample: 1.0),
        tokens_per_s=_rate(recording.samples, window, lambda sample: float(sample.num_tokens)),
        goodput_per_s=goodput_per_s,
        first_token_ms=percentiles(first_token_ms(sample) for sample in good if sample.arrivals),
        inter_token_ms=percentiles(1e3 * gap for sample in good for gap in np.diff(sample.arrivals)),
        per_token_ms=percentiles(value for sample in good if (value := per_token_ms(sample)) is not None),
        total_ms=percentiles(1e3 * (sample.ended - sample.started) for sample in good),
        hit_share=sum(sample.num_cached_tokens > 0 for sample in good) / max(len(good), 1),
        busiest_client=recording.busiest_client,
        client_lag_ms=recording.client_lag_ms,
    )


def first_token_ms(sample: Sample) -> float:
    """From sending to the first piece of the answer."""
    return 1e3 * (sample.arrivals[0] - sample.started)


def per_token_ms(sample: Sample) -> float | None:
    """The average over the tokens after the first piece; None where there is none."""
    num_tokens = sample.num_tokens - sample.num_first_tokens
    if num_tokens < 1 or not sample.arrivals:
        return None
    return 1e3 * (sample.ended - sample.arrivals[0]) / num_tokens


def percentiles(values: Iterable[float]) -> Percentiles:
    """`{"p50": …}`; empty where there are no values."""
    numbers = np.fromiter(values, dtype=np.float64)
    if not numbers.size:
        return {}
    return {f"p{rank}": float(np.percentile(numbers, rank)) for rank in PERCENTILES}


def _rate(samples: Iterable[Sample], window: Window, worth: Callable[[Sample], float]) -> float:
    """What successful requests are worth per second, each by its share in the window."""
    total = 0.0
    for sample in samples:
        overlap_s = min(sample.ended, window.end) - max(sample.started, window.start)
        if not sample.error and overlap_s > 0:
            total += worth(sample) * overlap_s / (sample.ended - sample.started)
    return total / window.duration_s
