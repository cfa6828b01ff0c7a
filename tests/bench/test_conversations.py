"""The bench of conversations: its arithmetic, and a few conversations with the built-in model."""

import asyncio

import pytest

from bench.conversations import FirstTokens, Plan, Speaker
from kestrel_client import AsyncClient
from kestrel_grpc.cli.bench.workload import chart
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine


def test_first_tokens_are_compared_by_their_medians():
    # One that took long for another reason changes nothing.
    assert FirstTokens((10.0, 20.0, 900.0), (25.0, 24.0, 2.0)).ratio == pytest.approx(1.2)


async def test_a_conversation_finds_its_earlier_turns_and_none_of_others():
    picture = chart(0)
    engine = await asyncio.to_thread(LocalEngine.start, EngineConfig(device="cpu"))
    async with (
        Server(engine, ServerConfig(port=0)) as server,
        AsyncClient(f"127.0.0.1:{server.port}", store_from_bytes=None) as client,
    ):
        plan = Plan(num_turns=3, num_pictures=1, num_at_once=2, num_conversations=2)
        talk = await Speaker(client, plan, "a", [picture]).round()
        first = await Speaker(client, plan, "b", [picture]).first_tokens(1)
    assert talk.num_requests == 6
    assert [len(times) for times in talk.first_token_ms] == [2, 2, 2]
    opening, second, third = talk.cached_share
    assert max(opening) == 0
    assert min(*second, *third) > 0.8
    assert len(first.known_ms) == len(first.second_turn_ms) == 1
