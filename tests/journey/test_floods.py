"""Ten times as many requests as a server can take: those that are let in are answered, and all others told so."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel

NUM_WAITING = 3
CAPACITY = 1 + NUM_WAITING
MAX_WAIT_S = 60


async def test_ten_times_the_capacity_is_refused_while_those_let_in_are_answered(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    has_begun, may_go_on, launch = threading.Event(), threading.Event(), StepRunner.launch

    def held(runner: StepRunner, *arguments: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(MAX_WAIT_S)
        return launch(runner, *arguments)

    monkeypatch.setattr(StepRunner, "launch", held)
    engine_config = EngineConfig("", max_batch_size=1, max_queued_requests=NUM_WAITING)
    engine = LocalEngine(loaded, engine_config)
    config = ServerConfig(port=0, engine=engine_config)
    async with Server(engine, config) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = VisionServiceStub(channel)
        request = wire.CompleteQueryRequest(question="hello", sampling={"max_tokens": 3})
        first = asyncio.ensure_future(code_of(stub.CompleteQuery(request)))
        assert await asyncio.to_thread(has_begun.wait, MAX_WAIT_S)
        others = [asyncio.ensure_future(code_of(stub.CompleteQuery(request))) for _ in range(10 * CAPACITY - 1)]
        for _, refused in zip(range(9 * CAPACITY), asyncio.as_completed(others), strict=False):
            assert await refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        let_in = [first, *(call for call in others if not call.done())]
        assert len(let_in) == CAPACITY
        may_go_on.set()
        assert await asyncio.gather(*let_in) == [grpc.StatusCode.OK] * CAPACITY
    engine.close()


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends."""
    return await call.code()
