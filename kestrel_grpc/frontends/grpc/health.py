"""Implements grpc.health.v1 on top of `Readiness`: `Check` for probes, `Watch` for load balancers."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.readiness import Readiness, ServiceUnknown
from kestrel_grpc.frontends.grpc.method_handlers import AdmittedServices


class Health:
    """Reports the same status for all services. `Watch` sends the latest status; a slow reader misses earlier
    ones."""

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(("", *services))

    def add_to(self, checks: AdmittedServices, watches: AdmittedServices) -> None:
        """Adds `Check` and `Watch` to a server, each with an admission of its own."""
        codec: Any = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        check = grpc.unary_unary_rpc_method_handler(self.Check, **codec)
        watch = grpc.unary_stream_rpc_method_handler(self.Watch, **codec)
        checks.add_registered_method_handlers(SERVICE_NAME, {"Check": check})
        watches.add_registered_method_handlers(SERVICE_NAME, {"Watch": watch})

    async def Check(self, request: HealthCheckRequest, call: CallContext) -> HealthCheckResponse:
        if request.service not in self._services:
            raise ServiceUnknown
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: HealthCheckRequest, call: CallContext
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        call.release()
        readiness, sent = self._readiness, None
        while True:
            # Read together: the next change, and `close` with it, may come while a response is being sent.
            changed, is_last, status = readiness.changed, readiness.is_closed, self._status(request.service)
            if status != sent:
                yield HealthCheckResponse(status=status)
                sent = status
            if is_last:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._readiness.is_ready else HealthCheckResponse.NOT_SERVING
