"""Metrics: what a call leaves behind in the text that Prometheus reads."""

import re
from dataclasses import fields, replace

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kestrel_grpc.calls.call_context import OK, CallContext, Outcome, RequestSummary
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_grpc.calls.submission import with_alternatives
from kestrel_grpc.calls.usage import CallerUsage
from kestrel_grpc.telemetry.device_reading import DeviceReading
from kestrel_grpc.telemetry.metrics import (
    METRICS,
    Kind,
    Reading,
    ServerMetrics,
    bucket_table,
    markdown_table,
    new_registry,
)
from kestrel_runtime.api.adapters import AdapterLoad
from kestrel_runtime.api.engine import CacheLoad, EngineStatus, Load, MemoryPlan
from kestrel_runtime.api.events import Box, DetectOutput, Finished, FinishReason, QueryOutput, Timing, Usage
from kestrel_runtime.api.requests import Detect, Query, RequestOptions
from tests.fakes import FakeEngine
from tests.reference_fixtures import CHECKOUT

QUERY = "kestrel.v1.VisionService/Query"
GEN_AI = {"gen_ai_operation_name": "query", "gen_ai_provider_name": "kestrel", "gen_ai_request_model": "fake/a0"}
BUSY = Outcome("RESOURCE_EXHAUSTED", "QUEUE_FULL")


def new_call() -> CallContext:
    return CallContext((), None, QUERY)


def answered_call(num_output_tokens: int = 3) -> CallContext:
    call = new_call()
    call.request = RequestSummary(Query("?", b"12345", options=RequestOptions(adapter="a0")))
    call.finished = Finished(
        QueryOutput("yes", None),
        FinishReason.STOP,
        Usage(735, 729, num_output_tokens),
        Timing(queue_s=0.25, preprocess_s=0.125, prefill_s=0.5, time_to_first_token_s=0.875, decode_s=0.0625),
    )
    return call


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def metrics(engine) -> ServerMetrics:
    return ServerMetrics(engine, lambda: CacheLoad(oldest_age_s=0.0))


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def test_a_call_is_counted_by_method_and_status(metrics):
    metrics.record(new_call(), OK)
    metrics.record(new_call(), OK)
    metrics.record(new_call(), BUSY)
    counted = {
        code: value(
            metrics, "rpc_server_call_duration_seconds_count", rpc_method=QUERY, rpc_response_status_code=code
        )
        for code in ("OK", "RESOURCE_EXHAUSTED", "INTERNAL")
    }
    assert counted == {"OK": 2, "RESOURCE_EXHAUSTED": 1, "INTERNAL": None}


async def test_only_what_failed_is_counted_by_reason(metrics):
    metrics.record(new_call(), OK)
    assert value(metrics, "kestrel_requests_failed_total", rpc_method=QUERY, reason="OK") is None
    metrics.record(new_call(), BUSY)
    assert value(metrics, "kestrel_requests_failed_total", rpc_method=QUERY, reason="QUEUE_FULL") == 1


async def test_an_answer_leaves_its_tokens_and_where_its_time_went(metrics):
    metrics.record(answered_call(), OK)
    sums = {
        "gen_ai_server_time_to_first_token_seconds_sum": GEN_AI,
        "gen_ai_server_time_per_output_token_seconds_sum": GEN_AI,
        "kestrel_queue_duration_seconds_sum": {},
        "kestrel_preprocess_duration_seconds_sum": {},
        "kestrel_prefill_duration_seconds_sum": {},
        "kestrel_image_size_bytes_sum": {},
    }
    assert [value(metrics, name, **labels) for name, labels in sums.items()] == [
        *(0.875, 0.0625 / 2, 0.25, 0.125, 0.5, 5)
    ]
    tokens = [
        value(metrics, "gen_ai_client_token_usage_sum", **GEN_AI, gen_ai_token_type=kind)
        for kind in ("input", "output")
    ]
    assert tokens == [735, 3]


async def test_scores_of_objects_are_counted_by_skill(metrics):
    outputs = [DetectOutput((Box(0.0, 0.0, 1.0, 1.0),) * 2, (0.25, 0.75)), DetectOutput(())]
    call = answered_call()
    call.request = RequestSummary(Detect("bird", b"image"))
    assert call.finished is not None
    first, second = [structs.replace(call.finished, output=output) for output in outputs]
    call.finished = structs.replace(first, alternatives=(second,))
    metrics.record(call, OK)
    found = [
        value(metrics, f"kestrel_object_score_{name}", gen_ai_operation_name="detect") for name in ("count", "sum")
    ]
    assert found == [2, 1.0]


