"""`EngineService` over the wire."""

import asyncio
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_client.v1 import generation_pb2, vision_service_pb2
from kestrel_grpc import __version__
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.process.machine import processors
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import CoreReading, EngineStatus, MemoryPlan
from tests.fakes import HOLD, FakeEngine
from tests.server.serving import Serving, details_of, reason_of, serving


async def test_server_info_names_this_run_and_its_limits():
    async with serving(max_message_bytes=1_000_000) as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
        again = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    async with serving() as other_rig:
        other = await other_rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    config = rig.engine.info.config
    assert info.server_version == __version__
    assert info.instance_id == again.instance_id != other.instance_id
    assert info.limits == wire.Limits(
        max_message_bytes=1_000_000,
        max_image_bytes=config.max_image_bytes,
        max_image_pixels=config.max_image_pixels,
        max_queued_requests=config.max_queued_requests,
        max_running_requests=rig.engine.info.max_batch_size,
    )


async def test_server_info_tells_how_memory_was_divided():
    engine = FakeEngine()
    plan = MemoryPlan(2**36 + 1, 0.875, 2**35 + 3, 5, 7, 11, 13, 17, 19, -23, 29, 31, 37)
    engine.info = replace(engine.info, memory=plan)
    async with serving(engine) as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    assert info.memory_plan == wire.MemoryPlan(
        total_bytes=2**36 + 1,
        utilization=0.875,
        weight_bytes=2**35 + 3,
        cache_bytes=5,
        activation_bytes=7,
        graph_bytes=11,
        image_bytes=13,
        other_bytes=17,
        margin_bytes=19,
        free_bytes=-23,
        image_cache_bytes=29,
        adapter_bytes=31,
        crop_cache_bytes=37,
    )


async def test_an_engine_that_divided_no_memory_tells_of_none():
    async with serving() as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    assert not info.HasField("memory_plan")


async def test_models_tell_their_skills_and_the_defaults_in_force():
    async with serving() as rig:
        models = (await rig.engine_service.ListModels(wire.ListModelsRequest())).models
    assert [model.name for model in models] == ["fake"]
    model, info = models[0], rig.engine.info
    assert (model.architecture, model.device, model.dtype) == (info.architecture, info.device, info.dtype)
    assert (model.max_context_token_count, model.parameter_count) == (4096, 1_000_000)
    assert tuple(model.skills) == tuple(info.skills)
    defaults = {item.skill: item for item in model.defaults}
    assert set(defaults) == set(info.skills)
    assert (round(defaults["query"].temperature, 6), round(defaults["query"].top_p, 6)) == (0.2, 0.9)
    assert defaults["query"].max_tokens == 768
    assert defaults["query"].HasField("reasoning")
    assert not defaults["query"].reasoning
    assert not defaults["caption"].HasField("reasoning")
    assert defaults["point"].max_objects == defaults["detect"].max_objects == 150
    assert not defaults["point"].HasField("max_tokens")
    assert not defaults["segment"].HasField("max_objects")


async def test_defaults_are_those_of_the_skills_that_are_served():
    async with serving(FakeEngine(skills=("query", "point"))) as rig:
        models = (await rig.engine_service.ListModels(wire.ListModelsRequest())).models
    assert [item.skill for item in models[0].defaults] == ["query", "point"]


async def test_load_is_that_of_the_engine():
    async with serving() as rig:
        load = (await rig.engine_service.GetLoad(wire.GetLoadRequest())).load
    assert load == wire.Load(
        running_request_count=0,
        waiting_request_count=2,
        preprocessing_request_count=3,
        used_page_count=40,
        page_count=500,
        output_tokens_per_second=123.5,
        requests_per_second=7.5,
    )


async def test_the_only_engine_has_the_whole_load_and_one_process_takes_the_calls():
    async with serving(FakeEngine(lambda request: [HOLD])) as rig:
        running = rig.vision.CompleteQuery(vision_service_pb2.CompleteQueryRequest(question="?"))
        await rig.engine.num_submitted.acquire()
        told = await rig.engine_service.GetLoad(wire.GetLoadRequest())
        rig.engine.become(EngineStatus.RECOVERING)
        (recovering,) = (await rig.engine_service.GetLoad(wire.GetLoadRequest())).engines
        rig.engine.release()
        running.cancel()
    assert told.load.running_request_count == 1
    assert list(told.engines) == [
        wire.EngineLoad(
            index=0, device="cpu", status=wire.ENGINE_STATUS_SERVING, process_id=os.getpid(), load=told.load
        )
    ]
    assert list(told.frontends) == [wire.FrontendLoad(process_id=os.getpid(), open_request_count=1)]
    assert recovering.status == wire.ENGINE_STATUS_RECOVERING


