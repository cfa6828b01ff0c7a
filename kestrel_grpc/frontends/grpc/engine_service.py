"""Implements `EngineService`: describes the server, its model and its load; clears caches and cancels requests."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_grpc import __version__
from kestrel_grpc.access.access import Access
from kestrel_grpc.access.token_file import shared_names, shared_namespace
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.peers import Peers
from kestrel_grpc.calls.usage import USAGE_TOPIC, CallerUsage, Usage, decoded, encoded, total
from kestrel_grpc.frontends.grpc.adapter_uploads import NOT_A_NAME, AdapterUploads
from kestrel_grpc.process.machine import processors
from kestrel_runtime.api.adapters import AdapterInfo, AdapterName
from kestrel_runtime.api.engine import CoreReading, Engine, EngineStatus, Load, MemoryPlan, SkillDefaults
from kestrel_runtime.api.errors import EngineUnavailable, InvalidRequest, Violation, did_you_mean

# The topics of questions between front ends.
_CANCEL = "cancel requests"
"""The topic of the question whose answer is the number of cancelled requests, in digits."""
_LOAD = "load"
"""The topic of the question whose answer is a `FrontendLoad`."""

_STATUSES: Mapping[EngineStatus, wire.EngineStatus] = MappingProxyType(
    {
        EngineStatus.SERVING: wire.ENGINE_STATUS_SERVING,
        EngineStatus.DRAINING: wire.ENGINE_STATUS_DRAINING,
        EngineStatus.RECOVERING: wire.ENGINE_STATUS_RECOVERING,
        EngineStatus.DEAD: wire.ENGINE_STATUS_DEAD,
    }
)

_MAX_LOGGED_CHARS = 200
_MAX_LISTED_NAMES = 20


class EngineService:
    """Implements `EngineService` on the engine's own description; `instance_id` names this run of the server.

    `access` knows the namespaces of callers. `CancelRequests` calls `cancel` in this process and has its `peers` do
    so; `GetUsage` adds up the `usage` of this process and theirs.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        requests: CallAdmission,
        cancel: Callable[[Callable[[CallContext], bool]], int],
        usage: Usage,
        peers: Peers,
        uploads: AdapterUploads,
        *,
        instance_id: str,
        max_message_bytes: int,
        capabilities: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._access = access
        self._requests = requests
        self._cancel_selected = cancel
        self._usage = usage
        self._peers = peers
        self._uploads = uploads
        peers.answer(_CANCEL, self._cancel_for_peer)
        peers.answer(_LOAD, lambda _: self._frontend_load().SerializeToString())
        peers.answer(USAGE_TOPIC, lambda _: encoded(self._usage.by_caller))
        self._server_info = self._render_server_info(instance_id, max_message_bytes, capabilities)
        self._models = wire.ListModelsResponse(models=[self._render_model()])

    async def GetServerInfo(
        self, request: wire.GetServerInfoRequest, call: CallContext
    ) -> wire.GetServerInfoResponse:
        info = wire.GetServerInfoResponse(engines=map(_engine_info, self._engine.cores()))
        info.MergeFrom(self._server_info)
        return info

    async def ListModels(self, request: wire.ListModelsRequest, call: CallContext) -> wire.ListModelsResponse:
        return self._models

    async def GetLoad(self, request: wire.GetLoadRequest, call: CallContext) -> wire.GetLoadResponse:
        try:
            # The load is needed most when a process does not answer.
            others = await self._peers.ask(_LOAD, b"", needs_all=False)
        except EngineUnavailable:
            others = ()
        frontends = [self._frontend_load(), *map(wire.FrontendLoad.FromString, others)]
        return wire.GetLoadResponse(
            load=_load(self._engine.load()),
            engines=map(_engine_load, self._engine.cores()),
            frontends=sorted(frontends, key=lambda frontend: frontend.name),
        )

    async def GetUsage(self, request: wire.GetUsageRequest, call: CallContext) -> wire.GetUsageResponse:
        others = map(decoded, await self._peers.ask(USAGE_TOPIC, b""))
        sums = total((self._usage.by_caller, *others))
        return wire.GetUsageResponse(callers=[_caller_usage(name, sums[name]) for name in sorted(sums)])

    async def ClearCache(self, request: wire.ClearCacheRequest, call: CallContext) -> wire.ClearCacheResponse:
        owner = request.WhichOneof("owner")
        call.audited = {"cleared": "all" if owner is None else _for_log(owner, getattr(request, owner))}
        cleared = await self._engine.clear_cache(self._namespace(request))
        return wire.ClearCacheResponse(
            page_count=cleared.num_pages, image_count=cleared.num_images, crop_count=cleared.num_crops
        )

    async def CancelRequests(
        self, request: wire.CancelRequestsRequest, call: CallContext
    ) -> wire.CancelRequestsResponse:
        selection = request.WhichOneof("selection")
        wanted = "" if selection is None else getattr(request, selection)
        if not wanted:
            raise InvalidRequest((Violation(selection or "", "needs a request id or the name of a token"),))
        call.audited = {"cancelled": _for_log(str(selection), wanted)}
        count = self._cancel(request)
        count += sum(map(int, await self._peers.ask(_CANCEL, request.SerializeToString())))
        call.audited = {**call.audited, "requests": count}
        return wire.CancelRequestsResponse(cancelled_request_count=count)

    async def ListAdapters(self, request: wire.ListAdaptersRequest, call: CallContext) -> wire.ListAdaptersResponse:
        return wire.ListAdaptersResponse(
            adapters=map(_adapter, self._engine.adapters()),
            slot_count=self._engine.load().adapters.num_slots,
            available_names=await self._engine.adapter_names(),
        )

    async def LoadAdapter(self, request: wire.LoadAdapterRequest, call: CallContext) -> wire.LoadAdapterResponse:
        name = _name_of(request)
        call.audited = {"adapter": name}
        return wire.LoadAdapterResponse(adapter=_adapter(await self._engine.load_adapter(name)))

    async def UnloadAdapter(
        self, request: wire.UnloadAdapterRequest, call: CallContext
    ) -> wire.UnloadAdapterResponse:
        name = _name_of(request)
        call.audited = {"adapter": name}
        return wire.UnloadAdapterResponse(adapter=_adapter(await self._engine.unload_adapter(name)))

    async def UploadAdapter(
        self, messages: AsyncIterator[wire.UploadAdapterRequest], call: CallContext
    ) -> wire.UploadAdapterResponse:
        return await self._uploads.receive(messages, call)

    async def DeleteAdapter(
        self, request: wire.DeleteAdapterRequest, call: CallContext
    ) -> wire.DeleteAdapterResponse:
        name = AdapterName.parse(_name_of(request))
        assert name is not None, "checked above"
        call.audited = {"adapter": str(name)}
        return await self._uploads.delete(name)

    def _frontend_load(self) -> wire.FrontendLoad:
        """Returns the load of this process."""
        return wire.FrontendLoad(
            name=self._peers.own_name,
            process_id=os.getpid(),
            open_request_count=len(self._requests.open_calls),
        )

    def _cancel(self, request: wire.CancelRequestsRequest) -> int:
        """Cancels the selected requests of this process and returns their number."""
        selection = request.WhichOneof("selection")
        attribute = "request_id" if selection == "request_id" else "principal"
        wanted = getattr(request, selection or "")
        return self._cancel_selected(lambda call: getattr(call, attribute) == wanted)

    def _cancel_for_peer(self, question: bytes) -> bytes:
        return b"%d" % self._cancel(wire.CancelRequestsRequest.FromString(question))

    def _namespace(self, request: wire.ClearCacheRequest) -> str | None:
        """Returns the namespace that a request names; None for all. Raises `InvalidRequest` if the namespace is
        unknown."""
        owner, known = request.WhichOneof("owner"), self._access.namespaces()
        if owner is None:
            return None
        namespace = known.get(request.token) if owner == "token" else shared_namespace(request.namespace)
        if namespace not in known.values():
            names = sorted(known) if owner == "token" else shared_names(known.values())
            raise InvalidRequest((Violation(owner, _unknown_owner(getattr(request, owner), names, known)),))
        return namespace

    def _render_server_info(
        self, instance_id: str, max_message_bytes: int, capabilities: Sequence[str]
    ) -> wire.GetServerInfoResponse:
        info = self._engine.info
        config = info.config
        return wire.GetServerInfoResponse(
            server_version=__version__,
            instance_id=instance_id,
            capabilities=capabilities,
            model=info.model,
            limits=wire.Limits(
                max_message_bytes=max_message_bytes,
                max_image_bytes=config.max_image_bytes,
                max_image_pixels=config.max_image_pixels,
                max_queued_requests=config.max_queued_requests,
                max_running_requests=info.max_batch_size,
            ),
            memory_plan=None if info.memory is None else _memory_plan(info.memory),
            frontend_count=self._peers.num_frontends,
            settings=[
                wire.Setting(name=name, value=value)
                for name, value in (config if info.chosen is None else info.chosen).described().items()
            ],
        )

    def _render_model(self) -> wire.Model:
        info = self._engine.info
        return wire.Model(
            name=info.model,
            revision=info.revision or "",
            architecture=info.architecture,
            skills=info.skills,
            device=info.device,
            dtype=info.dtype,
            max_context_token_count=info.max_context_tokens,
            parameter_count=info.num_parameters,
            defaults=_skill_defaults(info.skills),
        )