async def test_a_single_token_has_no_time_per_token(metrics):
    metrics.record(answered_call(num_output_tokens=1), OK)
    assert not value(metrics, "gen_ai_server_time_per_output_token_seconds_count", **GEN_AI)


async def test_a_request_that_failed_is_told_from_one_that_did_not(metrics):
    call = answered_call()
    call.request = RequestSummary(Query("?"))
    call.finished = None
    metrics.record(call, Outcome("UNAVAILABLE", "QUEUE_TIMEOUT"))
    name = "gen_ai_server_request_duration_seconds_count"
    labels = {**GEN_AI, "gen_ai_request_model": "fake"}
    assert value(metrics, name, **labels, error_type="UNAVAILABLE") == 1
    assert value(metrics, name, **labels, error_type="") is None


async def test_only_adapters_that_have_answered_are_named_in_labels(metrics):
    name, unavailable = "gen_ai_server_request_duration_seconds_count", Outcome("UNAVAILABLE", "QUEUE_TIMEOUT")
    failed = answered_call()
    failed.finished = None
    counted = []
    for call, outcome in ((failed, unavailable), (answered_call(), OK), (failed, unavailable)):
        metrics.record(call, outcome)
        by_model = (
            value(metrics, name, **{**GEN_AI, "gen_ai_request_model": model}, error_type="UNAVAILABLE")
            for model in ("fake/a0", "fake/other")
        )
        counted.append(tuple(by_model))
    assert counted == [(None, 1), (None, 1), (1, 1)]


async def test_the_time_per_token_is_that_of_one_sample(metrics):
    call, longer = answered_call(), answered_call(9)
    assert call.finished is not None
    assert longer.finished is not None
    call.finished = with_alternatives(call.finished, [longer.finished] * 3)
    metrics.record(call, OK)
    assert value(metrics, "gen_ai_server_time_per_output_token_seconds_sum", **GEN_AI) == 0.0625 / 2


async def test_a_call_that_asked_nothing_of_the_model_is_a_call_and_no_request(metrics):
    metrics.record(new_call(), OK)
    assert b"gen_ai_server_request_duration_seconds_count{" not in generate_latest(metrics.registry)


async def test_the_engine_is_read_at_each_scrape(engine, metrics):
    assert value(metrics, "kestrel_scheduler_waiting") == engine.load().num_waiting
    assert value(metrics, "kestrel_image_decoded_bytes") == engine.load().decoded_image_bytes != 0
    assert value(metrics, "kestrel_kv_cache_used") == engine.load().num_used_pages
    assert value(metrics, "kestrel_kv_cache_capacity") == engine.load().num_pages
    assert value(metrics, "kestrel_engine_ready") == 1
    engine.become(EngineStatus.DRAINING)
    assert value(metrics, "kestrel_engine_ready") == 0


async def test_restarts_of_the_engine_are_counted(engine, metrics):
    assert value(metrics, "kestrel_engine_restarts_total") == 0
    for status in (EngineStatus.RECOVERING, EngineStatus.SERVING, EngineStatus.RECOVERING):
        engine.become(status)
    assert value(metrics, "kestrel_engine_restarts_total") == 2


async def test_the_memory_plan_is_a_series_for_each_part(engine):
    parts = {"cache_bytes": 5, "free_bytes": -7}
    names = [item.name for item in fields(MemoryPlan)]
    plan = MemoryPlan(**{name: parts.get(name, 0) for name in names})
    engine.info = replace(engine.info, memory=plan)
    metrics = ServerMetrics(engine)
    assert value(metrics, "kestrel_memory_planned_bytes", part="KV cache") == 5
    assert value(metrics, "kestrel_memory_planned_bytes", part="free") == -7


async def test_a_server_without_a_gpu_has_no_series_of_one(metrics):
    assert "kestrel_device" not in generate_latest(metrics.registry).decode()


