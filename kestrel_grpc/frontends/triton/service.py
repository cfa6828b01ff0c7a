"""`GRPCInferenceService`: its methods, in the groups that limit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from kestrel_grpc.frontends.triton.errors import to_triton
from kestrel_grpc.frontends.triton.inference import Inference
from kestrel_grpc.frontends.triton.management import Management, MemoryRegistry, Probes
from kestrel_grpc.frontends.triton.shared_memory import SharedMemory
from kestrel_grpc.frontends.triton.statistics import Statistics
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_grpc.wire.call_admission import CallAdmission
from kestrel_grpc.wire.call_groups import CallGroups
from kestrel_grpc.wire.errors import CallFailure
from kestrel_grpc.wire.readiness import Readiness
from kestrel_grpc.wire.submission import Submission

_SERVICE: Any = wire.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class TritonService:
    """Triton's service for a gRPC server; see `ForeignService` of the gRPC frontend."""

    name: str = _SERVICE.full_name
    file: Any = wire.DESCRIPTOR

    def __init__(self, submission: Submission, readiness: Readiness, memory: SharedMemory, served: str) -> None:
        """`served` is the name that the engine gives its model."""
        self._submission = submission
        self._readiness = readiness
        self._memory = memory
        self._served = served
        self.statistics = Statistics()
        """Records the calls of all frontends."""

    def translate_failure(self, failure: CallFailure) -> CallFailure:
        """A failure as Triton's clients expect it."""
        return to_triton(failure)

    def handlers(self, groups: CallGroups) -> Iterator[tuple[CallAdmission, Mapping[str, grpc.RpcMethodHandler]]]:
        """The methods of each group, by name."""
        inference = Inference(
            self._submission, groups.inference, self._memory, groups.streams_are_crowded, self._served
        )
        management = Management(self._readiness, self.statistics, self._served, has_memory=self._memory.is_on)
        yield groups.health_checks(), _handlers(Probes(self._readiness, self._served))
        yield groups.operations, _handlers(management)
        yield groups.operations, _handlers(MemoryRegistry(self._memory))
        yield groups.inference, {"ModelInfer": _handler("ModelInfer", inference.ModelInfer)}
        yield groups.streams, {"ModelStreamInfer": _handler("ModelStreamInfer", inference.ModelStreamInfer)}

    def close(self) -> None:
        """Forget the shared memory of all callers."""
        self._memory.close()


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
