"""Shares state between the front ends of a host: the supervisor owns it, and each front end asks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from kestrel_grpc.access.limits import TokenLimits
from kestrel_grpc.calls.usage import USAGE_TOPIC, joined
from kestrel_grpc.images.image_index import StoreLimits
from kestrel_grpc.multiprocess.protocol.link import Link
from kestrel_grpc.multiprocess.protocol.messages import ImageExpired, ReadMetrics
from kestrel_grpc.multiprocess.supervision.frontend_questions import LinkedPeers, Switchboard
from kestrel_grpc.multiprocess.supervision.stored_images import ImageOwner, SharedImages
from kestrel_grpc.multiprocess.supervision.token_limits import LimitOwner, SharedLimits
from kestrel_runtime.api.engine import CacheLoad

_METRICS_TIMEOUT_S = 10.0


class LinkedState:
    """The `SharedState` of a front end: it asks the supervisor. Belongs to the event loop of the link."""

    is_whole_server = False

    def __init__(self, link: Link, folder: Path, identity: str, *, num_frontends: int, instance_id: str) -> None:
        """`folder` is the supervisor's private folder, and `identity` that of the front end."""
        self._link = link
        self.instance_id = instance_id
        self.limits = SharedLimits(link)
        self.images = SharedImages(link, folder, identity)
        self.peers = LinkedPeers(link, identity.rpartition(".")[0], num_frontends)

    def image_load(self) -> CacheLoad:
        """Returns none: the supervisor owns the stored images."""
        return CacheLoad()

    async def metrics(self, own: Callable[[], bytes]) -> bytes:
        """Returns the metrics of all processes, which the supervisor reads. Raises `SupervisorUnavailable`."""
        return await self._link.ask(ReadMetrics(), timeout_s=_METRICS_TIMEOUT_S)

    async def watch(self) -> None:
        """Returns at once: the supervisor drops images that expire."""


class Owner:
    """The owner, in the supervisor, of the state that front ends share.

    Belongs to one event loop. `folder` exists and only this user can read it; `cores` returns the links to the
    engine cores that run now, and `metrics` the metrics of all processes.
    """

    def __init__(
        self,
        folder: Path,
        images: StoreLimits,
        cores: Callable[[], Iterable[Link]],
        metrics: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._cores = cores
        self._metrics = metrics
        self._limits = LimitOwner(TokenLimits())
        self.front_ends = Switchboard({USAGE_TOPIC: joined})
        self.images = ImageOwner(folder, images, self._forget)

    def join(self, identity: str, link: Link) -> None:
        """Serve a front end. Call this before its link is started."""
        self._limits.join(identity, link)
        self.images.join(identity, link)
        self.front_ends.join(identity, link)
        link.on(ReadMetrics, lambda _: self._metrics())

    def drop(self, identity: str) -> None:
        """Release the resources of a front end whose process has ended."""
        self._limits.drop(identity)
        self.images.drop(identity)
        self.front_ends.drop(identity)

    def _forget(self, namespace: str, sha256: str) -> None:
        for link in self._cores():
            link.notify(ImageExpired(namespace, sha256))