def _caller_usage(name: str, counts: CallerUsage) -> wire.CallerUsage:
    return wire.CallerUsage(
        token=name,
        answered_request_count=counts.num_answered,
        failed_request_count=counts.num_failed,
        refused_request_count=counts.num_refused,
        input_token_count=counts.num_input_tokens,
        cached_token_count=counts.num_cached_tokens,
        output_token_count=counts.num_output_tokens,
    )


def _for_log(kind: str, name: str) -> str:
    """Returns a name from an operator's call, cut to a length that fits into a line of the log."""
    return f"{kind} {name[:_MAX_LOGGED_CHARS]}"


def _unknown_owner(name: str, names: Sequence[str], tokens: Collection[str]) -> str:
    """Returns what is wrong with the name of an owner of cached content, which is none of these names."""
    if not tokens:
        return "cannot be found: the server was started without --tokens, and knows no callers"
    listed = ", ".join(names[:_MAX_LISTED_NAMES]) or "none"
    more = len(names) - _MAX_LISTED_NAMES
    further = f" and {more} more" if more > 0 else ""
    return f"is not in the file of tokens, which has {listed}{further}{did_you_mean(name, names)}"


def _name_of(request: wire.LoadAdapterRequest | wire.UnloadAdapterRequest | wire.DeleteAdapterRequest) -> str:
    """Returns the name of an adapter. Raises `InvalidRequest` if the text is not one."""
    if AdapterName.parse(request.name) is None:
        raise InvalidRequest((Violation("name", NOT_A_NAME),))
    return request.name


