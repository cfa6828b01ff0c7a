"""The modules that one Query with an image enters are those of the list in docs/architecture.md."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.engine.engine import LocalEngine
from tests.reference_fixtures import CHECKOUT

DOCUMENT = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOTS = {
    "kestrel_grpc": CHECKOUT / "kestrel_grpc",
    "kestrel_runtime": CHECKOUT / "runtime" / "kestrel_runtime",
    "kestrel_ops": CHECKOUT / "kernels" / "kestrel_ops",
}
# Modules that a timer or a thread of their own enters, whether or not a call is being served.
BACKGROUND = {
    "kestrel_grpc/images/image_store.py",  # a timer looks for images whose time is over
    "kestrel_grpc/frontends/grpc/connections/idle_connections.py",  # a timer looks for idle connections
    "kestrel_runtime/engine/watchdog.py",  # a thread of its own looks at the engine thread
}
QUERY = wire.QueryRequest(
    question="What is in this image?",
    image={"data": (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()},
    sampling={"max_tokens": 8},
)


class Tracer:
    """Collects the modules whose functions are entered while `recording`, in the order of first entry.

    Installed as the profile function of this thread and of all that start later. Code that `dataclass` generates
    belongs to no file and is not collected.
    """

    def __init__(self) -> None:
        self.recording = False
        self.entered: dict[str, None] = {}
        self._names: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.recording and event == "call":
            file = frame.f_code.co_filename
            if file not in self._names:
                self._names[file] = module_of(file)
            name = self._names[file]
            if name is not None:
                self.entered.setdefault(name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before, before_in_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)  # pyright: ignore[reportArgumentType]


def module_of(file: str) -> str | None:
    """`package/folder/module.py` of a file of one of the three packages."""
    for package, root in ROOTS.items():
        if Path(file).is_relative_to(root):
            return f"{package}/{Path(file).relative_to(root).as_posix()}"
    return None


async def ask(stub: Any) -> None:
    async for _ in stub.Query(QUERY):
        pass


async def record(tracer: Tracer) -> None:
    config = ServerConfig(port=0, device="cpu", dtype="float32")
    engine = LocalEngine.start(config.engine_config())
    async with (
        Server(engine, config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub: Any = VisionServiceStub(channel)
        await ask(stub)
        await engine.clear_cache()  # so that the next call encodes its image again
        tracer.recording = True
        await ask(stub)
        # What the server does after the last message of a call is done once it has served another.
        await ask(stub)
        tracer.recording = False


@pytest.fixture
async def entered() -> list[str]:
    tracer = Tracer()
    with tracer.installed():
        await record(tracer)
    return [name for name in tracer.entered if name not in BACKGROUND]


async def test_modules_that_a_query_enters_are_those_of_the_document(entered: list[str]) -> None:
    section = DOCUMENT.partition("\n## The path of a Query\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^ *\d+\. `(kestrel_\w+/[\w/]+\.py)`", section, re.MULTILINE)
    assert [name for name in entered if name not in documented] == [], "entered, but not documented"
    assert [name for name in documented if name not in entered] == [], "documented, but not entered"
    assert len(documented) == len(set(documented))
    assert f"**{len(documented)} modules**" in section
