"""The true server over the true engine on a small reference model, and a stub to ask it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.over_sockets import behind_sockets
from tests.reference_fixtures import MD3_SMALL


@dataclass(frozen=True)
class LiveServer:
    """A running server, with a look at the engine behind it."""

    server: Server
    engine: LocalEngine
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def stub(self) -> VisionServiceStub:
        return VisionServiceStub(self.channel)

    def new_channel(self) -> grpc.aio.Channel:
        """Another connection, apart from the shared one."""
        return _channel(self.server)

    async def assert_empty(self) -> None:
        """The engine must free all resources by itself, while it serves other requests."""
        load = self.engine.load()
        for _ in range(500):  # each turn takes a request, in whole steps of the engine
            await self.stub.CompleteQuery(wire.CompleteQueryRequest(question="hi", sampling={"max_tokens": 1}))
            load = self.engine.load()
            if not (load.num_used_pages or load.num_running or load.num_waiting or load.num_preprocessing):
                return
        raise AssertionError(f"resources are still in use: {load}")


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return LoadedModel.load(EngineConfig(model=str(MD3_SMALL), dtype="float32", device="cpu"))


@pytest.fixture(params=["one process", "over sockets"])
async def live_server(
    request: pytest.FixtureRequest, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LiveServer]:
    """The engine in the process of the server, or behind the sockets that front ends and engine cores use."""
    config = ServerConfig(port=0, engine=EngineConfig(str(MD3_SMALL), max_batch_size=32))
    engine = LocalEngine(loaded, config.engine_config())
    async with AsyncExitStack() as stack:
        asked: Engine = engine
        if request.param == "over sockets":
            stack.push_async_callback(asyncio.to_thread, engine.close)
            asked = await stack.enter_async_context(behind_sockets(engine, tmp_path_factory.mktemp("sockets")))
        server = await stack.enter_async_context(Server(asked, config))
        yield LiveServer(server, engine, await stack.enter_async_context(_channel(server)))


def _channel(server: Server) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=(("grpc.use_local_subchannel_pool", 1),))
