"""Defines every metric once, with the function that reads it, and records calls in them.

Names follow the OpenTelemetry conventions for RPC and generative AI where those have one; the others begin with
`kestrel`. Histograms are updated when a call ends; every other metric has a function that reads it at each scrape.
Nothing runs between scrapes, and OTLP collectors scrape the same text.
`python -m kestrel_grpc.telemetry.metrics` prints the table for the documentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import CallContext, Outcome, RequestSummary
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_grpc.calls.usage import CallerUsage
from kestrel_grpc.telemetry.device_reading import DeviceReading, device_reader
from kestrel_grpc.telemetry.histograms import Histogram, Series
from kestrel_grpc.telemetry.logs import dropped_lines
from kestrel_runtime.api.engine import CacheLoad, Engine, EngineInfo, EngineStatus, Load
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Detect, Point

PROVIDER = "kestrel"
_MAX_NAMED_ADAPTERS = 64
"""The most adapters with series of their own; requests of further adapters are counted together under `_OTHER`."""
_OTHER = "other"
_MAX_NAMED_CALLERS = 64
"""The most callers with series of their own; further callers are counted together under `_OTHER_CALLERS`."""
_NO_CALLER, _OTHER_CALLERS = "(none)", "(other)"
"""Labels that no token has as its name."""


class Kind(Enum):
    """Says how the value of a metric changes over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Holds the state of an engine from which its metrics are read at one scrape."""

    info: EngineInfo
    status: EngineStatus
    load: Load
    device: DeviceReading | None
    """The reading of the GPU; None without a GPU, or if it cannot be read."""
    num_restarts: int

    def caches(self) -> Mapping[str, CacheLoad]:
        """Returns the caches of the engine, by tier."""
        load = self.load
        return {"crops": load.crop_cache, "embeddings": load.image_cache, "prefix_pages": load.prefix_cache}


@dataclass(frozen=True, slots=True)
class Reading:
    """Holds the state of one process from which its metrics are read at one scrape."""

    engine: EngineReading | None = None
    """The reading of the engine; None in a process without an engine."""
    caches: Mapping[str, CacheLoad] = field(default_factory=dict)
    """The load of each cache, by tier."""
    failed: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """The numbers of calls that failed, by method and reason."""
    adapter_requests: Mapping[str, int] = field(default_factory=dict)
    frames: FrameCounts | None = None
    """The counts of frames; None in a process that takes none."""
    callers: Mapping[str, CallerUsage] | None = None
    """The counts by caller; None if the metrics of callers are off."""
    restarts: Mapping[str, int] | None = None
    """The numbers of restarts of child processes, by name; None in a process without children."""


Value = float | None
Values = Value | Mapping[str, Value] | Mapping[tuple[str, ...], Value]
"""A number, or numbers by the value of the label or of the labels. None means no sample."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Defines one metric by its OpenTelemetry name; its unit is in UCUM. Histograms are recorded and not read."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[Reading], Values] | None = None
    read_engine: Callable[[EngineReading], Values] | None = None

    @property
    def prometheus_name(self) -> str:
        """The name for Prometheus: `rpc.server.call.duration` in s → `rpc_server_call_duration_seconds`.

        The client adds `_total` itself.
        """
        unit = _UNITS[self.unit]
        return _underscored(self.name) + (f"_{unit}" if unit else "")

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """The labels for Prometheus: `rpc.method` → `rpc_method`."""
        return tuple(_underscored(label) for label in self.labels)

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Returns the metric without samples, as a family of Prometheus' client."""
        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        return kind(self.prometheus_name, self.help, labels=self.prometheus_labels)


_UNITS: Mapping[str, str] = MappingProxyType({"s": "seconds", "By": "bytes", "1": ""})
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_RPC_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_REQUEST_S = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
# The first bucket of the convention ends at 10 ms, which is longer than any token takes on a GPU.
_PER_TOKEN_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25)
_TOKENS = tuple(4.0**power for power in range(14))
_IMAGE_BYTES = tuple(1024.0 * 4**power for power in range(9))
_SCORES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

