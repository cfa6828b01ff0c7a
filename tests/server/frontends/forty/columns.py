"""What every frontend must be able to tell of a call, and the server that all of them ask."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from tests.fakes import FakeEngine
from tests.server.frontends.forty.cases import Ask
from tests.server.http_calls import HttpServing
from tests.server.serving import open_channel

REQUEST_ID = "one-of-forty"
_SCOPES = {
    "alice": 'scopes = ["infer"]',
    "operator": 'scopes = ["admin"]',
    "limited": 'scopes = ["infer"], rate = 0.001, burst = 1',
}


@dataclass(frozen=True)
class Rig:
    """A server with all its ports."""

    http: HttpServing
    channel: grpc.aio.Channel

    @property
    def engine(self) -> FakeEngine:
        return self.http.engine


@dataclass(frozen=True)
class Told:
    """What a caller was told. `status` is a gRPC code by its name, or a status of HTTP."""

    status: str | int
    reason: str
    answer: Any = None
    fields: tuple[str, ...] = ()
    request_id: str | None = None
    retry_after_s: float | None = None


class Column(Protocol):
    """One frontend, as one of its clients sees it."""

    name: str
    has_http_statuses: bool

    def expresses(self, ask: Ask) -> bool:
        """Whether the API has such a request."""
        ...

    def method(self, ask: Ask) -> str:
        """The name of the call in metrics."""
        ...

    def field_name(self, ask: Ask, name: str) -> str | None:
        """The name of a field of the engine's requests; None where the API names none."""
        ...

    async def call(self, rig: Rig, ask: Ask) -> Told:
        """Make the call."""
        ...

    async def leave(self, rig: Rig, ask: Ask) -> None:
        """Begin the call and break it off once the engine has its request."""
        ...


@asynccontextmanager
async def serving_all(engine: FakeEngine, folder: Path) -> AsyncIterator[Rig]:
    """A server that asks for tokens, on all ports."""
    tokens = folder / "tokens.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in _SCOPES}
    tokens.write_text("".join(f'{name} = {{ sha256 = "{digests[name]}", {_SCOPES[name]} }}\n' for name in _SCOPES))
    config = ServerConfig(port=0, http_port=0, tokens=str(tokens))
    async with Server(engine, config) as server, open_channel(server) as channel:
        yield Rig(HttpServing(server, engine), channel)
