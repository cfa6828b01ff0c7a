"""Ten times as many requests as a server can take: those that are let in go on, and all others are told so."""

import asyncio
from typing import Any

import grpc

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel

NUM_RUNNING, NUM_WAITING = 2, 2
CAPACITY = NUM_RUNNING + NUM_WAITING


def endless(seed: int) -> wire.QueryRequest:
    """A question whose answer has 3,000 tokens: the token that would end it is never drawn."""
    sampling = {"temperature": 5.0, "top_p": 1.0, "max_tokens": 3000, "seed": seed}
    return wire.QueryRequest(
        question="hello", sampling={**sampling, "logit_bias": [{"token_id": 0, "bias": -100.0}]}
    )


async def test_ten_times_the_capacity_is_refused_while_those_let_in_go_on(loaded: LoadedModel) -> None:
    engine_config = EngineConfig("", max_batch_size=NUM_RUNNING, max_queued_requests=NUM_WAITING)
    config = ServerConfig(port=0, engine=engine_config)
    engine = LocalEngine(loaded, engine_config)
    async with Server(engine, config) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = VisionServiceStub(channel)
        calls: list[Any] = [stub.Query(endless(seed)) for seed in range(10 * CAPACITY)]
        first_pieces = [asyncio.ensure_future(call.read()) for call in calls]
        num_refused = 0
        for arrival in asyncio.as_completed([code_if_refused(first) for first in first_pieces]):
            if code := await arrival:
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                num_refused += 1
            if num_refused == 9 * CAPACITY:
                break
        let_in = [(call, first) for call, first in zip(calls, first_pieces, strict=True) if not call.done()]
        assert len(let_in) == CAPACITY
        # As those that run are cancelled, those that wait get their turn.
        for first in asyncio.as_completed([read_on(call, first) for call, first in let_in]):
            (await first).cancel()
    engine.close()


async def code_if_refused(first: asyncio.Future[Any]) -> grpc.StatusCode | None:
    """None once the first piece of an answer has come."""
    try:
        await first
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def read_on(call: Any, first: asyncio.Future[Any]) -> Any:
    """The call, once two pieces of its answer have come."""
    await first
    assert await call.read()
    return call