async def test_the_text_holds_every_metric_of_the_list_under_its_name_and_kind(engine, monkeypatch):
    reading = DeviceReading(3 << 30, 4 << 30, 0.75)
    monkeypatch.setattr("kestrel_grpc.telemetry.metrics.device_reader", lambda uuid: lambda: reading)
    terms = (item.name for item in fields(MemoryPlan))
    engine.info = replace(engine.info, memory=MemoryPlan(**dict.fromkeys(terms, 1)))
    metrics = ServerMetrics(
        engine,
        lambda: CacheLoad(oldest_age_s=0.0),
        lambda: {"alice": CallerUsage(num_answered=1)},
        lambda: FrameCounts(num_streams=1),
    )
    metrics.record(answered_call(), OK)
    metrics.record(answered_call(), BUSY)
    supervisor = new_registry(lambda: Reading(restarts={"core-0": 1}))
    families = {
        item.name: item
        for registry in (supervisor, metrics.registry)
        for item in text_string_to_metric_families(generate_latest(registry).decode())
    }
    for metric in METRICS:
        family = families[metric.prometheus_name]
        assert family.type == metric.kind.value
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        assert bounds == ({*metric.buckets, float("inf")} if metric.kind is Kind.HISTOGRAM else set())
        named = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert named == set(metric.prometheus_labels)
    ours = {name for name in families if name.startswith(("kestrel_", "gen_ai_", "rpc_"))}
    assert {name for name in ours if not name.endswith("_created")} == {item.prometheus_name for item in METRICS}


def test_buckets_rise():
    assert [item.name for item in METRICS if list(item.buckets) != sorted(set(item.buckets))] == []


@pytest.mark.parametrize(("name", "table"), [("metrics", markdown_table()), ("buckets", bucket_table())])
def test_the_documentation_lists_the_metrics_there_are(name, table):
    text = (CHECKOUT / "docs" / "observability.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == table, "write it anew: python -m kestrel_grpc.telemetry.metrics"


def test_every_tier_of_the_caches_is_read_at_each_scrape(engine: FakeEngine):
    load = replace(
        engine.load(),
        image_cache=CacheLoad(1, 2, 3, 4, 5),
        prefix_cache=CacheLoad(6, 7, 8, 9, 10),
        crop_cache=CacheLoad(17, 18, 19, 20, 21, 22.5),
    )
    engine.load = lambda: load
    metrics = ServerMetrics(engine, lambda: CacheLoad(11, 12, 13, 14, 15, 16.5))
    names = ("lookups_total", "hits_total", "evictions_total", "used_bytes", "capacity_bytes", "oldest_age_seconds")
    found = {
        tier: [value(metrics, f"kestrel_cache_{name}", tier=tier) for name in names]
        for tier in ("crops", "embeddings", "prefix_pages", "stored_images")
    }
    assert found == {
        "crops": [17, 18, 19, 20, 21, 22.5],
        "embeddings": [1, 2, 3, 4, 5, None],
        "prefix_pages": [6, 7, 8, 9, 10, None],
        "stored_images": [11, 12, 13, 14, 15, 16.5],
    }


async def test_requests_are_counted_by_adapter_up_to_a_number_of_names(metrics):
    for number in range(66):
        for _ in range(2):
            call = answered_call()
            call.request = RequestSummary(Query("?", options=RequestOptions(adapter=f"a{number}")))
            metrics.record(call, OK)
    call = answered_call()
    call.request = RequestSummary(Query("?"))
    metrics.record(call, OK)
    assert value(metrics, "kestrel_adapter_requests_total", adapter="a63") == 2
    assert value(metrics, "kestrel_adapter_requests_total", adapter="a64") is None
    assert value(metrics, "kestrel_adapter_requests_total", adapter="other") == 4


async def test_stalls_are_counted_by_their_cause(engine, metrics, monkeypatch):
    reading = Load(0, 0, 0, 0, 0, 0.0, num_compilations_awaited=3, num_captures_awaited=2)
    monkeypatch.setattr(engine, "load", lambda: reading)
    assert value(metrics, "kestrel_engine_stalls_total", cause="compilation") == 3
    assert value(metrics, "kestrel_engine_stalls_total", cause="capture") == 2


async def test_slots_of_adapters_are_read_at_each_scrape(engine, metrics, monkeypatch):
    reading = AdapterLoad(8, 5, 3, num_loads=7, num_failures=2, num_evictions=1)
    monkeypatch.setattr(engine, "load", lambda: Load(0, 0, 0, 0, 0, 0.0, adapters=reading))
    slots = {state: value(metrics, "kestrel_adapter_slots", state=state) for state in ("total", "filled", "used")}
    assert slots == {"total": 8, "filled": 5, "used": 3}
    assert value(metrics, "kestrel_adapter_loads_total", outcome="loaded") == 7
    assert value(metrics, "kestrel_adapter_loads_total", outcome="failed") == 2
    assert value(metrics, "kestrel_adapter_evictions_total") == 1