def _adapter(info: AdapterInfo) -> wire.Adapter:
    return wire.Adapter(
        name=info.name, digest=info.digest, request_count=info.num_requests, is_current=info.is_current
    )


def _load(load: Load) -> wire.Load:
    return wire.Load(
        running_request_count=load.num_running,
        waiting_request_count=load.num_waiting,
        preprocessing_request_count=load.num_preprocessing,
        used_page_count=load.num_used_pages,
        page_count=load.num_pages,
        output_tokens_per_second=load.tokens_per_second,
        requests_per_second=load.requests_per_second,
    )


def _engine_load(core: CoreReading) -> wire.EngineLoad:
    return wire.EngineLoad(
        index=core.index,
        device="" if core.info is None else core.info.device,
        status=_STATUSES[core.status],
        process_id=core.process_id or 0,
        load=None if core.load is None else _load(core.load),
    )


def _engine_info(core: CoreReading) -> wire.EngineInfo:
    described, info = wire.EngineInfo(index=core.index), core.info
    if info is not None:
        described.device = info.device
        described.device_uuid = info.device_uuid or ""
        described.device_name = info.device_name or processors()
        described.max_running_requests = info.max_batch_size
        if info.memory is not None:
            described.memory_plan.CopyFrom(_memory_plan(info.memory))
    return described


def _memory_plan(plan: MemoryPlan) -> wire.MemoryPlan:
    return wire.MemoryPlan(
        total_bytes=plan.total_bytes,
        utilization=plan.utilization,
        weight_bytes=plan.weight_bytes,
        cache_bytes=plan.cache_bytes,
        activation_bytes=plan.activation_bytes,
        graph_bytes=plan.graph_bytes,
        image_bytes=plan.image_bytes,
        other_bytes=plan.other_bytes,
        margin_bytes=plan.margin_bytes,
        free_bytes=plan.free_bytes,
        image_cache_bytes=plan.image_cache_bytes,
        crop_cache_bytes=plan.crop_cache_bytes,
        adapter_bytes=plan.adapter_bytes,
    )


def _skill_defaults(skills: Mapping[str, SkillDefaults]) -> Iterator[wire.SkillDefaults]:
    for name, given in skills.items():
        defaults = wire.SkillDefaults(
            skill=name,
            temperature=given.temperature,
            top_p=given.top_p,
            max_tokens=given.max_tokens,
            max_objects=given.max_objects,
        )
        if name in ("query", "chat"):
            defaults.reasoning = False
        yield defaults