async def test_every_state_of_an_engine_has_its_status_in_the_contract(monkeypatch: pytest.MonkeyPatch):
    states = [CoreReading(index, status, None, None, None) for index, status in enumerate(EngineStatus)]
    monkeypatch.setattr(FakeEngine, "cores", lambda _: states)
    async with serving() as rig:
        told = await rig.engine_service.GetLoad(wire.GetLoadRequest())
    names = [wire.EngineStatus.Name(engine.status) for engine in told.engines]
    assert names == [f"ENGINE_STATUS_{status.name}" for status in EngineStatus]


async def test_server_info_tells_of_each_engine(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine()
    plan = MemoryPlan(2**36 + 1, 0.875, 2**35 + 3, 5, 7, 11, 13, 17, 19, -23, 29, 31)
    gpu = replace(
        engine.info, device="cuda", device_uuid="1a2b", device_name="A GPU", memory=plan, max_batch_size=8
    )
    states = [
        CoreReading(0, EngineStatus.SERVING, gpu, engine.load(), 4711),
        CoreReading(1, EngineStatus.RECOVERING, None, None, None),
    ]
    monkeypatch.setattr(engine, "cores", lambda: states)
    engine.info = gpu
    async with serving(engine) as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
        again = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
        load = await rig.engine_service.GetLoad(wire.GetLoadRequest())
    assert list(info.engines) == [
        wire.EngineInfo(
            index=0,
            device="cuda",
            device_uuid="1a2b",
            device_name="A GPU",
            max_running_requests=8,
            memory_plan=info.memory_plan,
        ),
        wire.EngineInfo(index=1),
    ]
    assert info.memory_plan.total_bytes == 2**36 + 1
    assert info == again
    assert info.frontend_count == 0
    assert load.engines[1] == wire.EngineLoad(index=1, status=wire.ENGINE_STATUS_RECOVERING)
    assert not load.engines[1].HasField("load")


async def test_server_info_has_the_options_that_matter_and_names_no_files():
    engine = FakeEngine()
    config = EngineConfig(
        model="/private/model",
        adapters="/private/adapters",
        adapter_repositories=("org/private",),
        kv_dtype="float8",
    )
    chosen = replace(config.resolved("cpu"), num_kv_pages=77, kernels=(("resample", "reference"),))
    engine.info = replace(engine.info, config=config, chosen=chosen)
    async with serving(engine) as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    settings = {setting.name: setting.value for setting in info.settings}
    assert settings.items() >= {"kv_dtype": "float8", "kv_pages": "77", "max_batch_size": "16"}.items()
    assert settings.items() >= {"prefix_cache": "on", "kernels": "resample=reference", "dtype": "float32"}.items()
    assert "private" not in str(info)
    assert [engine.device_name for engine in info.engines] == [processors()]


def bearing(name: str, **more: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer kestrel_{name}"), *((key.replace("_", "-"), more[key]) for key in more))


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Alice and Bob share no namespace with anybody; the cameras share one. Alice may go before others."""
    path = tmp_path / "tokens.toml"
    lines = [line_for(name, f"kestrel_{name}", frozenset({Scope.INFER})) for name in ("alice", "bob", "camera")]
    lines[0] = lines[0].replace(" }", ', max_priority = "interactive" }')
    lines[-1] = lines[-1].replace(" }", ', namespace = "yard" }')
    lines.append(line_for("operator", "kestrel_operator", frozenset({Scope.ADMIN})))
    path.write_text("\n".join(lines))
    return str(path)


async def clear(rig: Serving, **owner: str) -> Any:
    return await rig.engine_service.ClearCache(wire.ClearCacheRequest(**owner), metadata=bearing("operator"))


async def test_caches_are_cleared_for_all_for_a_token_or_for_a_namespace(tokens: str):
    async with serving(tokens=tokens) as rig:
        response = await clear(rig)
        assert (response.page_count, response.image_count, response.crop_count) == (7, 2, 5)
        await clear(rig, token="alice")
        await clear(rig, token="camera")
        await clear(rig, namespace="yard")
    spaces = [None, "token:alice", "shared:yard", "shared:yard"]
    assert rig.engine.cleared == [(space, None) for space in spaces]


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        ({"token": "eve"}, "token: is not in the file of tokens, which has alice, bob, camera, operator"),
        ({"token": "camara"}, "alice, bob, camera, operator; did you mean camera?"),
        ({"token": ""}, "token: is not in the file of tokens"),
        ({"namespace": "alice"}, "namespace: is not in the file of tokens, which has yard"),
        ({"namespace": ""}, "namespace: is not in the file of tokens"),
    ],
)
async def test_who_has_nothing_cached_is_no_owner_and_the_known_ones_are_named(
    tokens: str, owner: dict[str, str], text: str
):
    async with serving(tokens=tokens) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await clear(rig, **owner)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert text in str(caught.value.details())
    assert rig.engine.cleared == []


async def test_of_many_callers_twenty_are_named(tmp_path: Path):
    path = tmp_path / "tokens.toml"
    names = [f"caller-{number:02}" for number in range(23)]
    lines = [line_for(name, f"kestrel_{name}", frozenset({Scope.INFER})) for name in names]
    path.write_text("\n".join([*lines, line_for("operator", "kestrel_operator", frozenset({Scope.ADMIN}))]))
    async with serving(tokens=str(path)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await clear(rig, token="x")
    text = str(caught.value.details())
    assert "caller-19 and 4 more" in text
    assert "caller-20" not in text


async def test_without_tokens_there_is_one_cache():
    async with serving() as rig:
        await rig.engine_service.ClearCache(wire.ClearCacheRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.engine_service.ClearCache(wire.ClearCacheRequest(token="alice"))
    assert rig.engine.cleared == [(None, None)]


async def test_requests_reach_the_engine_in_the_namespace_of_their_token(tokens: str):
    async with serving(tokens=tokens) as rig:
        for name in ("alice", "camera"):
            await rig.vision.CompleteQuery(
                vision_service_pb2.CompleteQueryRequest(question="?"), metadata=bearing(name)
            )
    assert rig.engine.namespaces == ["token:alice", "shared:yard"]


async def test_a_priority_counts_between_tokens_as_far_as_the_token_allows(tokens: str):
    asked = generation_pb2.Priority.values()[1:]
    async with serving(tokens=tokens) as rig:
        for name, priority in itertools.product(("alice", "bob"), asked):
            request = vision_service_pb2.CompleteQueryRequest(question="?", options={"priority": priority})
            await rig.vision.CompleteQuery(request, metadata=bearing(name))
    standings = [request.options.standing.name for request in rig.engine.requests]
    assert standings == ["INTERACTIVE", "NORMAL", "BATCH", "NORMAL", "NORMAL", "BATCH"]
    own = [request.options.priority.name for request in rig.engine.requests]
    assert own == ["INTERACTIVE", "NORMAL", "BATCH"] * 2


async def begun(rig: Serving, name: str, request_id: str, *, streaming: bool) -> asyncio.Task[grpc.StatusCode]:
    """A request that the engine has; its task returns how it ends."""
    metadata = bearing(name, x_request_id=request_id)
    call = (
        rig.vision.Query(vision_service_pb2.QueryRequest(question="?"), metadata=metadata)
        if streaming
        else rig.vision.CompleteQuery(vision_service_pb2.CompleteQueryRequest(question="?"), metadata=metadata)
    )
    ended = asyncio.ensure_future(call.code())
    await rig.engine.num_submitted.acquire()
    return ended


async def cancel(rig: Serving, **selection: str) -> int:
    request = wire.CancelRequestsRequest(**selection)
    response = await rig.engine_service.CancelRequests(request, metadata=bearing("operator"))
    return response.cancelled_request_count


@pytest.mark.parametrize("streaming", [False, True])
async def test_requests_are_cancelled_by_their_id_or_by_their_token(tokens: str, streaming: bool):
    async with serving(FakeEngine(lambda request: [HOLD]), tokens=tokens) as rig:
        one, two, three, other = [
            await begun(rig, name, request_id, streaming=streaming)
            for name, request_id in (("alice", "a"), ("alice", "b"), ("bob", "b"), ("bob", "c"))
        ]
        assert await cancel(rig, request_id="unknown") == 0
        assert await cancel(rig, request_id="b") == 2
        assert [await two, await three] == [grpc.StatusCode.CANCELLED] * 2
        assert await cancel(rig, token="alice") == 1
        assert await one is grpc.StatusCode.CANCELLED
        assert await cancel(rig, token="alice") == 0
        assert rig.engine.num_cancelled == 3
        assert not other.done()
        assert await cancel(rig, token="bob") == 1
        await other
        await rig.engine.is_idle.wait()


async def test_the_caller_of_a_cancelled_request_is_told_who_cancelled_it(tokens: str):
    async with serving(FakeEngine(lambda request: [HOLD]), tokens=tokens) as rig:
        metadata = bearing("alice")
        call = rig.vision.CompleteQuery(vision_service_pb2.CompleteQueryRequest(question="?"), metadata=metadata)
        await rig.engine.num_submitted.acquire()
        assert await cancel(rig, token="alice") == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.CANCELLED, "REQUEST_CANCELLED")
    assert "operator" in (caught.value.details() or "")


@pytest.mark.parametrize("selection", [{}, {"request_id": ""}, {"token": ""}])
async def test_cancelling_needs_a_name(tokens: str, selection: dict[str, str]):
    async with serving(FakeEngine(lambda request: [HOLD]), tokens=tokens) as rig:
        ended = await begun(rig, "alice", "a", streaming=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cancel(rig, **selection)
        assert "BadRequest" in details_of(caught.value)
        assert not ended.done()


async def test_adapters_are_listed_loaded_and_unloaded():
    async with serving() as rig:
        found = await rig.engine_service.ListAdapters(wire.ListAdaptersRequest())
        loaded = await rig.engine_service.LoadAdapter(wire.LoadAdapterRequest(name="colours"))
        unloaded = await rig.engine_service.UnloadAdapter(wire.UnloadAdapterRequest(name="colours"))
    expected = wire.Adapter(name="colours", digest="ab" * 32, request_count=2, is_current=True)
    assert list(found.adapters) == [expected]
    assert (loaded.adapter, unloaded.adapter) == (expected, expected)


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("../colours", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("absent", grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"),
        ("broken", grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_INVALID"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_is_refused(name: str, code: grpc.StatusCode, reason: str):
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.engine_service.LoadAdapter(wire.LoadAdapterRequest(name=name))
    assert (caught.value.code(), reason_of(caught.value)) == (code, reason)
    if name == "broken":
        assert "unexpected a; missing b" in str(caught.value.details())


async def test_calls_of_operators_are_logged_with_what_they_change_also_where_they_are_refused(
    tokens: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "kestrel_grpc")
    async with serving(tokens=tokens) as rig:
        await clear(rig)
        await clear(rig, token="alice")
        await rig.engine_service.CancelRequests(
            wire.CancelRequestsRequest(request_id="x" * 500), metadata=bearing("operator")
        )
        await rig.engine_service.GetLoad(wire.GetLoadRequest(), metadata=bearing("operator"))
        for name in ("alice", "nobody"):
            with pytest.raises(grpc.aio.AioRpcError):
                await rig.engine_service.LoadAdapter(wire.LoadAdapterRequest(name="a"), metadata=bearing(name))
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.audit"]
    found = [{name: line.get(name) for name in ("method", "outcome", "peer", "tenant")} for line in lines]
    cleared = {"method": "kestrel.v1.EngineService/ClearCache", "outcome": "OK", "tenant": "operator"}
    refused = {"method": "kestrel.v1.EngineService/LoadAdapter", "outcome": "SCOPE_REQUIRED", "tenant": "alice"}
    assert found == [
        {**cleared, "peer": "127.0.0.1"},
        {**cleared, "peer": "127.0.0.1"},
        {**cleared, "method": "kestrel.v1.EngineService/CancelRequests", "peer": "127.0.0.1"},
        {**refused, "peer": "127.0.0.1"},
        {**refused, "outcome": "TOKEN_INVALID", "tenant": None, "peer": "127.0.0.1"},
    ]
    assert [line.get("cleared") for line in lines[:2]] == ["all", "token alice"]
    assert lines[2]["cancelled"] == f"request_id {'x' * 200}"


async def test_clearing_and_cancelling_take_the_scope_of_operators(tokens: str):
    async with serving(tokens=tokens) as rig:
        for call in (
            rig.engine_service.ClearCache(wire.ClearCacheRequest(), metadata=bearing("alice")),
            rig.engine_service.CancelRequests(wire.CancelRequestsRequest(token="bob"), metadata=bearing("alice")),
            rig.engine_service.ListAdapters(wire.ListAdaptersRequest(), metadata=bearing("alice")),
            rig.engine_service.LoadAdapter(wire.LoadAdapterRequest(name="colours"), metadata=bearing("alice")),
            rig.engine_service.UnloadAdapter(wire.UnloadAdapterRequest(name="colours"), metadata=bearing("alice")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert rig.engine.cleared == []
