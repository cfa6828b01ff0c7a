"""An engine of this process, asked over the sockets that front ends and engine cores use.

The tests of the server ask a fake engine. With the variable `ENGINE_CHANNEL=sockets` they ask it over sockets:

    ENGINE_CHANNEL=sockets python -m pytest tests/server

Modules with `pytestmark = BOTH_CHANNELS` ask over both in every run.
"""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.multiprocess.engine_channel.core_server import CoreServer
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_runtime.api.engine import Engine, ImageInfo
from kestrel_runtime.api.images import Image, image_digest
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.imaging.header import ImageHeader
from tests.fakes import FakeEngine

VARIABLE, SOCKETS = "ENGINE_CHANNEL", "sockets"
BOTH_CHANNELS = pytest.mark.parametrize(
    "engine_channel", ["", SOCKETS], ids=["one process", SOCKETS], indirect=True, scope="module"
)


@asynccontextmanager
async def behind_sockets(
    engine: LocalEngine, folder: Path, client_type: type[EngineClient] = EngineClient
) -> AsyncIterator[EngineClient]:
    """The same engine, asked as front ends in other processes ask it."""
    endpoint = CoreEndpoint(folder, 0)
    core = CoreServer(engine, endpoint)
    await core.start()
    client = await client_type.connect([endpoint], "frontend-0.1")
    try:
        yield client
    finally:
        client.close()
        await core.close()


@asynccontextmanager
async def as_chosen(engine: FakeEngine) -> AsyncIterator[Engine]:
    """The engine itself, or a client of it where the variable says so.

    Of an image the fake knows the bytes alone, which are no picture; so neither end looks into it.
    """
    if os.environ.get(VARIABLE) != SOCKETS:
        yield engine
        return

    class Client(EngineClient):
        def inspect_image(self, data: bytes) -> ImageInfo:
            return engine.inspect_image(data)

        def _inspect(self, image: Image) -> ImageHeader:
            engine.images[image_digest(image)] = image
            return ImageHeader("PNG", 4, 3, decoding_bytes=96)

    served: Any = engine
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with behind_sockets(served, Path(folder), Client) as client:
                yield client
    finally:
        engine.close()
