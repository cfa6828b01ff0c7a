"""Makes a trace for each call when it has ended: a server span with one child for each stage in the engine.

    kestrel.v1.VisionService/Query
    ├── queue          waited to be prepared and to run
    ├── preprocess     image decoded, prompt built
    ├── prefill        up to the first token
    └── decode         the other tokens

The engine reports how long each stage took, not when it began, so the children follow each other from the start of
the call. Nothing is done while a call runs, and no span is ever current. At most `MAX_TRACED_PER_S` calls are
traced per second, so that tracing cannot slow a busy server down. Spans hold texts only with `--trace-content`, and
never images. The library's exporter sends them, configured by the standard `OTEL_*` variables.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from opentelemetry import propagate
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, format_trace_id

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import CallContext, Outcome, RequestSummary
from kestrel_grpc.telemetry.metrics import PROVIDER
from kestrel_runtime.api.events import Finished, QueryOutput

MAX_TRACED_PER_S = 50.0

# The statuses that count as errors of the server, by the OpenTelemetry convention.
_SERVER_FAULTS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
# The prefixes of the names of calls over HTTP.
_OVER_HTTP = ("rest/", "openai/")
_ONLY_PROTOCOL = "http/protobuf"
_ONLY_EXPORTER = "otlp"
_LAST_SPANS_S = 3.0


class TracingUnavailable(Exception):
    """Tracing is on but traces cannot be sent; the message says why."""


AddPart = Callable[[Span, str, int, int], None]
"""Adds a child to a span: its name, its start and its end, in nanoseconds since the epoch."""


class CallTracer:
    """Makes the spans of calls that have ended, and their children with `add_part`.

    `clock` gives seconds, for the limit on traced calls per second.
    """

    def __init__(
        self,
        tracer: Tracer,
        add_part: AddPart,
        *,
        model: str,
        address: tuple[str, int] = ("", 0),
        http_port: int = 0,
        has_content: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracer = tracer
        self._add_part = add_part
        self._model = model
        self._address = address
        self._http_port = http_port
        self._has_content = has_content
        self._clock = clock
        self._allowance = MAX_TRACED_PER_S
        self._allowed_at = clock()

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Traces a call that has ended, within the limit, and sets its `trace_id`."""
        if not self._is_allowed():
            return
        ended_ns = time.time_ns()
        started_ns = ended_ns - round(call.duration_s * 1e9)
        carrier = {key: value for key, value in call.headers if isinstance(value, str)}
        span = self._tracer.start_span(
            call.method,
            propagate.extract(carrier),
            SpanKind.SERVER,
            attributes=self._attributes(call, outcome),
            start_time=started_ns,
        )
        call.trace_id = format_trace_id(span.get_span_context().trace_id)
        if span.is_recording():
            if outcome.code in _SERVER_FAULTS:
                span.set_status(Status(StatusCode.ERROR, outcome.reason))
            if call.finished is not None:
                began_ns = started_ns
                for name, duration_s in _parts(call.finished):
                    part_ended_ns = began_ns + round(duration_s * 1e9)
                    self._add_part(span, name, began_ns, part_ended_ns)
                    began_ns = part_ended_ns
        span.end(ended_ns)

    def _is_allowed(self) -> bool:
        now = self._clock()
        earned = (now - self._allowed_at) * MAX_TRACED_PER_S
        self._allowance = min(MAX_TRACED_PER_S, self._allowance + earned)
        self._allowed_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def _attributes(self, call: CallContext, outcome: Outcome) -> Mapping[str, Any]:
        host, port = self._address
        if is_http := call.method.startswith(_OVER_HTTP):
            port = self._http_port
        attributes: dict[str, Any] = {
            **({} if is_http else {"rpc.system.name": "grpc"}),
            "rpc.method": call.method,
            "rpc.response.status_code": outcome.code,
            "server.address": host,
            "server.port": port,
            "kestrel.request_id": call.request_id,
        }
        if not outcome.is_ok:
            attributes |= {"error.type": outcome.code, "kestrel.reason": outcome.reason}
        if call.request is not None:
            attributes |= self._request_attributes(call.request)
            if call.finished is not None:
                attributes |= self._answer_attributes(call.request, call.finished)
        return attributes

    def _request_attributes(self, request: RequestSummary) -> Mapping[str, Any]:
        sampling = request.sampling
        known = {
            "gen_ai.operation.name": request.skill,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request.model(self._model),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "kestrel.image.size": request.image_bytes,
        }
        attributes = {name: value for name, value in known.items() if value is not None}
        if self._has_content:
            attributes["gen_ai.input.messages"] = _message("user", request.text)
        return attributes

    def _answer_attributes(self, request: RequestSummary, finished: Finished) -> Mapping[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.response.model": request.model(self._model),
            "gen_ai.response.finish_reasons": (finished.finish_reason.name.lower(),),
            "gen_ai.usage.input_tokens": finished.usage.num_input_tokens,
            "gen_ai.usage.output_tokens": finished.usage.num_output_tokens,
        }
        if self._has_content:
            attributes["gen_ai.output.messages"] = _message("assistant", _answered(finished))
        return attributes


