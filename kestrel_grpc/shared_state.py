"""Defines the state that all processes of a server share, and keeps it in a server of one process.

The state has one owner. A server of one process owns it itself (`OwnState`). In a server of several processes the
supervisor owns it, and each front end asks the supervisor (`multiprocess/supervision/sharing.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from kestrel_grpc.access.limits import Limits, TokenLimits
from kestrel_grpc.calls.peers import NoPeers, Peers
from kestrel_grpc.images.image_index import Forget, StoreLimits
from kestrel_grpc.images.image_store import ImageStore, MemoryImages
from kestrel_runtime.api.engine import CacheLoad


class SharedState(Protocol):
    """The state that all processes of a server share, as one of them uses it. Belongs to one event loop."""

    @property
    def is_whole_server(self) -> bool:
        """True if there is no other process. Otherwise the supervisor reserves the ports, announces the server, and
        answers on the metrics port."""
        ...

    @property
    def instance_id(self) -> str:
        """The id of this start of the whole server."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of tokens, for which the calls of all processes count."""
        ...

    @property
    def images(self) -> ImageStore:
        """The store of images that all processes share."""
        ...

    @property
    def peers(self) -> Peers:
        """The other processes."""
        ...

    def image_load(self) -> CacheLoad:
        """Returns the stored images that this process owns, in any thread."""
        ...

    async def metrics(self, own: Callable[[], bytes]) -> bytes:
        """Returns the metrics of all processes as Prometheus text; `own` returns those of this one, in any thread.

        Raises `EngineUnavailable`.
        """
        ...

    async def watch(self) -> None:
        """Drops images that expire, as far as this process owns them, until cancelled."""
        ...


class OwnState:
    """The state of a server of one process."""

    is_whole_server = True

    def __init__(self, limits: StoreLimits, forget: Forget) -> None:
        """`forget` removes from the engine's caches the results that were computed from an expired image."""
        self.instance_id = secrets.token_hex(8)
        self.limits = TokenLimits()
        self.images = MemoryImages(limits, forget)
        self.peers = NoPeers()

    def image_load(self) -> CacheLoad:
        """Returns the stored images, in any thread."""
        return self.images.load()

    async def metrics(self, own: Callable[[], bytes]) -> bytes:
        """Returns the metrics of this process."""
        return await asyncio.to_thread(own)

    async def watch(self) -> None:
        """Drops images that expire, until cancelled."""
        await self.images.watch()
