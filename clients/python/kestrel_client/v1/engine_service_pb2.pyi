from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATUS_UNSPECIFIED: _ClassVar[EngineStatus]
    ENGINE_STATUS_SERVING: _ClassVar[EngineStatus]
    ENGINE_STATUS_DRAINING: _ClassVar[EngineStatus]
    ENGINE_STATUS_RECOVERING: _ClassVar[EngineStatus]
    ENGINE_STATUS_DEAD: _ClassVar[EngineStatus]
ENGINE_STATUS_UNSPECIFIED: EngineStatus
ENGINE_STATUS_SERVING: EngineStatus
ENGINE_STATUS_DRAINING: EngineStatus
ENGINE_STATUS_RECOVERING: EngineStatus
ENGINE_STATUS_DEAD: EngineStatus

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "instance_id", "capabilities", "limits", "memory_plan", "model", "engines", "frontend_count", "settings")
    server_version: str
    instance_id: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    memory_plan: MemoryPlan
    model: str
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    frontend_count: int
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, server_version: _Optional[str] = ..., instance_id: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., memory_plan: _Optional[_Union[MemoryPlan, _Mapping]] = ..., model: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., frontend_count: _Optional[int] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value")
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("index", "device", "device_uuid", "max_running_requests", "memory_plan", "device_name")
    index: int
    device: str
    device_uuid: str
    max_running_requests: int
    memory_plan: MemoryPlan
    device_name: str
    def __init__(self, index: _Optional[int] = ..., device: _Optional[str] = ..., device_uuid: _Optional[str] = ..., max_running_requests: _Optional[int] = ..., memory_plan: _Optional[_Union[MemoryPlan, _Mapping]] = ..., device_name: _Optional[str] = ...) -> None: ...

class MemoryPlan(_message.Message):
    __slots__ = ("total_bytes", "utilization", "weight_bytes", "cache_bytes", "activation_bytes", "graph_bytes", "image_bytes", "other_bytes", "margin_bytes", "free_bytes", "image_cache_bytes", "adapter_bytes", "crop_cache_bytes")
    total_bytes: int
    utilization: float
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    graph_bytes: int
    image_bytes: int
    other_bytes: int
    margin_bytes: int
    free_bytes: int
    image_cache_bytes: int
    adapter_bytes: int
    crop_cache_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., image_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., margin_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., image_cache_bytes: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., crop_cache_bytes: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_image_bytes", "max_image_pixels", "max_queued_requests", "max_running_requests")
    max_message_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_queued_requests: int
    max_running_requests: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "revision", "architecture", "skills", "device", "dtype", "max_context_token_count", "parameter_count", "defaults")
    name: str
    revision: str
    architecture: str
    skills: _containers.RepeatedScalarFieldContainer[str]
    device: str
    dtype: str
    max_context_token_count: int
    parameter_count: int
    defaults: _containers.RepeatedCompositeFieldContainer[SkillDefaults]
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., skills: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., max_context_token_count: _Optional[int] = ..., parameter_count: _Optional[int] = ..., defaults: _Optional[_Iterable[_Union[SkillDefaults, _Mapping]]] = ...) -> None: ...

class SkillDefaults(_message.Message):
    __slots__ = ("skill", "temperature", "top_p", "max_tokens", "max_objects", "reasoning")
    skill: str
    temperature: float
    top_p: float
    max_tokens: int
    max_objects: int
    reasoning: bool
    def __init__(self, skill: _Optional[str] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., max_objects: _Optional[int] = ..., reasoning: bool = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load", "engines", "frontends")
    load: Load
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    frontends: _containers.RepeatedCompositeFieldContainer[FrontendLoad]
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., frontends: _Optional[_Iterable[_Union[FrontendLoad, _Mapping]]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("index", "device", "status", "process_id", "load")
    index: int
    device: str
    status: EngineStatus
    process_id: int
    load: Load
    def __init__(self, index: _Optional[int] = ..., device: _Optional[str] = ..., status: _Optional[_Union[EngineStatus, str]] = ..., process_id: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class FrontendLoad(_message.Message):
    __slots__ = ("name", "process_id", "open_request_count")
    name: str
    process_id: int
    open_request_count: int
    def __init__(self, name: _Optional[str] = ..., process_id: _Optional[int] = ..., open_request_count: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_request_count", "waiting_request_count", "preprocessing_request_count", "used_page_count", "page_count", "output_tokens_per_second", "requests_per_second")
    running_request_count: int
    waiting_request_count: int
    preprocessing_request_count: int
    used_page_count: int
    page_count: int
    output_tokens_per_second: float
    requests_per_second: float
    def __init__(self, running_request_count: _Optional[int] = ..., waiting_request_count: _Optional[int] = ..., preprocessing_request_count: _Optional[int] = ..., used_page_count: _Optional[int] = ..., page_count: _Optional[int] = ..., output_tokens_per_second: _Optional[float] = ..., requests_per_second: _Optional[float] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("callers",)
    callers: _containers.RepeatedCompositeFieldContainer[CallerUsage]
    def __init__(self, callers: _Optional[_Iterable[_Union[CallerUsage, _Mapping]]] = ...) -> None: ...

class CallerUsage(_message.Message):
    __slots__ = ("token", "answered_request_count", "failed_request_count", "refused_request_count", "input_token_count", "cached_token_count", "output_token_count")
    token: str
    answered_request_count: int
    failed_request_count: int
    refused_request_count: int
    input_token_count: int
    cached_token_count: int
    output_token_count: int
    def __init__(self, token: _Optional[str] = ..., answered_request_count: _Optional[int] = ..., failed_request_count: _Optional[int] = ..., refused_request_count: _Optional[int] = ..., input_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., output_token_count: _Optional[int] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("token", "namespace")
    token: str
    namespace: str
    def __init__(self, token: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ("page_count", "image_count", "crop_count")
    page_count: int
    image_count: int
    crop_count: int
    def __init__(self, page_count: _Optional[int] = ..., image_count: _Optional[int] = ..., crop_count: _Optional[int] = ...) -> None: ...

class CancelRequestsRequest(_message.Message):
    __slots__ = ("request_id", "token")
    request_id: str
    token: str
    def __init__(self, request_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class CancelRequestsResponse(_message.Message):
    __slots__ = ("cancelled_request_count",)
    cancelled_request_count: int
    def __init__(self, cancelled_request_count: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "slot_count", "available_names")
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    slot_count: int
    available_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., slot_count: _Optional[int] = ..., available_names: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "request_count", "is_current")
    name: str
    digest: str
    request_count: int
    is_current: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., request_count: _Optional[int] = ..., is_current: bool = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UploadAdapterRequest(_message.Message):
    __slots__ = ("header", "chunk")
    header: AdapterHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[AdapterHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class AdapterHeader(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256", "config", "replace")
    name: str
    size_bytes: int
    sha256: str
    config: bytes
    replace: bool
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., config: _Optional[bytes] = ..., replace: bool = ...) -> None: ...

class UploadAdapterResponse(_message.Message):
    __slots__ = ("name", "digest", "replaced")
    name: str
    digest: str
    replaced: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., replaced: bool = ...) -> None: ...

class DeleteAdapterRequest(_message.Message):
    __slots__ = ("name",)
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteAdapterResponse(_message.Message):
    __slots__ = ("request_count",)
    request_count: int
    def __init__(self, request_count: _Optional[int] = ...) -> None: ...