class TraceExport:
    """Sends spans to `OTEL_EXPORTER_OTLP_ENDPOINT` in the background. Needs the extra `otel`."""

    def __init__(self, environment: Mapping[str, str], *, instance_id: str) -> None:
        """Sets up the exporter. Raises `TracingUnavailable`.

        `environment` is checked; the library itself reads the environment of the process.
        """
        require_tracing(environment)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        own = {
            "service.name": "kestrel-grpc",
            "service.version": __version__,
            "service.instance.id": instance_id,
        }
        # OTEL_SERVICE_NAME takes precedence over OTEL_RESOURCE_ATTRIBUTES, and both over the server's own values.
        given = {name: value for name, value in OTELResourceDetector().detect().attributes.items() if value != ""}
        self._provider = TracerProvider(resource=Resource.create({**own, **given}), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._new_part = partial(
            ReadableSpan,
            resource=self._provider.resource,
            instrumentation_scope=InstrumentationScope("kestrel_grpc", __version__),
        )

    @property
    def tracer(self) -> Tracer:
        """The tracer whose spans are sent."""
        return self._provider.get_tracer("kestrel_grpc", __version__)

    def add_part(self, whole: Span, name: str, began_ns: int, ended_ns: int) -> None:
        """Sends a span below `whole`, which is sent itself."""
        # Making a span with the tracer takes ten times as long, for locks, attributes and events, which these
        # spans do not need. Sampling was decided for the whole trace.
        parent = whole.get_span_context()
        own = SpanContext(
            parent.trace_id,
            self._provider.id_generator.generate_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )
        part = self._new_part(name, own, parent, start_time=began_ns, end_time=ended_ns)
        self._processor.on_end(part)

    def close(self) -> None:
        """Sends the remaining spans. Blocks until they are sent, for at most a few seconds."""
        # The library retries for longer than a server that stops can wait.
        sending = threading.Thread(target=self._provider.shutdown, name="kestrel-last-spans", daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)


def switched_off_by(environment: Mapping[str, str]) -> str | None:
    """Returns the setting that switches traces off, such as `OTEL_SDK_DISABLED=true`; None if there is none."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "OTEL_SDK_DISABLED=true"
    if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return "OTEL_TRACES_EXPORTER=none"
    return None


def require_tracing(environment: Mapping[str, str]) -> None:
    """Raises `TracingUnavailable` if traces cannot be sent. Allows a check before a model is loaded."""
    if switched_off_by(environment) is not None:
        return
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip() or _ONLY_EXPORTER
    if exporters.lower() != _ONLY_EXPORTER:
        raise TracingUnavailable(f"OTEL_TRACES_EXPORTER: traces are sent by {_ONLY_EXPORTER}, not {exporters}")
    for name, read, meaning in _EXPORTER_SETTINGS:
        for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            text = environment.get(variable)
            try:
                if text is not None:
                    read(text.strip())
            except ValueError:
                raise TracingUnavailable(f"{variable}: {text!r} must be {meaning}") from None
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or _ONLY_PROTOCOL
    )
    if protocol != _ONLY_PROTOCOL:
        raise TracingUnavailable(f"traces are sent as {_ONLY_PROTOCOL}, not {protocol}")
    for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
        if find_spec(name) is None:
            raise TracingUnavailable("tracing needs more packages: pip install 'kestrel-grpc[otel]'")


def _compression(text: str) -> str:
    if text.lower() not in ("none", "gzip", "deflate"):
        raise ValueError(text)
    return text


_EXPORTER_SETTINGS: Sequence[tuple[str, Callable[[str], object], str]] = (
    ("TIMEOUT", float, "a number of seconds"),
    ("COMPRESSION", _compression, "gzip, deflate or none"),
)
"""The settings whose mistakes the library does not handle: the end of the name, a parser, and the valid values."""


def _parts(finished: Finished) -> tuple[tuple[str, float], ...]:
    timing = finished.timing
    return (
        ("queue", timing.queue_s),
        ("preprocess", timing.preprocess_s),
        ("prefill", timing.prefill_s),
        ("decode", timing.decode_s),
    )


def _answered(finished: Finished) -> str:
    output = finished.output
    return output.answer if isinstance(output, QueryOutput) else getattr(output, "caption", repr(output))


def _message(role: str, text: str) -> str:
    """Returns one message in the format of the OpenTelemetry convention."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)
