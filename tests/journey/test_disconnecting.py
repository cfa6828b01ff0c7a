"""A client that disconnects midway frees its pages within a step, over every API. The test runs the steps."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD3_SMALL
from tests.server.triton_calls import TritonStub, infer

MODEL = MD3_SMALL
SAMPLING: dict[str, Any] = {"temperature": 50.0, "top_p": 1.0, "max_tokens": 3000}


class Steps:
    """Holds the engine's thread before each of its turns, until the test runs one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cancelled = asyncio.Event()
        """Set when the engine has been told that a request is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._allowed = threading.Semaphore(0)
        self._ended = asyncio.Event()
        self._is_free = False
        step, cancel = EngineLoop.run_turn, EngineLoop.cancel

        def held_step(engine_loop: EngineLoop) -> None:
            if not self._is_free:
                self._allowed.acquire()
            step(engine_loop)
            self._loop.call_soon_threadsafe(self._ended.set)

        def noted_cancel(engine_loop: EngineLoop, stream: Stream) -> None:
            cancel(engine_loop, stream)
            self._loop.call_soon_threadsafe(self.cancelled.set)

        monkeypatch.setattr(EngineLoop, "run_turn", held_step)
        monkeypatch.setattr(EngineLoop, "cancel", noted_cancel)

    async def run_one(self) -> None:
        """Run one turn, as soon as the engine has something to do."""
        self._ended.clear()
        self._allowed.release()
        await self._ended.wait()

    def free(self) -> None:
        """Let the engine run by itself."""
        self._is_free = True
        self._allowed.release()


@dataclass(frozen=True)
class Begun:
    """A request on its way. `first_piece` waits for the first part of the answer, or for the whole of it."""

    first_piece: Awaitable[Any]
    disconnect: Callable[[], Awaitable[None]]


async def over_http(server: Server, path: str, body: dict[str, Any]) -> Begun:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def disconnect() -> None:
        writer.transport.abort()

    return Begun(reader.readuntil(b"data: "), disconnect)


async def rest(server: Server, is_streamed: bool) -> Begun:
    body = {"question": "hello", "settings": SAMPLING, "stream": is_streamed}
    return await over_http(server, "/v1/query", body)


async def openai(server: Server, is_streamed: bool) -> Begun:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": MODEL.name, "messages": messages, "stream": is_streamed, **SAMPLING}
    return await over_http(server, "/v1/chat/completions", body)


async def vision_service(server: Server, is_streamed: bool) -> Begun:
    channel = own_channel(server)
    stub: Any = VisionServiceStub(channel)
    if is_streamed:
        call = stub.Query(wire.QueryRequest(question="hello", sampling=SAMPLING))
        return Begun(read(call, 2), channel.close)  # the first message tells that the request has started
    return Begun(stub.CompleteQuery(wire.CompleteQueryRequest(question="hello", sampling=SAMPLING)), channel.close)


async def triton(server: Server, is_streamed: bool) -> Begun:
    channel = own_channel(server)
    stub = TritonStub(channel)
    sampling = {name.upper(): value for name, value in SAMPLING.items()}
    message = infer(SKILL="query", QUESTION="hello", STREAM=is_streamed, **sampling)
    if is_streamed:
        call = stub.ModelStreamInfer()
        await call.write(message)
        return Begun(read(call, 1), channel.close)
    return Begun(stub.ModelInfer(message), channel.close)


async def read(call: Any, num_messages: int) -> None:
    for _ in range(num_messages):
        await call.read()


def own_channel(server: Server) -> grpc.aio.Channel:
    """A connection that no other call shares."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=(("grpc.use_local_subchannel_pool", 1),))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("begin", [vision_service, rest, openai, triton])
async def test_a_client_that_disconnects_midway_frees_its_pages_within_a_step(
    begin: Callable[[Server, bool], Awaitable[Begun]],
    is_streamed: bool,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
):
    config = ServerConfig(port=0, http_port=0, engine=EngineConfig(str(MODEL)))
    steps = Steps(monkeypatch)
    # Requests without a seed get the same one each time, so that none ends by chance within a few steps.
    monkeypatch.setattr("kestrel_runtime.engine.preprocessing.secrets.randbits", lambda _: 14)
    engine = LocalEngine(loaded, config.engine_config())
    async with Server(engine, config) as server, asyncio.timeout(60):
        begun = await begin(server, is_streamed)
        piece = asyncio.ensure_future(begun.first_piece)
        while not (piece.done() if is_streamed else engine.load().num_used_pages):
            await steps.run_one()
        await steps.run_one()
        assert engine.load().num_used_pages > 0
        await begun.disconnect()
        await steps.cancelled.wait()
        assert engine.load().num_used_pages > 0, "nothing has freed them yet"
        await steps.run_one()
        assert (engine.load().num_used_pages, engine.load().num_running) == (0, 0)
        steps.free()
        await asyncio.gather(piece, return_exceptions=True)
