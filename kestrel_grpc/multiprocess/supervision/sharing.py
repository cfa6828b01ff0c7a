"""Shares state between the front ends of a host: the supervisor owns it, and each front end asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kestrel_grpc.access.limits import TokenLimits
from kestrel_grpc.calls.usage import USAGE_TOPIC, joined
from kestrel_grpc.images.image_index import StoreLimits
from kestrel_grpc.multiprocess.protocol.link import Link
from kestrel_grpc.multiprocess.protocol.messages import ImageExpired
from kestrel_grpc.multiprocess.supervision.frontend_questions import LinkedPeers, Switchboard
from kestrel_grpc.multiprocess.supervision.stored_images import ImageOwner, SharedImages
from kestrel_grpc.multiprocess.supervision.token_limits import LimitOwner, SharedLimits


class Shared:
    """The access of a front end to the shared state. `folder` is the supervisor's private folder."""

    def __init__(self, link: Link, folder: Path, identity: str, *, name: str, num_frontends: int) -> None:
        self.limits = SharedLimits(link)
        self.images = SharedImages(link, folder, identity)
        self.peers = LinkedPeers(link, name, num_frontends)


class Owner:
    """The owner, in the supervisor, of token limits, stored images and questions between front ends.

    Belongs to one event loop. `folder` exists and only this user can read it; `cores` returns the links to the
    engine cores that run now.
    """

    def __init__(self, folder: Path, images: StoreLimits, cores: Callable[[], Iterable[Link]]) -> None:
        self._cores = cores
        self._limits = LimitOwner(TokenLimits())
        self.front_ends = Switchboard({USAGE_TOPIC: joined})
        self.images = ImageOwner(folder, images, self._forget)

    def join(self, identity: str, link: Link) -> None:
        """Serve a front end. Call this before its link is started."""
        self._limits.join(identity, link)
        self.images.join(identity, link)
        self.front_ends.join(identity, link)

    def drop(self, identity: str) -> None:
        """Release the resources of a front end whose process has ended."""
        self._limits.drop(identity)
        self.images.drop(identity)
        self.front_ends.drop(identity)

    def _forget(self, namespace: str, sha256: str) -> None:
        for link in self._cores():
            link.notify(ImageExpired(namespace, sha256))
