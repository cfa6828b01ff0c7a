"""Traces, as a real receiver of OTLP gets them."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import OK, CallContext, Outcome, RequestSummary
from kestrel_grpc.telemetry.tracing import (
    MAX_TRACED_PER_S,
    CallTracer,
    TraceExport,
    TracingUnavailable,
    require_tracing,
    switched_off_by,
)
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Timing, Usage
from kestrel_runtime.api.requests import Query, RequestOptions, SamplingParams
from tests.server.otlp import Receiver, attributes, receiving

QUERY = "kestrel.v1.VisionService/Query"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMING = Timing(queue_s=0.25, preprocess_s=0.125, prefill_s=0.5, time_to_first_token_s=0.875, decode_s=0.0625)


def new_call(*metadata: tuple[str, str | bytes]) -> CallContext:
    call = CallContext((("x-request-id", "abc"), *metadata), None, QUERY)
    sampling = SamplingParams(temperature=0.5, max_tokens=7)
    call.request = RequestSummary(Query("what is secret?", b"12345", sampling=sampling))
    return call


def answered_call(*metadata: tuple[str, str | bytes]) -> CallContext:
    call = new_call(*metadata)
    call.finished = Finished(QueryOutput("a kestrel", None), FinishReason.STOP, Usage(735, 729, 3), TIMING)
    return call


Trace = Callable[..., None]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def trace(receiver, monkeypatch) -> Trace:
    """Trace one call and have it sent."""

    def trace(call: CallContext, outcome: Outcome = OK, **options: Any) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        export = TraceExport(os.environ, instance_id="here")
        address = ("127.0.0.1", 50051)
        CallTracer(export.tracer, export.add_part, model="fake", address=address, **options).record(call, outcome)
        export.close()

    return trace


def test_a_call_is_a_server_span_with_a_child_for_each_part_of_its_time(receiver, trace):
    trace(answered_call())
    root = receiver.span(QUERY)
    children = [span for span in receiver.spans if span is not root and span.name != QUERY]
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.parent_span_id == b""
    assert [span.name for span in children] == ["queue", "preprocess", "prefill", "decode"]
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert {span.trace_id for span in children} == {root.trace_id}
    durations_s = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in children]
    assert durations_s == pytest.approx([0.25, 0.125, 0.5, 0.0625])
    assert children[0].start_time_unix_nano == root.start_time_unix_nano


def test_the_span_says_what_was_asked_of_which_model_and_how_it_ended(receiver, trace):
    trace(answered_call())
    found = attributes(receiver.span(QUERY).attributes)
    assert found == {
        "rpc.system.name": "grpc",
        "rpc.method": QUERY,
        "rpc.response.status_code": "OK",
        "server.address": "127.0.0.1",
        "server.port": 50051,
        "kestrel.request_id": "abc",
        "kestrel.image.size": 5,
        "gen_ai.operation.name": "query",
        "gen_ai.provider.name": "kestrel",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 735,
        "gen_ai.usage.output_tokens": 3,
    }


def test_the_span_names_the_adapter_that_answered(receiver, trace):
    call = answered_call()
    call.request = RequestSummary(Query("?", options=RequestOptions(adapter="birds")))
    trace(call)
    found = attributes(receiver.span(QUERY).attributes)
    assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == ("fake/birds", "fake/birds")


def test_a_call_over_http_has_the_port_of_http_and_is_no_call_of_grpc(receiver, trace):
    call = answered_call()
    call.method = "rest/query"
    trace(call, http_port=8000)
    found = attributes(receiver.span("rest/query").attributes)
    assert "rpc.system.name" not in found
    assert (found["rpc.method"], found["server.port"]) == ("rest/query", 8000)


def test_the_resource_names_the_service(receiver, trace):
    trace(answered_call())
    assert receiver.resource["service.name"] == "kestrel-grpc"
    assert receiver.resource["service.instance.id"] == "here"


def test_the_service_is_named_by_the_standard_variable(receiver, trace, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "eyes")
    trace(answered_call())
    assert receiver.resource["service.name"] == "eyes"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=eyes"}, {"service.name": "eyes"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a", "OTEL_SERVICE_NAME": "b"}, {"service.name": "b"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a", "OTEL_SERVICE_NAME": ""}, {"service.name": "a"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=", "OTEL_SERVICE_NAME": ""}, {"service.name": "kestrel-grpc"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": " service.name = eyes , a=1"}, {"service.name": "eyes", "a": "1"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=vision%2C%20eu"}, {"service.name": "vision, eu"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "nonsense,a=1"}, {"service.name": "kestrel-grpc", "a": "1"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-7"}, {"service.instance.id": "pod-7"}),
    ],
)
def test_attributes_of_the_environment_come_before_those_of_the_server(
    receiver, trace, monkeypatch, variables, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trace(answered_call())
    found = receiver.resource
    assert {name: found.get(name) for name in expected} == expected
    assert found["service.version"] == __version__


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED=true"),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}, "OTEL_SDK_DISABLED=true"),
        ({"OTEL_TRACES_EXPORTER": "none"}, "OTEL_TRACES_EXPORTER=none"),
        ({"OTEL_SDK_DISABLED": "1"}, None),
        ({"OTEL_SDK_DISABLED": ""}, None),
        ({"OTEL_TRACES_EXPORTER": ""}, None),
    ],
)
def test_the_standard_variables_switch_traces_off(variables, setting):
    assert switched_off_by(variables) == setting
    require_tracing(variables)
    if setting is not None:
        require_tracing({**variables, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT: 'soon' must be a number of seconds"),
        ({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": ""}, "must be a number of seconds"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "brotli"}, "'brotli' must be gzip, deflate or none"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "traces are sent by otlp, not console"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(variables, complaint):
    with pytest.raises(TracingUnavailable, match=complaint):
        require_tracing(variables)


def test_a_call_joins_the_trace_of_its_caller(receiver, trace):
    call = answered_call(("traceparent", PARENT), ("tracestate", "vendor=1"))
    trace(call)
    root = receiver.span(QUERY)
    assert root.trace_id.hex() == call.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert root.trace_state == "vendor=1"


def test_what_a_caller_does_not_sample_is_not_sent(receiver, trace):
    trace(answered_call(("traceparent", PARENT[:-2] + "00")))
    assert receiver.spans == []


@pytest.mark.parametrize("broken", ["", "nonsense", "00-0-0-0"])
def test_a_broken_parent_begins_a_new_trace(receiver, trace, broken):
    trace(answered_call(("traceparent", broken)))
    assert receiver.span(QUERY).parent_span_id == b""


def test_texts_stay_out_unless_asked_for(receiver, trace):
    trace(answered_call())
    assert b"secret" not in receiver.requests[0].SerializeToString()
    assert b"a kestrel" not in receiver.requests[0].SerializeToString()


def test_texts_are_in_where_asked_for_and_images_never(receiver, trace):
    trace(answered_call(), has_content=True)
    found = attributes(receiver.span(QUERY).attributes)
    (asked,), (told,) = (json.loads(found[f"gen_ai.{side}.messages"]) for side in ("input", "output"))
    assert asked == {"role": "user", "parts": [{"type": "text", "content": "what is secret?"}]}
    assert told == {"role": "assistant", "parts": [{"type": "text", "content": "a kestrel"}]}
    assert b"12345" not in receiver.requests[0].SerializeToString()


def test_the_servers_faults_are_errors_and_the_callers_are_not(receiver, trace):
    trace(new_call(), Outcome("INTERNAL", "INTERNAL"))
    assert receiver.spans[0].status.code == SpanStatus.STATUS_CODE_ERROR
    assert attributes(receiver.spans[0].attributes)["error.type"] == "INTERNAL"
    trace(new_call(), Outcome("RESOURCE_EXHAUSTED", "QUEUE_FULL"))
    assert receiver.spans[1].status.code == SpanStatus.STATUS_CODE_UNSET
    assert attributes(receiver.spans[1].attributes)["kestrel.reason"] == "QUEUE_FULL"


def test_a_busy_server_traces_so_many_calls_a_second_and_no_more(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    export = TraceExport(os.environ, instance_id="here")
    now_s = 0.0
    tracer = CallTracer(export.tracer, export.add_part, model="fake", clock=lambda: now_s)
    calls = [new_call() for _ in range(300)]
    for call in calls[:200]:
        tracer.record(call, OK)
    now_s = 0.5
    for call in calls[200:]:
        tracer.record(call, OK)
    export.close()
    assert [bool(call.trace_id) for call in calls].count(True) == MAX_TRACED_PER_S * 1.5
    assert len(receiver.spans) == MAX_TRACED_PER_S * 1.5


def test_a_receiver_that_is_away_costs_no_call(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    export = TraceExport(os.environ, instance_id="here")
    CallTracer(export.tracer, export.add_part, model="fake").record(answered_call(), OK)
    export.close()
    assert "export" in caplog.text


def test_another_protocol_is_refused_by_name():
    with pytest.raises(TracingUnavailable, match="http/protobuf, not grpc"):
        TraceExport({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, instance_id="here")


def test_without_the_extra_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("kestrel_grpc.telemetry.tracing.find_spec", lambda name: None)
    with pytest.raises(TracingUnavailable, match=r"kestrel-grpc\[otel\]"):
        TraceExport({}, instance_id="here")
