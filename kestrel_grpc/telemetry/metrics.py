"""Defines every metric once (name, kind, unit, help, labels, buckets), and records calls in them.

Names follow the OpenTelemetry conventions for RPC and generative AI where those have one; the others begin with
`kestrel`. Values are kept in a registry of Prometheus' client: nothing runs between scrapes, and OTLP collectors
scrape the same text.
`python -m kestrel_grpc.telemetry.metrics` prints the table for the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kestrel_grpc import __version__
from kestrel_grpc.telemetry.device_reading import DeviceReading, device_reader
from kestrel_grpc.telemetry.histograms import Histogram, Series
from kestrel_grpc.wire.call_context import CallContext, Outcome
from kestrel_runtime.api.adapters import AdapterLoad
from kestrel_runtime.api.engine import CacheLoad, Engine, EngineStatus, Load, MemoryPlan
from kestrel_runtime.api.events import Finished

PROVIDER = "kestrel"


class Kind(Enum):
    """The kind of a metric: how its value changes over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric under its OpenTelemetry name, its unit in UCUM."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """`rpc.server.call.duration` in s → `rpc_server_call_duration_seconds`. The client adds `_total` itself."""
        unit = _UNITS[self.unit]
        return _underscored(self.name) + (f"_{unit}" if unit else "")

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """`rpc.method` → `rpc_method`."""
        return tuple(_underscored(label) for label in self.labels)


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

CALL_DURATION = Definition(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a call to its end, by method and status.",
    ("rpc.method", "rpc.response.status_code"),
    _RPC_S,
)
REQUEST_DURATION = Definition(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a request to its last message; error.type is the status of a failed request, else empty.",
    (*_GEN_AI, "error.type"),
    _REQUEST_S,
)
TIME_TO_FIRST_TOKEN = Definition(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "From a request's submission to its first token.",
    _GEN_AI,
    _FIRST_TOKEN_S,
)
TIME_PER_OUTPUT_TOKEN = Definition(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "Average time between the output tokens of a request, after its first.",
    _GEN_AI,
    _PER_TOKEN_S,
)
TOKEN_USAGE = Definition(
    "gen_ai.client.token.usage",
    Kind.HISTOGRAM,
    "1",
    "Tokens of a request: of prompt and image (input), generated (output).",
    (*_GEN_AI, "gen_ai.token.type"),
    _TOKENS,
)
FAILED = Definition(
    "kestrel.requests.failed",
    Kind.COUNTER,
    "1",
    "Calls that did not end with OK, by the reason that the caller was told.",
    ("rpc.method", "reason"),
)
QUEUE_DURATION = Definition(
    "kestrel.queue.duration", Kind.HISTOGRAM, "s", "Time that a request waited before it ran.", (), _FIRST_TOKEN_S
)
PREPROCESS_DURATION = Definition(
    "kestrel.preprocess.duration",
    Kind.HISTOGRAM,
    "s",
    "Time for decoding the image of a request and building its prompt.",
    (),
    _FIRST_TOKEN_S,
)
PREFILL_DURATION = Definition(
    "kestrel.prefill.duration",
    Kind.HISTOGRAM,
    "s",
    "From the start of a request to its first token.",
    (),
    _FIRST_TOKEN_S,
)
IMAGE_SIZE = Definition(
    "kestrel.image.size", Kind.HISTOGRAM, "By", "Encoded size of the images received.", (), _IMAGE_BYTES
)
RUNNING = Definition(
    "kestrel.scheduler.running", Kind.GAUGE, "1", "Requests that hold pages of the key-value cache."
)
WAITING = Definition("kestrel.scheduler.waiting", Kind.GAUGE, "1", "Preprocessed requests that wait to run.")
PREPROCESSING = Definition(
    "kestrel.scheduler.preprocessing", Kind.GAUGE, "1", "Requests that are being preprocessed."
)
DECODED_IMAGES = Definition(
    "kestrel.image.decoded", Kind.GAUGE, "By", "Memory of images that are being decoded or that requests hold."
)
KV_USED = Definition("kestrel.kv_cache.used", Kind.GAUGE, "1", "Pages of the key-value cache in use.")
KV_CAPACITY = Definition("kestrel.kv_cache.capacity", Kind.GAUGE, "1", "Pages of the key-value cache.")
_TIER = ("tier",)
CACHE_LOOKUPS = Definition(
    "kestrel.cache.lookups",
    Kind.COUNTER,
    "1",
    "Requests that looked for what they need in a tier: stored_images (files that callers have stored), embeddings "
    "(of images) or prefix_pages (of the key-value cache).",
    _TIER,
)
CACHE_HITS = Definition(
    "kestrel.cache.hits", Kind.COUNTER, "1", "Lookups that found at least a part of what they need.", _TIER
)
CACHE_EVICTIONS = Definition(
    "kestrel.cache.evictions", Kind.COUNTER, "1", "Entries of a tier that were dropped to store others.", _TIER
)
CACHE_USED = Definition("kestrel.cache.used", Kind.GAUGE, "By", "Memory of the entries of a tier.", _TIER)
CACHE_CAPACITY = Definition(
    "kestrel.cache.capacity",
    Kind.GAUGE,
    "By",
    "The most memory that the entries of a tier can take; 0 for a tier that is off.",
    _TIER,
)
CACHE_AGE = Definition(
    "kestrel.cache.oldest.age",
    Kind.GAUGE,
    "s",
    "Time since the oldest entry of a tier was stored, 0 without entries; of tiers that are on.",
    _TIER,
)
DEVICE_MEMORY_USED = Definition(
    "kestrel.device.memory.used", Kind.GAUGE, "By", "Memory of the GPU that is used, by this and other processes."
)
DEVICE_MEMORY_CAPACITY = Definition("kestrel.device.memory.capacity", Kind.GAUGE, "By", "Memory of the GPU.")
DEVICE_UTILIZATION = Definition(
    "kestrel.device.utilization",
    Kind.GAUGE,
    "1",
    "Share of the last second or less in which a kernel ran on the GPU, of this or another process, from 0 to 1.",
)
MEMORY_PLANNED = Definition(
    "kestrel.memory.planned",
    Kind.GAUGE,
    "By",
    "How the server divided the memory of its device at the start, by part.",
    ("part",),
)
ADAPTER_SLOTS = Definition(
    "kestrel.adapter.slots",
    Kind.GAUGE,
    "1",
    "Slots for adapters: all (total), those with an adapter (filled) and those that requests use (used).",
    ("state",),
)
ADAPTER_LOADS = Definition(
    "kestrel.adapter.loads", Kind.COUNTER, "1", "Adapters that were loaded, or failed to load.", ("outcome",)
)
ADAPTER_EVICTIONS = Definition(
    "kestrel.adapter.evictions", Kind.COUNTER, "1", "Adapters that left their slot for another one."
)
ADAPTER_REQUESTS = Definition(
    "kestrel.adapter.requests",
    Kind.COUNTER,
    "1",
    "Answered requests by adapter; from the 65th adapter on they are counted as other.",
    ("adapter",),
)
STALLS = Definition(
    "kestrel.engine.stalls",
    Kind.COUNTER,
    "1",
    "What requests waited for since the start: kernels that were compiled or loaded from their folder "
    "(compilation), and CUDA graphs that were being captured when they came (capture).",
    ("cause",),
)
READY = Definition("kestrel.engine.ready", Kind.GAUGE, "1", "1 while the engine takes requests, else 0.")
RESTARTS = Definition("kestrel.engine.restarts", Kind.COUNTER, "1", "Restarts of the engine after a failure.")
INFO = Definition(
    "kestrel.info",
    Kind.GAUGE,
    "1",
    "Always 1; the labels say what is served.",
    ("version", "model", "revision", "architecture", "device", "dtype"),
)

METRICS = (
    *(CALL_DURATION, REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, TOKEN_USAGE),
    *(FAILED, QUEUE_DURATION, PREPROCESS_DURATION, PREFILL_DURATION, IMAGE_SIZE),
    *(RUNNING, WAITING, PREPROCESSING, DECODED_IMAGES, KV_USED, KV_CAPACITY),
    *(CACHE_LOOKUPS, CACHE_HITS, CACHE_EVICTIONS, CACHE_USED, CACHE_CAPACITY, CACHE_AGE),
    *(DEVICE_MEMORY_USED, DEVICE_MEMORY_CAPACITY, DEVICE_UTILIZATION, MEMORY_PLANNED),
    *(ADAPTER_SLOTS, ADAPTER_LOADS, ADAPTER_EVICTIONS, ADAPTER_REQUESTS),
    *(READY, RESTARTS, STALLS, INFO),
)

_LOAD: tuple[tuple[Definition, Callable[[Load], int]], ...] = (
    (RUNNING, lambda load: load.num_running),
    (WAITING, lambda load: load.num_waiting),
    (PREPROCESSING, lambda load: load.num_preprocessing),
    (DECODED_IMAGES, lambda load: load.decoded_image_bytes),
    (KV_USED, lambda load: load.num_used_pages),
    (KV_CAPACITY, lambda load: load.num_pages),
)

_DEVICE: tuple[tuple[Definition, Callable[[DeviceReading], float]], ...] = (
    (DEVICE_MEMORY_USED, lambda reading: reading.used_bytes),
    (DEVICE_MEMORY_CAPACITY, lambda reading: reading.total_bytes),
    (DEVICE_UTILIZATION, lambda reading: reading.utilization),
)
_MAX_NAMED_ADAPTERS = 64
"""Each has a series of its own; the requests of further adapters are counted together."""
_CACHE_COUNTERS: tuple[tuple[Definition, Callable[[CacheLoad], int]], ...] = (
    (CACHE_LOOKUPS, lambda cache: cache.num_lookups),
    (CACHE_HITS, lambda cache: cache.num_hits),
    (CACHE_EVICTIONS, lambda cache: cache.num_evictions),
)
_CACHE_GAUGES: tuple[tuple[Definition, Callable[[CacheLoad], float | None]], ...] = (
    (CACHE_USED, lambda cache: cache.used_bytes),
    (CACHE_CAPACITY, lambda cache: cache.total_bytes),
    (CACHE_AGE, lambda cache: cache.oldest_age_s),
)


class ServerMetrics:
    """Records calls as they end, in `registry`; the engine and `stored_images` are asked at each scrape.

    `record` belongs to the event loop; the registry may be read in any thread.
    """

    def __init__(self, engine: Engine, stored_images: Callable[[], CacheLoad] = CacheLoad) -> None:
        disable_created_metrics()  # one more series for each metric, which is not used
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(engine, stored_images))
        self._model = engine.info.model
        self._calls = self._histogram(CALL_DURATION)
        self._failed = Counter(
            FAILED.prometheus_name, FAILED.help, FAILED.prometheus_labels, registry=self.registry
        )
        self._adapters = Counter(
            ADAPTER_REQUESTS.prometheus_name,
            ADAPTER_REQUESTS.help,
            ADAPTER_REQUESTS.prometheus_labels,
            registry=self.registry,
        )
        self._adapter_names: set[str] = set()
        self._restarts = Counter(RESTARTS.prometheus_name, RESTARTS.help, registry=self.registry)
        self._requests = self._histogram(REQUEST_DURATION)
        self._first_token = self._histogram(TIME_TO_FIRST_TOKEN)
        self._per_token = self._histogram(TIME_PER_OUTPUT_TOKEN)
        self._tokens = self._histogram(TOKEN_USAGE)
        self._queue = self._histogram(QUEUE_DURATION).series()
        self._preprocess = self._histogram(PREPROCESS_DURATION).series()
        self._prefill = self._histogram(PREFILL_DURATION).series()
        self._image_size = self._histogram(IMAGE_SIZE).series()
        # Kept by skill: looking up each series by its labels would cost as much as the observation.
        self._answer_series: dict[str, _AnswerSeries] = {}
        engine.on_status_change(self._note_status)

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Count a call that has ended."""
        duration_s = call.duration_s
        self._calls.series(call.method, outcome.code).observe(duration_s)
        if not outcome.is_ok:
            self._failed.labels(call.method, outcome.reason).inc()
        request = call.request
        if request is None:
            return
        error_type = "" if outcome.is_ok else outcome.code
        self._requests.series(request.skill, PROVIDER, self._model, error_type).observe(duration_s)
        if request.image_bytes is not None:
            self._image_size.observe(request.image_bytes)
        if call.finished is not None:
            self._record_answer(request.skill, call.finished)
            if request.adapter:
                self._record_adapter(request.adapter)

    def _record_adapter(self, name: str) -> None:
        if name not in self._adapter_names:
            if len(self._adapter_names) < _MAX_NAMED_ADAPTERS:
                self._adapter_names.add(name)
            else:
                name = "other"
        self._adapters.labels(name).inc()

    def _note_status(self, status: EngineStatus) -> None:
        if status is EngineStatus.RECOVERING:
            self._restarts.inc()

    def _record_answer(self, skill: str, finished: Finished) -> None:
        series = self._answer_series.get(skill)
        if series is None:
            series = self._answer_series[skill] = self._new_answer_series(skill)
        usage, timing = finished.usage, finished.timing
        series.input_tokens.observe(usage.num_input_tokens)
        series.output_tokens.observe(usage.num_output_tokens)
        series.first_token.observe(timing.time_to_first_token_s)
        if usage.num_output_tokens > 1:
            series.per_token.observe(timing.decode_s / (usage.num_output_tokens - 1))
        self._queue.observe(timing.queue_s)
        self._preprocess.observe(timing.preprocess_s)
        self._prefill.observe(timing.prefill_s)

    def _histogram(self, definition: Definition) -> Histogram:
        return Histogram(
            definition.prometheus_name,
            definition.help,
            definition.prometheus_labels,
            definition.buckets,
            self.registry,
        )

    def _new_answer_series(self, skill: str) -> _AnswerSeries:
        labels = (skill, PROVIDER, self._model)
        return _AnswerSeries(
            input_tokens=self._tokens.series(*labels, "input"),
            output_tokens=self._tokens.series(*labels, "output"),
            first_token=self._first_token.series(*labels),
            per_token=self._per_token.series(*labels),
        )


