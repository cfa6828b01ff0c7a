"""Metadata and readiness of server and model, and the calls that are not supported."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

from kestrel_grpc import __version__
from kestrel_grpc.frontends.triton.model import MODEL, VERSION, config, metadata, require_model
from kestrel_grpc.frontends.triton.shared_memory import SharedMemory
from kestrel_grpc.frontends.triton.statistics import Statistics
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.errors import Unsupported
from kestrel_grpc.wire.readiness import Readiness

_EXTENSIONS = ("model_configuration", "model_repository", "statistics", "parameters")
_SERVER = "kestrel-grpc"


class Probes:
    """Health of the server and of its model. `served` is the engine's model name."""

    def __init__(self, readiness: Readiness, served: str) -> None:
        self._readiness = readiness
        self._served = served

    async def ServerLive(self, message: wire.ServerLiveRequest, call: CallContext) -> wire.ServerLiveResponse:
        return wire.ServerLiveResponse(live=True)

    async def ServerReady(self, message: wire.ServerReadyRequest, call: CallContext) -> wire.ServerReadyResponse:
        return wire.ServerReadyResponse(ready=self._readiness.is_ready)

    async def ModelReady(self, message: wire.ModelReadyRequest, call: CallContext) -> wire.ModelReadyResponse:
        require_model(message.name, message.version, self._served)
        return wire.ModelReadyResponse(ready=self._readiness.is_ready)


class Management:
    """Descriptions of server and model, and what there is to tell of their work."""

    def __init__(self, readiness: Readiness, statistics: Statistics, served: str, *, has_memory: bool) -> None:
        self._readiness = readiness
        self._statistics = statistics
        self._served = served
        self._extensions = (*_EXTENSIONS, *(("system_shared_memory",) if has_memory else ()))

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
        return self._statistics.report(name)

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


class MemoryRegistry:
    """The regions of shared memory of each caller."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

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


def _no_cuda() -> Unsupported:
    return Unsupported("shared memory of CUDA devices is not supported")
