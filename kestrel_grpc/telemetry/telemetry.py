"""Metrics, traces and the port for probes, as the options configure them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.telemetry.http_health import HealthPort
from kestrel_grpc.telemetry.metrics import ServerMetrics
from kestrel_grpc.telemetry.tracing import CallTracer, TraceExport
from kestrel_grpc.wire.call_admission import Observer
from kestrel_runtime.api.engine import CacheLoad, Engine, EngineStatus

_log = logging.getLogger(__name__)


class Telemetry:
    """`observers` record every call that has ended. What is switched off has no observer and costs nothing."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        stored_images: Callable[[], CacheLoad] = CacheLoad,
        *,
        instance_id: str,
        is_ready: Callable[[], bool],
    ) -> None:
        """`stored_images` reads the store of images. Raises `TracingUnavailable`."""
        self._config = config
        self._export = TraceExport(os.environ, instance_id=instance_id) if config.tracing else None
        self._health_port: HealthPort | None = None
        observers: list[Observer] = []
        if self._export is not None:
            # First, since the other observers read the trace id of the call.
            tracer = CallTracer(
                self._export.tracer,
                self._export.add_part,
                model=engine.info.model,
                address=(config.host, config.port),
                http_port=config.http_port or 0,
                has_content=config.trace_content,
            )
            observers.append(tracer.record)
        self._registry = CollectorRegistry()
        if config.metrics_port is not None or config.http_port is not None:
            metrics = ServerMetrics(engine, stored_images)
            observers.append(metrics.record)
            self._registry = metrics.registry
        if config.metrics_port is not None:
            self._health_port = HealthPort(
                self._registry,
                is_alive=lambda: engine.status is not EngineStatus.DEAD,
                is_ready=is_ready,
            )
        self.observers: Sequence[Observer] = tuple(observers)

    @property
    def port(self) -> int | None:
        """The port of metrics and probes; None where there is none, and before `open`."""
        return None if self._health_port is None else self._health_port.port

    def metrics_text(self) -> bytes:
        """All metrics as Prometheus text. May be called from any thread."""
        return generate_latest(self._registry)

    def open(self) -> None:
        """Open the port for metrics and probes. Raises `OSError`."""
        if self._health_port is not None and self._config.metrics_port is not None:
            self._health_port.open(self._config.metrics_host, self._config.metrics_port)
            _log.info("metrics and probes on http://%s:%d", self._config.metrics_host, self._health_port.port)

    def close(self) -> None:
        """Close the port and send the last spans. Blocks."""
        if self._health_port is not None:
            self._health_port.close()
        if self._export is not None:
            self._export.close()