class _AnswerSeries(NamedTuple):
    """The series of one skill that each answer updates."""

    input_tokens: Series
    output_tokens: Series
    first_token: Series
    per_token: Series


class _EngineCollector(Collector):
    """Reads the engine and the caches at each scrape."""

    def __init__(self, engine: Engine, stored_images: Callable[[], CacheLoad]) -> None:
        self._engine = engine
        self._stored_images = stored_images
        self._read_device = device_reader(engine.info.device_uuid)

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load()
        for definition, read in _LOAD:
            yield GaugeMetricFamily(definition.prometheus_name, definition.help, read(load))
        yield from _cache_families(
            {
                "stored_images": self._stored_images(),
                "embeddings": load.image_cache,
                "prefix_pages": load.prefix_cache,
            }
        )
        reading = self._read_device()
        if reading is not None:
            for definition, read_part in _DEVICE:
                yield GaugeMetricFamily(definition.prometheus_name, definition.help, read_part(reading))
        yield _planned_family(self._engine.info.memory)
        yield from _adapter_families(load.adapters)
        yield _stalls_family(load)
        is_ready = self._engine.status is EngineStatus.SERVING
        yield GaugeMetricFamily(READY.prometheus_name, READY.help, int(is_ready))
        info = self._engine.info
        family = GaugeMetricFamily(INFO.prometheus_name, INFO.help, labels=INFO.prometheus_labels)
        values = (__version__, info.model, info.revision or "", info.architecture, info.device, info.dtype)
        family.add_metric(values, 1)
        yield family

    def describe(self) -> Iterator[Metric]:
        """Names alone, so that registering asks nothing of the engine."""
        for definition in (*(item for item, _ in _LOAD), *(item for item, _ in _DEVICE), READY, INFO):
            yield GaugeMetricFamily(definition.prometheus_name, definition.help)
        yield from _cache_families({})
        yield from _adapter_families(AdapterLoad())
        yield _stalls_family(None)
        yield _planned_family(None)


