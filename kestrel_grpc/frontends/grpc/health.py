"""grpc.health.v1, following the engine: `Check` for probes, `Watch` for balancers. Knows nothing of requests."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_grpc.wire.call_context import Call
from kestrel_runtime.api.engine import Engine, EngineStatus


class ServiceUnknown(Exception):
    """No service of this name is served."""


class Health:
    """All services serve, or none does. Belongs to the event loop that it was made on.

    Watchers see the latest state; states that come and go between two of their looks are skipped. `close` ends
    them all, since an open `Watch` would hold up the server's stop.
    """

    def __init__(self, engine: Engine, services: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._services = frozenset(("", *services))
        self._is_serving = engine.status is EngineStatus.SERVING
        self._is_refusing = False
        self._is_closed = False
        self._changed = asyncio.Event()
        engine.on_status_change(self._follow)

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler]:
        """Both methods, for `CallScope`."""
        codec: Any = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self.Check, **codec),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, **codec),
        }

    async def Check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        if request.service not in self._services:
            raise ServiceUnknown
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: HealthCheckRequest, call: Call) -> AsyncGenerator[HealthCheckResponse, None]:
        call.release()
        told = None
        while True:
            # Of one moment: while a state is being sent the next may come, and `close` with it.
            changed, is_last, status = self._changed, self._is_closed, self._status(request.service)
            if status != told:
                yield HealthCheckResponse(status=status)
                told = status
            if is_last:
                return
            await changed.wait()

    @property
    def is_serving(self) -> bool:
        """What probes are told."""
        return self._is_serving

    def refuse(self) -> None:
        """Report NOT_SERVING from now on, whatever the engine says."""
        self._is_refusing = True
        self._update(is_serving=False)

    def close(self) -> None:
        """Report NOT_SERVING and end every `Watch`."""
        self._is_closed = True
        self.refuse()

    def _follow(self, status: EngineStatus) -> None:
        if not self._loop.is_closed():  # the engine may outlive the server, and calls from any thread
            self._loop.call_soon_threadsafe(lambda: self._update(is_serving=status is EngineStatus.SERVING))

    def _update(self, *, is_serving: bool) -> None:
        self._is_serving = is_serving and not self._is_refusing
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._is_serving else HealthCheckResponse.NOT_SERVING
