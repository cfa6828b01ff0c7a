"""`EngineService` over the wire."""

from __future__ import annotations

from dataclasses import replace

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_grpc import __version__
from kestrel_runtime.api.memory_plan import MemoryPlan
from tests.fakes import FakeEngine
from tests.server.serving import serving


async def test_server_info_names_this_run_and_its_limits() -> None:
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


async def test_server_info_tells_how_memory_was_divided() -> None:
    engine = FakeEngine()
    plan = MemoryPlan(2**36 + 1, 0.875, 2**35 + 3, 5, 7, 11, 13, 17, 19, -23)
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
    )


async def test_an_engine_that_divided_no_memory_tells_of_none() -> None:
    async with serving() as rig:
        info = await rig.engine_service.GetServerInfo(wire.GetServerInfoRequest())
    assert not info.HasField("memory_plan")


async def test_models_tell_their_skills_and_the_defaults_in_force() -> None:
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


async def test_defaults_are_those_of_the_skills_that_are_served() -> None:
    async with serving(FakeEngine(skills=("query", "point"))) as rig:
        models = (await rig.engine_service.ListModels(wire.ListModelsRequest())).models
    assert [item.skill for item in models[0].defaults] == ["query", "point"]


async def test_load_is_that_of_the_engine() -> None:
    async with serving() as rig:
        load = (await rig.engine_service.GetLoad(wire.GetLoadRequest())).load
    assert load == wire.Load(
        running_request_count=0,
        waiting_request_count=2,
        preprocessing_request_count=3,
        used_page_count=40,
        page_count=500,
        output_tokens_per_second=123.5,
    )
