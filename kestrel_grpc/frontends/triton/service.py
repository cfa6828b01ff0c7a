"""Implements `GRPCInferenceService`: readiness, descriptions, statistics, shared memory, and refusals of the rest.

`inference.py` has the two methods that run requests.
"""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import grpc

from kestrel_grpc import __version__
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.errors import CallFailure, Unsupported
from kestrel_grpc.calls.peers import Peers
from kestrel_grpc.calls.readiness import Readiness
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.frontends.triton.inference import Inference
from kestrel_grpc.frontends.triton.model import MODEL, VERSION, config, is_model, metadata, require_model
from kestrel_grpc.frontends.triton.rendering import to_triton
from kestrel_grpc.frontends.triton.shared_memory import SharedMemory
from kestrel_grpc.frontends.triton.statistics import Statistics
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire

_SERVICE: Any = wire.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_PROBES = frozenset(("ServerLive", "ServerReady", "ModelReady"))
_EXTENSIONS = ("model_configuration", "model_repository", "statistics", "parameters")
_SERVER = "kestrel-grpc"
_STATISTICS = "statistics of the model"
"""The topic of the question between front ends; the answer is a serialized `ModelStatistics`."""


class TritonService:
    """Implements Triton's service for a gRPC server; see `ForeignService` of the gRPC frontend."""

    name: str = _SERVICE.full_name
    file: Any = wire.DESCRIPTOR

    def __init__(
        self, submission: Submission, readiness: Readiness, memory: SharedMemory, peers: Peers, served: str
    ) -> None:
        """`served` is the engine's name of its model."""
        self._submission = submission
        self._readiness = readiness
        self._memory = memory
        self._served = served
        self._extensions = (*_EXTENSIONS, *(("system_shared_memory",) if memory.is_on else ()))
        self._statistics = Statistics()
        self._peers = peers
        peers.answer(_STATISTICS, lambda _: self._statistics.serialized())

    def translate_failure(self, failure: CallFailure) -> CallFailure:
        """Returns the failure in the form that Triton's clients expect."""
        return to_triton(failure)

    def handlers(self, groups: CallGroups) -> Iterator[tuple[CallAdmission, Mapping[str, grpc.RpcMethodHandler]]]:
        """Yields the methods of each group by name, with the admission of the group."""
        inference = Inference(
            self._submission,
            groups.inference,
            self._memory,
            groups.streams_are_crowded,
            self._served,
            self._statistics,
        )
        operations = [name for name in _SERVICE.methods_by_name if name not in _PROBES and hasattr(self, name)]
        yield groups.health_checks(), _handlers(self, _PROBES)
        yield groups.operations, _handlers(self, operations)
        yield groups.inference, _handlers(inference, ("ModelInfer",))
        yield groups.streams, _handlers(inference, ("ModelStreamInfer",))

    def close(self) -> None:
        """Forgets the shared memory of all callers."""
        self._memory.close()

    async def ServerLive(self, message: wire.ServerLiveRequest, call: CallContext) -> wire.ServerLiveResponse:
        return wire.ServerLiveResponse(live=True)

    async def ServerReady(self, message: wire.ServerReadyRequest, call: CallContext) -> wire.ServerReadyResponse:
        return wire.ServerReadyResponse(ready=self._readiness.is_ready)

    async def ModelReady(self, message: wire.ModelReadyRequest, call: CallContext) -> wire.ModelReadyResponse:
        # Programs wait for a model, or search for one, by this answer: an unknown name is no error.
        is_served = is_model(message.name, message.version, self._served)
        return wire.ModelReadyResponse(ready=is_served and self._readiness.is_ready)

    async def ServerMetadata(
        self, message: wire.ServerMetadataRequest, call: CallContext
    ) -> wire.ServerMetadataResponse:
        return wire.ServerMetadataResponse(name=_SERVER, version=__version__, extensions=self._extensions)

    async def ModelMetadata(
        self, message: wire.ModelMetadataRequest, call: CallContext
    ) -> wire.ModelMetadataResponse:
        require_model(message.name, message.version, self._served)
        return metadata(message.name)

    async def ModelConfig(self, message: wire.ModelConfigRequest, call: CallContext) -> wire.ModelConfigResponse:
        require_model(message.name, message.version, self._served)
        return wire.ModelConfigResponse(config=config(message.name))

    async def ModelStatistics(
        self, message: wire.ModelStatisticsRequest, call: CallContext
    ) -> wire.ModelStatisticsResponse:
        name = message.name or MODEL
        require_model(name, message.version, self._served)
        return self._statistics.report(name, await self._peers.ask(_STATISTICS, b""))

    async def RepositoryIndex(
        self, message: wire.RepositoryIndexRequest, call: CallContext
    ) -> wire.RepositoryIndexResponse:
        is_ready = self._readiness.is_ready
        if message.ready and not is_ready:
            return wire.RepositoryIndexResponse()
        index = wire.RepositoryIndexResponse.ModelIndex(
            name=MODEL, version=VERSION, state="READY" if is_ready else "UNAVAILABLE"
        )
        return wire.RepositoryIndexResponse(models=[index])

    async def RepositoryModelLoad(self, message: wire.RepositoryModelLoadRequest, call: CallContext) -> None:
        raise Unsupported("the server serves the model that it was started with; it loads no other")

    async def RepositoryModelUnload(self, message: wire.RepositoryModelUnloadRequest, call: CallContext) -> None:
        raise Unsupported("the server serves the model that it was started with; it does not unload it")

    async def TraceSetting(self, message: wire.TraceSettingRequest, call: CallContext) -> None:
        raise Unsupported("tracing is set by options of the server")

    async def LogSettings(self, message: wire.LogSettingsRequest, call: CallContext) -> None:
        raise Unsupported("logging is set by options of the server")

    async def SystemSharedMemoryStatus(
        self, message: wire.SystemSharedMemoryStatusRequest, call: CallContext
    ) -> wire.SystemSharedMemoryStatusResponse:
        response = wire.SystemSharedMemoryStatusResponse()
        for name, region in self._memory.regions(call, message.name).items():
            status = response.regions[name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.num_bytes
        return response

    async def SystemSharedMemoryRegister(
        self, message: wire.SystemSharedMemoryRegisterRequest, call: CallContext
    ) -> wire.SystemSharedMemoryRegisterResponse:
        self._memory.register(call, message.name, message.key, message.offset, message.byte_size)
        return wire.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, message: wire.SystemSharedMemoryUnregisterRequest, call: CallContext
    ) -> wire.SystemSharedMemoryUnregisterResponse:
        self._memory.unregister(call, message.name)
        return wire.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, message: wire.CudaSharedMemoryStatusRequest, call: CallContext) -> None:
        raise _no_cuda()

    async def CudaSharedMemoryRegister(
        self, message: wire.CudaSharedMemoryRegisterRequest, call: CallContext
    ) -> None:
        raise _no_cuda()

    async def CudaSharedMemoryUnregister(
        self, message: wire.CudaSharedMemoryUnregisterRequest, call: CallContext
    ) -> None:
        raise _no_cuda()


def _handlers(servicer: object, names: Collection[str]) -> Mapping[str, grpc.RpcMethodHandler]:
    return {name: _handler(_SERVICE.methods_by_name[name], getattr(servicer, name)) for name in names}


def _handler(method: Any, serve: Callable[..., Any]) -> Any:
    make: Any = (
        grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(
        serve,
        request_deserializer=method.input_type._concrete_class.FromString,
        response_serializer=method.output_type._concrete_class.SerializeToString,
    )


def _no_cuda() -> Unsupported:
    return Unsupported("shared memory of CUDA devices is not supported")
