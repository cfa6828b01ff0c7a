"""The command that containers probe a server with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kestrel_grpc.__main__ import main
from kestrel_grpc.config import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.engine import EngineStatus
from tests.fakes import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def address(engine) -> AsyncIterator[str]:
    async with Server(engine, ServerConfig(port=0)) as server:
        yield f"127.0.0.1:{server.port}"


async def health(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["health", *arguments])


async def test_a_server_that_serves_is_healthy(address, capsys):
    assert await health("--address", address) == 0
    assert capsys.readouterr().out.endswith("SERVING\n")


async def test_a_server_that_drains_is_not(address, engine, capsys):
    engine.become(EngineStatus.DRAINING)
    assert await health("--address", address, "--service", "kestrel.v1.VisionService") == 1
    assert capsys.readouterr().out.endswith("NOT_SERVING\n")


async def test_nobody_there_is_told_in_one_line(capsys):
    assert await health("--address", "127.0.0.1:9", "--timeout", "5") == 1
    assert capsys.readouterr().err == "kestrel-grpc: 127.0.0.1:9 answers UNAVAILABLE\n"


async def test_an_unknown_service_is_told_in_one_line(address, capsys):
    assert await health("--address", address, "--service", "nothing") == 1
    assert capsys.readouterr().err == f"kestrel-grpc: {address} answers NOT_FOUND\n"
