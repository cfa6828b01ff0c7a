"""Several servers in this process that share one owner, over real links."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.multiprocess.protocol.link import Link
from kestrel_grpc.multiprocess.supervision.sharing import LinkedState, Owner
from kestrel_grpc.multiprocess.supervision.stored_images import forget_expired_images
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import ClearedCache
from tests.fakes import FakeEngine
from tests.server.serving import Serving, open_channel


class Core(FakeEngine):
    """Says when something was removed from its caches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_cleared = asyncio.Event()

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        cleared = await super().forget_image(digest, namespace)
        self.has_cleared.set()
        return cleared


class FrontEnd(LinkedState):
    """The shared state of a server in this process. `link` is its end of the link, `owners_link` the other."""

    def __init__(self, link: Link, owners_link: Link, folder: Path, identity: str, num: int) -> None:
        super().__init__(link, folder, identity, num_frontends=num, instance_id="one")
        self.identity = identity
        self.link = link
        self.owners_link = owners_link


async def no_metrics() -> bytes:
    """No test of these reads metrics."""
    return b""


@dataclass(frozen=True)
class Rig:
    owner: Owner
    core: Core
    """The engine of all servers."""
    hosts: list[FrontEnd]
    servers: list[Serving]

    def end(self, index: int) -> None:
        """The process of a front end has died."""
        self.hosts[index].link.close()
        self.owner.drop(self.hosts[index].identity)


@asynccontextmanager
async def linked(name: str, other: str) -> AsyncIterator[tuple[Link, Link, Any]]:
    """Two ends of a link, and what starts them once they have their handlers."""
    one, two = Link(name), Link(other)
    sockets = socket.socketpair()

    async def start() -> None:
        await one.start(sockets[0])
        await two.start(sockets[1])

    try:
        yield one, two, start
    finally:
        one.close()
        two.close()
        await asyncio.gather(one.closed, two.closed)


@asynccontextmanager
async def sharing(folder: Path, engine: Core | None = None, *, num: int = 2, **options: Any) -> AsyncIterator[Rig]:
    """`num` servers of the same engine."""
    engine = engine or Core()
    config = ServerConfig(port=0, **options)
    async with AsyncExitStack() as stack:
        to_core, at_core, start = await stack.enter_async_context(linked("core-0", "the supervisor"))
        forget_expired_images(at_core, engine)
        await start()
        owner = Owner(folder, config.store_limits(), lambda: (to_core,), no_metrics)
        hosts: list[FrontEnd] = []
        servers: list[Serving] = []
        for index in range(num):
            identity = f"frontend-{index}.1"
            ours, theirs, start = await stack.enter_async_context(linked(identity, "the supervisor"))
            owner.join(identity, ours)
            host = FrontEnd(theirs, ours, folder, identity, num)
            await start()
            hosts.append(host)
            server = await stack.enter_async_context(Server(engine, config, shared=host))
            channel = await stack.enter_async_context(open_channel(server))
            servers.append(Serving(server, engine, channel))
        yield Rig(owner, engine, hosts, servers)
