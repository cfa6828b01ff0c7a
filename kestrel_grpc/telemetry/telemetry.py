"""Sets up metrics, traces and the log lines of calls, as the options configure them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from kestrel_grpc.calls.call_admission import Observer
from kestrel_grpc.calls.caller_address import CallerAddresses
from kestrel_grpc.calls.frame_counts import FrameCounts
from kestrel_grpc.calls.usage import CallerUsage
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.telemetry.logs import CallLog
from kestrel_grpc.telemetry.metrics import ServerMetrics
from kestrel_grpc.telemetry.tracing import CallTracer, TraceExport, switched_off_by
from kestrel_runtime.api.engine import CacheLoad, Engine

_log = logging.getLogger(__name__)


class Telemetry:
    """Holds the `observers` that record every call that has ended. A disabled feature has no observer and costs
    nothing."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        stored_images: Callable[[], CacheLoad] = CacheLoad,
        usage: Callable[[], Mapping[str, CallerUsage]] | None = None,
        frames: Callable[[], FrameCounts | None] = lambda: None,
        *,
        instance_id: str,
        reads_engine: bool = True,
    ) -> None:
        """`stored_images` reads the store of images, `usage` the counts by caller, `frames` those of frames.
        `reads_engine` is False if other processes report the metrics of the engine and of stored images. Raises
        `TracingUnavailable`."""
        self._export: TraceExport | None = None
        if config.tracing and (reason := switched_off_by(os.environ)) is not None:
            _log.info("no traces are sent: %s", reason)
        elif config.tracing:
            self._export = TraceExport(os.environ, instance_id=instance_id)
        self._call_log = CallLog(CallerAddresses(config.trusted_proxies or ()) if config.log_addresses else None)
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
            metrics = ServerMetrics(
                engine, stored_images, usage if config.caller_metrics else None, frames, reads_engine=reads_engine
            )
            observers.append(metrics.record)
            self._registry = metrics.registry
        self.observers: Sequence[Observer] = (*observers, self._call_log.record)

    def metrics_text(self) -> bytes:
        """Returns the metrics of this process as Prometheus text. May be called from any thread."""
        return generate_latest(self._registry)

    async def close(self) -> None:
        """Writes the outstanding counts of the log and sends the last spans."""
        self._call_log.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)
