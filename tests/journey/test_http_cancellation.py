"""Clients over HTTP that disconnect from the true engine in the middle of an answer."""

import asyncio
import json
from typing import Any

import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.journey.conftest import LiveServer
from tests.reference_fixtures import MD3_SMALL

# With this seed the answer has more than a thousand tokens; with others it may end after a few.
SETTINGS: dict[str, Any] = {"temperature": 50.0, "top_p": 1.0, "max_tokens": 3000, "seed": 14}
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/query": {"question": "hello", "settings": SETTINGS},
    "/v1/chat/completions": {"model": str(MD3_SMALL), "messages": MESSAGES, **SETTINGS},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_disconnects_leaves_no_page_behind(loaded: LoadedModel, path: str, is_streamed: bool):
    config = ServerConfig(port=0, http_port=0, engine=EngineConfig(str(MD3_SMALL), max_batch_size=32))
    engine = LocalEngine(loaded, config.engine_config())
    async with Server(engine, config) as server:
        live = LiveServer(server, engine, new_channel(server))
        body = json.dumps({**REQUESTS[path], "model": engine.info.model, "stream": is_streamed}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if is_streamed:
                await reader.readuntil(b"data: ")  # it is in the middle of its answer
            else:
                while not engine.load().num_used_pages:
                    await live.stub.CompleteQuery(
                        wire.CompleteQueryRequest(question="hi", sampling={"max_tokens": 1})
                    )
            assert engine.load().num_used_pages > 0
            writer.transport.abort()
        await live.assert_empty()
        await live.channel.close()


def new_channel(server: Server) -> Any:
    return LiveServer(server, None, None).new_channel()  # pyrefly: ignore[bad-argument-type]
