"""What Ray's gRPC proxy registers: our services, whose messages it passes to replicas as they came.

Loaded by each proxy, so it imports neither torch nor the server. With the generated functions alone, a proxy would
parse a message and pickle it, which fails: the name of a message's module is that of the contract, `kestrel.v1`,
while the generated code is in `kestrel_client.v1`.
"""

# ruff: noqa: N802 (the functions bear the names of the generated ones)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from kestrel_client.v1 import engine_service_pb2_grpc, vision_service_pb2_grpc


class _Unparsed:
    """Takes the place of the server in a generated function: adds each method without a parser of its messages."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """Called by the generated code, with each method's handler."""
        unparsed = {name: handler._replace(request_deserializer=None) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, unparsed),))

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Called by the generated code with the same methods, which are ignored."""


def add_VisionService(servicer: Any, server: Any) -> None:
    """Register `VisionService`. Ray puts calls to its replicas in the place of the servicer's methods."""
    vision_service_pb2_grpc.add_VisionServiceServicer_to_server(servicer, _Unparsed(server))


def add_EngineService(servicer: Any, server: Any) -> None:
    """Register `EngineService`, likewise."""
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(servicer, _Unparsed(server))
