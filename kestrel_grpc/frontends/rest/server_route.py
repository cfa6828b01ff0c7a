"""Serves the route that describes the server, as `EngineService.GetServerInfo` does over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.frontends.http.endpoint import Description, Group, Operation
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_grpc.process.machine import processors
from kestrel_runtime.api.engine import CoreReading, Engine


class ServerRoute:
    """Describes the engine and its devices. `num_frontends` is 0 where one process takes calls and computes."""

    def __init__(self, engine: Engine, num_frontends: int) -> None:
        self._engine = engine
        self._num_frontends = num_frontends
        self.operation = Operation(
            "GET",
            "/v1/server",
            "rest/server",
            None,
            self._describe,
            group=Group.OPERATIONS,
            description=Description(
                "getServer",
                "Says which server this is: its version, model, devices and options.",
                "The server.",
            ),
        )

    async def _describe(self, _: Mapping[str, str], call: CallContext) -> bytes:
        info = self._engine.info
        return to_json(
            {
                "server_version": __version__,
                "model": info.model,
                "revision": info.revision or "",
                "architecture": info.architecture,
                "dtype": info.dtype,
                "engines": [_engine(core) for core in self._engine.cores()],
                "frontend_count": self._num_frontends,
                "settings": (info.chosen or info.config).described(),
            }
        )


def _engine(core: CoreReading) -> dict[str, Any]:
    info = core.info
    if info is None:  # its process starts
        return {"index": core.index, "device": "", "device_name": ""}
    return {"index": core.index, "device": info.device, "device_name": info.device_name or processors()}
