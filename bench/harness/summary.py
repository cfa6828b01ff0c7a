"""A row of results: what a recording of a workload amounts to, by the definitions of `kestrel-grpc bench`."""

from collections import Counter
from dataclasses import asdict, dataclass, field

from kestrel_grpc.cli.bench.numbers import RATES, TIMES, Objective, began_in, goodput, percentiles, rate
from kestrel_grpc.cli.bench.processes import Recording

PERCENTILES = (50, 90, 99)
Percentiles = dict[str, float]


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
    encoded_crops: float | None = None
    """Crops that the server encoded for each picture; None where it did not say so."""
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
    counted = began_in(window, recording.samples)
    good = [sample for sample in counted if not sample.error]
    times, rates = dict(TIMES), dict(RATES)
    return Row(
        workload=workload,
        load=load,
        is_open=is_open,
        window_s=window.duration_s,
        num_requests=len(counted),
        errors=dict(Counter(sample.error for sample in counted if sample.error)),
        wrong_lengths=sum(sample.num_tokens != num_tokens for sample in good),
        requests_per_s=rate(recording.samples, window, rates["request_throughput"]),
        tokens_per_s=rate(recording.samples, window, rates["output_throughput"]),
        goodput_per_s=goodput(recording, objective, is_open=is_open),
        first_token_ms=percentiles(times["ttft"](good), PERCENTILES),
        inter_token_ms=percentiles(times["itl"](good), PERCENTILES),
        per_token_ms=percentiles(times["tpot"](good), PERCENTILES),
        total_ms=percentiles(times["e2el"](good), PERCENTILES),
        hit_share=sum(sample.num_cached_tokens > 0 for sample in good) / max(len(good), 1),
        busiest_client=recording.busiest_client,
        client_lag_ms=recording.client_lag_ms,
    )
