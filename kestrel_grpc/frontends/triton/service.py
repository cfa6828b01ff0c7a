"""`GRPCInferenceService`: its methods, in the groups that limit them. Knows no port and no connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from kestrel_grpc.frontends.triton.errors import in_tritons_words
from kestrel_grpc.frontends.triton.inference import Inference
from kestrel_grpc.frontends.triton.management import Management, Probes
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_grpc.wire.call_admission import CallAdmission
from kestrel_grpc.wire.call_groups import CallGroups
from kestrel_grpc.wire.errors import CallFailure

_SERVICE: Any = wire.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class TritonService:
    """What a gRPC server needs to serve it; see `ForeignService` of the gRPC frontend."""

    name: str = _SERVICE.full_name
    file: Any = wire.DESCRIPTOR

    def __init__(self, inference: Inference, probes: Probes, management: Management, groups: CallGroups) -> None:
        self._inference = inference
        self._probes = probes
        self._management = management
        self._groups = groups

    def express(self, failure: CallFailure) -> CallFailure:
        """A failure as Triton's clients expect it."""
        return in_tritons_words(failure)

    def handlers(self) -> Iterator[tuple[CallAdmission, Mapping[str, grpc.RpcMethodHandler]]]:
        """The methods of each group, by name."""
        groups = self._groups
        yield groups.health_checks(), _handlers(self._probes)
        yield groups.operations, _handlers(self._management)
        yield groups.inference, {"ModelInfer": _handler("ModelInfer", self._inference.ModelInfer)}
        yield groups.streams, {"ModelStreamInfer": _handler("ModelStreamInfer", self._inference.ModelStreamInfer)}


def _handlers(servicer: object) -> Mapping[str, grpc.RpcMethodHandler]:
    """The methods of the service that an object has."""
    names = [name for name in _SERVICE.methods_by_name if hasattr(servicer, name)]
    return {name: _handler(name, getattr(servicer, name)) for name in names}


def _handler(name: str, serve: Callable[..., Any]) -> Any:
    method = _SERVICE.methods_by_name[name]
    make: Any = (
        grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(
        serve,
        request_deserializer=method.input_type._concrete_class.FromString,
        response_serializer=method.output_type._concrete_class.SerializeToString,
    )