def _planned_family(plan: MemoryPlan | None) -> Metric:
    """The memory plan with a sample for each part."""
    family = GaugeMetricFamily(
        MEMORY_PLANNED.prometheus_name, MEMORY_PLANNED.help, labels=MEMORY_PLANNED.prometheus_labels
    )
    for part, num_bytes in () if plan is None else plan.terms():
        family.add_metric((part,), num_bytes)
    return family


def _stalls_family(load: Load | None) -> Metric:
    """The counter of stalls with a sample for each cause."""
    family = CounterMetricFamily(STALLS.prometheus_name, STALLS.help, labels=STALLS.prometheus_labels)
    if load is not None:
        family.add_metric(("compilation",), load.num_compilations_awaited)
        family.add_metric(("capture",), load.num_captures_awaited)
    return family


def _adapter_families(load: AdapterLoad) -> Iterator[Metric]:
    """The metrics of adapters, but for those of requests."""
    slots = {"total": load.num_slots, "filled": load.num_filled_slots, "used": load.num_used_slots}
    loads = {"loaded": load.num_loads, "failed": load.num_failures}
    for kind, definition, values in (
        (GaugeMetricFamily, ADAPTER_SLOTS, slots),
        (CounterMetricFamily, ADAPTER_LOADS, loads),
    ):
        family = kind(definition.prometheus_name, definition.help, labels=definition.prometheus_labels)
        for label, value in values.items():
            family.add_metric((label,), value)
        yield family
    yield CounterMetricFamily(ADAPTER_EVICTIONS.prometheus_name, ADAPTER_EVICTIONS.help, load.num_evictions)


def _cache_families(tiers: Mapping[str, CacheLoad]) -> Iterator[Metric]:
    """The metrics of caches with a sample for each tier."""
    for definition, read in _CACHE_COUNTERS:
        counter = CounterMetricFamily(definition.prometheus_name, definition.help, labels=_TIER)
        for tier, cache in tiers.items():
            counter.add_metric((tier,), read(cache))
        yield counter
    for definition, read in _CACHE_GAUGES:
        gauge = GaugeMetricFamily(definition.prometheus_name, definition.help, labels=_TIER)
        for tier, cache in tiers.items():
            reading = read(cache)
            if reading is not None:
                gauge.add_metric((tier,), reading)
        yield gauge


def markdown_table() -> str:
    """The table of metrics as the documentation shows it."""
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
    """The bounds of every histogram as the documentation shows them."""
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