CALL_DURATION = Metric(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a call to its end, by method and status.",
    ("rpc.method", "rpc.response.status_code"),
    _RPC_S,
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a request to its last message; error.type is the status of a failed request, else empty.",
    (*_GEN_AI, "error.type"),
    _REQUEST_S,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "From a request's submission to its first token.",
    _GEN_AI,
    _FIRST_TOKEN_S,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "Average time between the output tokens of a request, after its first.",
    _GEN_AI,
    _PER_TOKEN_S,
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    Kind.HISTOGRAM,
    "1",
    "Tokens of a request: of prompt and image (input), generated (output).",
    (*_GEN_AI, "gen_ai.token.type"),
    _TOKENS,
)
QUEUE_DURATION = Metric(
    "kestrel.queue.duration", Kind.HISTOGRAM, "s", "Time that a request waited before it ran.", (), _FIRST_TOKEN_S
)
PREPROCESS_DURATION = Metric(
    "kestrel.preprocess.duration",
    Kind.HISTOGRAM,
    "s",
    "Time for decoding the image of a request and building its prompt.",
    (),
    _FIRST_TOKEN_S,
)
PREFILL_DURATION = Metric(
    "kestrel.prefill.duration",
    Kind.HISTOGRAM,
    "s",
    "From the start of a request to its first token.",
    (),
    _FIRST_TOKEN_S,
)
IMAGE_SIZE = Metric(
    "kestrel.image.size", Kind.HISTOGRAM, "By", "Encoded size of the images received.", (), _IMAGE_BYTES
)

OBJECT_SCORE = Metric(
    "kestrel.object.score",
    Kind.HISTOGRAM,
    "1",
    "Scores of the objects in answers, of `point` and `detect`.",
    ("gen_ai.operation.name",),
    _SCORES,
)

