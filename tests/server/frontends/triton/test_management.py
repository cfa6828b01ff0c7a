"""What the server tells Triton's clients about itself and its model."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kestrel_client.v1 import vision_service_pb2 as vision
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import ImageError
from tests.fakes import HOLD, FakeEngine
from tests.fakes import answers as scripted
from tests.server.http_calls import IMAGE_URL, HttpServing
from tests.server.serving import IMAGE, reason_of, serving
from tests.server.triton_calls import TritonStub, answers, iterate, query


async def test_probes_follow_the_engine():
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        for expected in (True, False):
            assert (await triton.ServerLive(wire.ServerLiveRequest())).live
            assert (await triton.ServerReady(wire.ServerReadyRequest())).ready is expected
            assert (await triton.ModelReady(wire.ModelReadyRequest(name="moondream"))).ready is expected
            index = await triton.RepositoryIndex(wire.RepositoryIndexRequest())
            assert [model.state for model in index.models] == ["READY" if expected else "UNAVAILABLE"]
            ready = await triton.RepositoryIndex(wire.RepositoryIndexRequest(ready=True))
            assert len(ready.models) == expected
            rig.server.withdraw()
        health = await rig.health.Check(HealthCheckRequest(service="inference.GRPCInferenceService"))
        assert health.status == HealthCheckResponse.NOT_SERVING


async def test_a_name_that_the_server_does_not_have_is_not_ready():
    asked = [("moondream", "1"), ("fake", ""), ("", ""), ("Moondream", ""), ("moondream", "x"), ("x" * 100_000, "")]
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        answers = [
            (await triton.ModelReady(wire.ModelReadyRequest(name=name, version=version))).ready
            for name, version in asked
        ]
        assert answers == [True, True, False, False, False, False]
        assert "ModelReady" not in rig.server.metrics_text().decode()


async def test_the_model_is_described():
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        metadata = await triton.ModelMetadata(wire.ModelMetadataRequest(name="moondream", version="1"))
        config = (await triton.ModelConfig(wire.ModelConfigRequest(name="moondream"))).config
        server = await triton.ServerMetadata(wire.ServerMetadataRequest())
    assert {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs} == {
        "SKILL": ("BYTES", [1]),
        "QUESTION": ("BYTES", [1]),
        "OBJECT": ("BYTES", [1]),
        "IMAGE": ("BYTES", [1]),
        "LENGTH": ("BYTES", [1]),
        "TEMPERATURE": ("FP32", [1]),
        "TOP_P": ("FP32", [1]),
        "MAX_TOKENS": ("INT32", [1]),
        "MAX_OBJECTS": ("INT32", [1]),
        "MIN_SCORE": ("FP32", [1]),
        "REASONING": ("BOOL", [1]),
        "STREAM": ("BOOL", [1]),
        "SPATIAL_REFS": ("FP32", [-1, -1]),
        "EYE": ("FP32", [2]),
    }
    assert [(tensor.name, tensor.datatype) for tensor in metadata.outputs] == [("TEXT_OUTPUT", "BYTES")]
    assert [item.name for item in config.input] == [tensor.name for tensor in metadata.inputs]
    assert config.output[0].data_type == wire.TYPE_STRING
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    assert [item.name for item in config.input if not item.optional] == ["SKILL"]
    assert server.name == "kestrel-grpc"
    assert list(server.extensions) == ["model_configuration", "model_repository", "statistics", "parameters"]


async def test_the_model_has_the_name_of_the_engine_too():
    async with serving() as rig:
        metadata = await TritonStub(rig.channel).ModelMetadata(wire.ModelMetadataRequest(name="fake"))
    assert metadata.name == "fake"


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("other", "", "Request for unknown model: 'other' is not found"),
        ("moondream", "9", "Request for unknown model: 'moondream' version 9 is not found"),
    ],
)
async def test_other_models_are_unknown(name: str, version: str, text: str):
    asked = query()
    asked.model_name, asked.model_version = name, version
    async with serving() as rig:
        triton = TritonStub(rig.channel)
        assert not (await triton.ModelReady(wire.ModelReadyRequest(name=name, version=version))).ready
        calls: list[Any] = [
            triton.ModelMetadata(wire.ModelMetadataRequest(name=name, version=version)),
            triton.ModelConfig(wire.ModelConfigRequest(name=name, version=version)),
            triton.ModelStatistics(wire.ModelStatisticsRequest(name=name, version=version)),
            triton.ModelInfer(asked),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
            assert reason_of(caught.value) == "MODEL_NOT_FOUND"


async def test_statistics_count_requests_and_their_nanoseconds():
    outcomes = iter([scripted, lambda request: [ImageError("is broken")], scripted])
    async with serving(FakeEngine(lambda request: next(outcomes)(request))) as rig:
        triton = TritonStub(rig.channel)
        await triton.ModelInfer(query())
        with pytest.raises(grpc.aio.AioRpcError):
            await triton.ModelInfer(query())
        await triton.ModelInfer(query())
        (stats,) = (await triton.ModelStatistics(wire.ModelStatisticsRequest())).model_stats
    assert (stats.name, stats.version, stats.inference_count, stats.execution_count) == ("moondream", "1", 2, 2)
    times = stats.inference_stats
    assert (times.success.count, times.fail.count) == (2, 1)
    assert (times.queue.count, times.queue.ns) == (2, 2_000_000)
    assert (times.compute_input.count, times.compute_input.ns) == (2, 4_000_000)
    assert (times.compute_infer.count, times.compute_infer.ns) == (2, 1_500_000_000)
    assert stats.last_inference > 1_600_000_000_000


async def test_calls_of_other_apis_do_not_change_the_statistics_of_triton():
    async with serving(http_port=0) as rig:
        triton = TritonStub(rig.channel)
        await triton.ModelInfer(query())
        assert await answers(triton.ModelStreamInfer(iterate(query("1"), query("2", STREAM=True))))
        assert await answers(rig.vision.Query(vision.QueryRequest(question="?", image=IMAGE)))
        for path, body in (
            ("/v1/query", {"question": "?", "image_url": IMAGE_URL}),
            ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "?"}]}),
        ):
            assert (await HttpServing(rig.server, rig.engine).ask(path, body)).status == 200
        (stats,) = (await triton.ModelStatistics(wire.ModelStatisticsRequest())).model_stats
    assert (stats.inference_count, stats.inference_stats.success.count, stats.inference_stats.fail.count) == (
        3,
        3,
        0,
    )


async def test_a_request_of_a_stream_whose_caller_leaves_counts_as_failed():
    async with serving(FakeEngine(lambda request: [HOLD])) as rig:
        triton = TritonStub(rig.channel)
        call = triton.ModelStreamInfer(iterate(query()))
        await rig.engine.num_submitted.acquire()
        call.cancel()
        await asyncio.wait_for(rig.engine.is_idle.wait(), 60)
        (stats,) = (await triton.ModelStatistics(wire.ModelStatisticsRequest())).model_stats
    assert (stats.inference_count, stats.inference_stats.success.count, stats.inference_stats.fail.count) == (
        0,
        0,
        1,
    )


@pytest.mark.parametrize(
    "name",
    [
        *("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
        *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    ],
)
async def test_what_is_not_supported_says_so(name: str):
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(TritonStub(rig.channel), name)(getattr(wire, f"{name}Request")())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert reason_of(caught.value) == "UNSUPPORTED"
    assert caught.value.details() != "Method not found!"


async def test_the_frontend_can_be_off_and_can_have_a_port_of_its_own():
    async with serving(triton=False) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TritonStub(rig.channel).ServerLive(wire.ServerLiveRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with (
        serving(triton_port=0) as rig,
        grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.triton_port}") as channel,
    ):
        assert rig.server.triton_port not in (None, rig.server.port)
        assert (await TritonStub(channel).ServerLive(wire.ServerLiveRequest())).live


async def test_a_dead_engine_is_alive_to_nobody_but_the_live_probe():
    async with serving() as rig:
        rig.engine.become(EngineStatus.RECOVERING)
        triton = TritonStub(rig.channel)
        assert (await triton.ServerLive(wire.ServerLiveRequest())).live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await triton.ModelInfer(query())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