METRICS = (
    *(CALL_DURATION, REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, TOKEN_USAGE),
    *(QUEUE_DURATION, PREPROCESS_DURATION, PREFILL_DURATION, IMAGE_SIZE, OBJECT_SCORE),
    Metric(
        "kestrel.requests.failed",
        Kind.COUNTER,
        "1",
        "Calls that did not end with OK, by the reason in the status.",
        ("rpc.method", "reason"),
        read=lambda now: now.failed,
    ),
    Metric(
        "kestrel.scheduler.running",
        Kind.GAUGE,
        "1",
        "Requests that hold pages of the key-value cache.",
        read_engine=lambda now: now.load.num_running,
    ),
    Metric(
        "kestrel.scheduler.waiting",
        Kind.GAUGE,
        "1",
        "Preprocessed requests that wait to run.",
        read_engine=lambda now: now.load.num_waiting,
    ),
    Metric(
        "kestrel.scheduler.preprocessing",
        Kind.GAUGE,
        "1",
        "Requests that are being preprocessed.",
        read_engine=lambda now: now.load.num_preprocessing,
    ),
    Metric(
        "kestrel.image.decoded",
        Kind.GAUGE,
        "By",
        "Memory of images that are being decoded or that requests hold.",
        read_engine=lambda now: now.load.decoded_image_bytes,
    ),
    Metric(
        "kestrel.kv_cache.used",
        Kind.GAUGE,
        "1",
        "Pages of the key-value cache in use.",
        read_engine=lambda now: now.load.num_used_pages,
    ),
    Metric(
        "kestrel.kv_cache.capacity",
        Kind.GAUGE,
        "1",
        "Pages of the key-value cache.",
        read_engine=lambda now: now.load.num_pages,
    ),
    Metric(
        "kestrel.cache.lookups",
        Kind.COUNTER,
        "1",
        "Lookups by requests in a tier: stored_images (files that callers have stored), "
        "embeddings (of images) or prefix_pages (of the key-value cache); in the tier crops, lookups of single "
        "crops of images: those without a hit were encoded.",
        ("tier",),
        read=lambda now: {tier: cache.num_lookups for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.cache.hits",
        Kind.COUNTER,
        "1",
        "Lookups that found at least a part of the needed data.",
        ("tier",),
        read=lambda now: {tier: cache.num_hits for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.cache.evictions",
        Kind.COUNTER,
        "1",
        "Entries of a tier that were dropped to store others.",
        ("tier",),
        read=lambda now: {tier: cache.num_evictions for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.cache.used",
        Kind.GAUGE,
        "By",
        "Memory of the entries of a tier.",
        ("tier",),
        read=lambda now: {tier: cache.used_bytes for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.cache.capacity",
        Kind.GAUGE,
        "By",
        "The most memory that the entries of a tier can take; 0 for a tier that is off.",
        ("tier",),
        read=lambda now: {tier: cache.total_bytes for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.cache.oldest.age",
        Kind.GAUGE,
        "s",
        "Time since the oldest entry of a tier was stored, 0 without entries; of tiers that are on.",
        ("tier",),
        read=lambda now: {tier: cache.oldest_age_s for tier, cache in now.caches.items()},
    ),
    Metric(
        "kestrel.device.memory.used",
        Kind.GAUGE,
        "By",
        "Memory of the GPU that is used, by this and other processes.",
        read_engine=lambda now: None if now.device is None else now.device.used_bytes,
    ),
    Metric(
        "kestrel.device.memory.capacity",
        Kind.GAUGE,
        "By",
        "Memory of the GPU.",
        read_engine=lambda now: None if now.device is None else now.device.total_bytes,
    ),
    Metric(
        "kestrel.device.utilization",
        Kind.GAUGE,
        "1",
        "Share of the last second or less in which a kernel ran on the GPU, of this or another process, from 0 to "
        "1.",
        read_engine=lambda now: None if now.device is None else now.device.utilization,
    ),
    Metric(
        "kestrel.memory.planned",
        Kind.GAUGE,
        "By",
        "How the server divided the memory of its device at the start, by part.",
        ("part",),
        read_engine=lambda now: dict(now.info.memory.terms()) if now.info.memory else None,
    ),
    Metric(
        "kestrel.adapter.slots",
        Kind.GAUGE,
        "1",
        "Slots for adapters: all (total), those with an adapter (filled) and those that requests use (used).",
        ("state",),
        read_engine=lambda now: {
            "total": now.load.adapters.num_slots,
            "filled": now.load.adapters.num_filled_slots,
            "used": now.load.adapters.num_used_slots,
        },
    ),
    Metric(
        "kestrel.adapter.loads",
        Kind.COUNTER,
        "1",
        "Adapters that were loaded, or failed to load.",
        ("outcome",),
        read_engine=lambda now: {"loaded": now.load.adapters.num_loads, "failed": now.load.adapters.num_failures},
    ),
    Metric(
        "kestrel.adapter.evictions",
        Kind.COUNTER,
        "1",
        "Adapters that left their slot for another one.",
        read_engine=lambda now: now.load.adapters.num_evictions,
    ),
    Metric(
        "kestrel.adapter.requests",
        Kind.COUNTER,
        "1",
        "Answered requests by adapter; from the 65th adapter on they are counted as other.",
        ("adapter",),
        read=lambda now: now.adapter_requests,
    ),
    Metric(
        "kestrel.frames",
        Kind.COUNTER,
        "1",
        "Frames of `DetectFrames` and `PointFrames` by outcome: answered, failed, or dropped for newer ones.",
        ("outcome",),
        read=lambda now: (
            None
            if now.frames is None
            else {
                "answered": now.frames.num_answered,
                "failed": now.frames.num_failed,
                "dropped": now.frames.num_dropped,
            }
        ),
    ),
    Metric(
        "kestrel.frame_streams",
        Kind.GAUGE,
        "1",
        "Streams of frames that are open.",
        read=lambda now: None if now.frames is None else now.frames.num_streams,
    ),
    Metric(
        "kestrel.caller.requests",
        Kind.COUNTER,
        "1",
        "Requests by the name of the caller's token and by outcome (answered, failed, refused), with "
        "`--caller-metrics on`; (none) has no token, and from the 65th caller on they are counted as (other).",
        ("caller", "outcome"),
        read=lambda now: _by_caller(
            now, {"answered": "num_answered", "failed": "num_failed", "refused": "num_refused"}
        ),
    ),
    Metric(
        "kestrel.caller.tokens",
        Kind.COUNTER,
        "1",
        "Tokens of answered requests by the name of the caller's token, with `--caller-metrics on`: of prompt and "
        "image (input), those of them that were cached (cached), generated (output).",
        ("caller", "type"),
        read=lambda now: _by_caller(
            now, {"input": "num_input_tokens", "cached": "num_cached_tokens", "output": "num_output_tokens"}
        ),
    ),
    Metric(
        "kestrel.engine.ready",
        Kind.GAUGE,
        "1",
        "1 while the engine takes requests, else 0.",
        read_engine=lambda now: int(now.status is EngineStatus.SERVING),
    ),
    Metric(
        "kestrel.engine.restarts",
        Kind.COUNTER,
        "1",
        "Restarts of the engine after a failure.",
        read_engine=lambda now: now.num_restarts,
    ),
    Metric(
        "kestrel.engine.stalls",
        Kind.COUNTER,
        "1",
        "Waits of requests since the start, by cause: kernels that were compiled or loaded from their folder "
        "(compilation), and CUDA graphs that were being captured when the requests arrived (capture).",
        ("cause",),
        read_engine=lambda now: {
            "compilation": now.load.num_compilations_awaited,
            "capture": now.load.num_captures_awaited,
        },
    ),
    Metric(
        "kestrel.info",
        Kind.GAUGE,
        "1",
        "Always 1; the labels say what is served.",
        ("version", "model", "revision", "architecture", "device", "dtype"),
        read_engine=lambda now: {_served(now.info): 1},
    ),
    Metric(
        "kestrel.log.dropped",
        Kind.COUNTER,
        "1",
        "Lines of the log that were dropped, because standard error was not read in time.",
        read=lambda now: dropped_lines(),
    ),
    Metric(
        "kestrel.process.restarts",
        Kind.COUNTER,
        "1",
        "Front ends and engine cores that ended by themselves and were started again; of several processes only.",
        ("child",),
        read=lambda now: now.restarts,
    ),
)


def _by_caller(now: Reading, fields: Mapping[str, str]) -> Mapping[tuple[str, ...], float] | None:
    """Returns sums of fields of `CallerUsage` by caller and by the label of the field."""
    if now.callers is None:
        return None
    sums: Counter[tuple[str, ...]] = Counter()
    for index, (name, usage) in enumerate(now.callers.items()):  # in the order of their first requests
        caller = (name or _NO_CALLER) if index < _MAX_NAMED_CALLERS else _OTHER_CALLERS
        for label, field_name in fields.items():
            sums[caller, label] += getattr(usage, field_name)
    return sums


def _served(info: EngineInfo) -> tuple[str, ...]:
    return (__version__, info.model, info.revision or "", info.architecture, info.device, info.dtype)


def new_registry(read: Callable[[], Reading]) -> CollectorRegistry:
    """Returns the registry of the metrics of one process. It calls `read` at each scrape, in any thread."""
    disable_created_metrics()  # one more series for each metric, which is not used
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Scrape(read))
    return registry


def not_ready_text() -> bytes:
    """Returns the metrics of an engine whose process is being restarted: `kestrel.engine.ready` is 0."""
    (metric,) = (item for item in METRICS if item.name == "kestrel.engine.ready")
    family = metric.family()
    family.add_metric((), 0)
    registry = CollectorRegistry()
    registry.register(_Fixed(family))
    return generate_latest(registry)


class EngineReader:
    """Reads an engine for its metrics. May be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_device = device_reader(engine.info.device_uuid)
        self._num_restarts = 0
        engine.on_status_change(self._note_status)

    def read(self) -> EngineReading:
        """Returns the state of the engine now."""
        return EngineReading(
            info=self._engine.info,
            status=self._engine.status,
            load=self._engine.load(),
            device=self._read_device(),
            num_restarts=self._num_restarts,
        )

    def _note_status(self, status: EngineStatus) -> None:
        if status is EngineStatus.RECOVERING:
            self._num_restarts += 1


class ServerMetrics:
    """Records calls as they end, in `registry`, and reads the engine and `stored_images` at each scrape.

    `record` belongs to the event loop; the registry may be read in any thread. If `reads_engine` is False, other
    processes report the metrics of the engine and of stored images. `usage` reads the counts by caller; None if
    they have no metrics. `frames` reads the counts of frames.
    """

    def __init__(
        self,
        engine: Engine,
        stored_images: Callable[[], CacheLoad] = CacheLoad,
        usage: Callable[[], Mapping[str, CallerUsage]] | None = None,
        frames: Callable[[], FrameCounts | None] = lambda: None,
        *,
        reads_engine: bool = True,
    ) -> None:
        self._usage = usage
        self._frames = frames
        self.registry = new_registry(self._read)
        self._model = engine.info.model
        self._engine = EngineReader(engine) if reads_engine else None
        self._stored_images = stored_images
        self._failed: Counter[tuple[str, ...]] = Counter()
        self._adapter_requests: Counter[str] = Counter()
        self._calls = self._histogram(CALL_DURATION)
        self._requests = self._histogram(REQUEST_DURATION)
        self._first_token = self._histogram(TIME_TO_FIRST_TOKEN)
        self._per_token = self._histogram(TIME_PER_OUTPUT_TOKEN)
        self._tokens = self._histogram(TOKEN_USAGE)
        self._queue = self._histogram(QUEUE_DURATION).series()
        self._preprocess = self._histogram(PREPROCESS_DURATION).series()
        self._prefill = self._histogram(PREFILL_DURATION).series()
        self._image_size = self._histogram(IMAGE_SIZE).series()
        scores = self._histogram(OBJECT_SCORE)
        self._scores = {skill: scores.series(skill) for skill in (Point.skill, Detect.skill)}
        # Kept by skill and model: looking up each series by its labels would cost as much as the observation.
        self._answer_series: dict[tuple[str, str], _AnswerSeries] = {}

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Counts a call that has ended."""
        duration_s = call.duration_s
        self._calls.series(call.method, outcome.code).observe(duration_s)
        if not outcome.is_ok:
            self._failed[call.method, outcome.reason] += 1
        request = call.request
        if request is None:
            return
        error_type = "" if outcome.is_ok else outcome.code
        if call.finished is not None and request.adapter:
            self._record_adapter(request.adapter)
        model = self._model_label(request)
        self._requests.series(request.skill, PROVIDER, model, error_type).observe(duration_s)
        if request.image_bytes is not None:
            self._image_size.observe(request.image_bytes)
        if call.finished is not None:
            self._record_answer(request.skill, model, call.finished)

    def _read(self) -> Reading:
        engine = None if self._engine is None else self._engine.read()
        return Reading(
            engine=engine,
            caches={} if engine is None else {"stored_images": self._stored_images(), **engine.caches()},
            failed=dict(self._failed),
            adapter_requests=dict(self._adapter_requests),
            frames=self._frames(),
            callers=None if self._usage is None else self._usage(),
        )

    def _record_adapter(self, name: str) -> None:
        is_named = name in self._adapter_requests or len(self._adapter_requests) < _MAX_NAMED_ADAPTERS
        self._adapter_requests[name if is_named else _OTHER] += 1

    def _model_label(self, request: RequestSummary) -> str:
        """Returns the model of a request. An adapter is named only once it has answered, because callers may send
        any name."""
        is_known = not request.adapter or request.adapter in self._adapter_requests
        return request.model(self._model) if is_known else f"{self._model}/{_OTHER}"

    def _record_answer(self, skill: str, model: str, finished: Finished) -> None:
        series = self._answer_series.get((skill, model))
        if series is None:
            series = self._answer_series[skill, model] = self._new_answer_series(skill, model)
        usage, timing = finished.usage, finished.timing
        series.input_tokens.observe(usage.num_input_tokens)
        series.output_tokens.observe(usage.num_output_tokens)
        series.first_token.observe(timing.time_to_first_token_s)
        if finished.num_decoded:
            series.per_token.observe(timing.decode_s / finished.num_decoded)
        self._queue.observe(timing.queue_s)
        self._preprocess.observe(timing.preprocess_s)
        self._prefill.observe(timing.prefill_s)
        if skill in self._scores:
            for score in finished.scores:
                self._scores[skill].observe(score)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.prometheus_name,
            metric.help,
            metric.prometheus_labels,
            metric.buckets,
            self.registry,
        )

    def _new_answer_series(self, skill: str, model: str) -> _AnswerSeries:
        labels = (skill, PROVIDER, model)
        return _AnswerSeries(
            input_tokens=self._tokens.series(*labels, "input"),
            output_tokens=self._tokens.series(*labels, "output"),
            first_token=self._first_token.series(*labels),
            per_token=self._per_token.series(*labels),
        )


class _AnswerSeries(NamedTuple):
    """Holds the series of one skill that each answer updates."""

    input_tokens: Series
    output_tokens: Series
    first_token: Series
    per_token: Series


class _Scrape(Collector):
    """Reads the metrics that are not recorded, at each scrape."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        now = self._read()
        for metric in METRICS:
            found = None
            if metric.read is not None:
                found = metric.read(now)
            elif metric.read_engine is not None and now.engine is not None:
                found = metric.read_engine(now.engine)
            if found is None:
                continue
            family = metric.family()
            samples = found.items() if isinstance(found, Mapping) else [((), found)]
            for labels, value in samples:
                if value is not None:
                    family.add_metric((labels,) if isinstance(labels, str) else labels, value)
            yield family

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yields the names alone, so that registering does not read the engine."""
        return (metric.family() for metric in METRICS if metric.kind is not Kind.HISTOGRAM)


class _Fixed(Collector):
    """Collects one metric whose value does not change."""

    def __init__(self, family: CounterMetricFamily | GaugeMetricFamily) -> None:
        self._family = family

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield self._family


def markdown_table() -> str:
    """Returns the table of metrics for the documentation."""
    rows = ["| Metric | In Prometheus | Kind | Unit | Labels | What it says |", "|---|---|---|---|---|---|"]
    for item in METRICS:
        suffix = "_total" if item.kind is Kind.COUNTER else ""
        labels = ", ".join(f"`{label}`" for label in item.prometheus_labels)
        rows.append(
            f"| `{item.name}` | `{item.prometheus_name}{suffix}` | {item.kind.value} | {item.unit} | {labels} "
            f"| {item.help} |"
        )
    return "\n".join(rows)


def bucket_table() -> str:
    """Returns the table of the bounds of every histogram for the documentation."""
    rows = ["| Histogram | Upper bounds |", "|---|---|"]
    histograms = (item for item in METRICS if item.kind is Kind.HISTOGRAM)
    rows += [f"| `{item.name}` | {', '.join(f'{bound:.12g}' for bound in item.buckets)} |" for item in histograms]
    return "\n".join(rows)


def _underscored(name: str) -> str:
    return name.replace(".", "_")


if __name__ == "__main__":
    print(markdown_table())
    print()
    print(bucket_table())
