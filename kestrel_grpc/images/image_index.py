"""Decides which images are stored, within bounds of bytes and time and with a quota for each namespace.

The bytes of the images are kept elsewhere.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from kestrel_grpc.images.stored_images import (
    ImageHandle,
    ImageNotFound,
    ImageQuotaExceeded,
    ImageStoreFull,
    Retention,
    StoredImage,
)
from kestrel_runtime.api.engine import CacheLoad, ImageInfo

_EXPIRY_INTERVAL_S = 1.0
BOOKKEEPING_BYTES = 1024
"""The size that is added to that of each file, so that the bounds also hold for many small files."""

Forget = Callable[[str, str], object]
"""Drops the results that were computed from an image, by its namespace and the digest of its file in
hexadecimal."""
Discard = Callable[[str, ImageHandle], object]
"""Frees the bytes of an image of a namespace."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Holds bounds in bytes, which count each file and `BOOKKEEPING_BYTES`, and times to live in seconds."""

    max_bytes: int
    quota_bytes: int
    """The bound for each namespace."""
    default_ttl_s: float
    max_ttl_s: float
    """The longest time to live; longer ones are cut to it."""


@dataclass(slots=True)
class StoreUsage:
    """Holds a reading of the store: its content now, and counts since the start."""

    num_images: int = 0
    num_bytes: int = 0
    num_lookups: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    """The number of images that were dropped before their time, because their memory was needed."""
    oldest_stored_at: float | None = None
    """The time on the store's clock; None if the store is empty."""


class ImageIndex:
    """Lists the stored images by namespace and digest. Belongs to one event loop.

    If an image does not fit, the least recently used unpinned images are evicted: first those of its own namespace,
    until its quota holds; then those of the namespace that holds most, until the bound of the store holds. So a
    namespace that stores much evicts its own images before those of others.

    `discard` is called for every image that leaves, and `forget` for every image that expires. `forget` is not
    called for an evicted image, which may soon be stored again, nor for a deleted one, whose caller waits for the
    removal.
    """

    def __init__(
        self,
        limits: StoreLimits,
        forget: Forget,
        discard: Discard,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.usage = StoreUsage()
        self.clock = clock
        self._forget = forget
        self._discard = discard
        self._spaces: dict[str, _Namespace] = {}
        # In the order in which they were stored.
        self._by_age: dict[tuple[str, str], StoredImage] = {}
        # One entry for each image, and some entries of dropped images.
        self._expiries: list[tuple[float, str, str]] = []

    def load(self) -> CacheLoad:
        """Returns a reading. May be called from any thread."""
        usage, oldest = self.usage, self.usage.oldest_stored_at
        return CacheLoad(
            num_lookups=usage.num_lookups,
            num_hits=usage.num_hits,
            num_evictions=usage.num_evictions,
            used_bytes=usage.num_bytes,
            total_bytes=self.limits.max_bytes,
            oldest_age_s=0.0 if oldest is None else self.clock() - oldest,
        )

    def require_room(self, namespace: str, num_bytes: int) -> None:
        """Raises `ImageQuotaExceeded` or `ImageStoreFull` if a file of this size would not be stored."""
        needed = num_bytes + BOOKKEEPING_BYTES
        space = self._spaces.get(namespace)
        if needed + (0 if space is None else space.pinned_bytes) > self.limits.quota_bytes:
            raise ImageQuotaExceeded(self.limits.quota_bytes)
        if needed + sum(space.pinned_bytes for space in self._spaces.values()) > self.limits.max_bytes:
            raise ImageStoreFull(self.limits.max_bytes)

    def renew(self, namespace: str, handle: ImageHandle, retention: Retention) -> StoredImage | None:
        """Keeps an image that is stored already for longer. Returns None if it is not stored.

        Its expiry moves if it becomes later, and a pinned image stays pinned. Raises `ImageQuotaExceeded` or
        `ImageStoreFull` if it must be pinned and does not fit next to other pinned images.
        """
        self.expire()
        image = self._find(namespace, handle)
        if image is None:
            return None
        space = self._spaces[namespace]
        if retention.is_pinned and not image.is_pinned:
            self.require_room(namespace, image.size_bytes)
            space.pin(image)
        image.expires_at = max(image.expires_at, self._expiry(retention))
        space.touch(image)
        return image

    def add(
        self, namespace: str, handle: ImageHandle, size_bytes: int, info: ImageInfo, retention: Retention
    ) -> StoredImage:
        """Lists an image that `renew` has not found. Raises as `require_room` does."""
        self.require_room(namespace, size_bytes)
        space = self._spaces.setdefault(namespace, _Namespace())
        needed = size_bytes + BOOKKEEPING_BYTES
        while space.num_bytes + needed > self.limits.quota_bytes:
            self._evict(namespace)
        while self.usage.num_bytes + needed > self.limits.max_bytes:
            self._evict(max(self._spaces, key=lambda name: self._spaces[name].unpinned_bytes))
        image = StoredImage(handle, size_bytes, info, self.clock(), self._expiry(retention), retention.is_pinned)
        self._spaces.setdefault(namespace, space).add(image)
        self._by_age[namespace, handle.sha256] = image
        heapq.heappush(self._expiries, (image.expires_at, namespace, handle.sha256))
        self._count(image, 1)
        return image

    def get(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """Returns the image and counts it as used now. Raises `ImageNotFound`."""
        self.usage.num_lookups += 1
        image = self._find(namespace, handle)
        if image is None:
            raise ImageNotFound(handle)
        self.usage.num_hits += 1
        self._spaces[namespace].touch(image)
        return image

    def holds(self, namespace: str, handle: ImageHandle) -> bool:
        """Returns True if the image is stored. Does not count as a use of it."""
        return self._find(namespace, handle) is not None

    def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Drops an image. Raises `ImageNotFound`. Does not call `forget`."""
        image = self._find(namespace, handle)
        if image is None:
            raise ImageNotFound(handle)
        self._drop(namespace, image)

    def drop_namespace(self, namespace: str) -> None:
        """Drops all images of a namespace whose callers are gone. Does not call `forget`."""
        space = self._spaces.get(namespace)
        for image in () if space is None else space.images():
            self._drop(namespace, image)

    def evict(self) -> bool:
        """Drops the unpinned image that is next to be evicted. Returns False if there is none."""
        name = max(self._spaces, key=lambda name: self._spaces[name].unpinned_bytes, default=None)
        if name is None or not self._spaces[name].unpinned_bytes:
            return False
        self._evict(name)
        return True

    def expire(self) -> None:
        """Drops the images that have expired."""
        now = self.clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, namespace, sha256 = heapq.heappop(self._expiries)
            image = self._by_age.get((namespace, sha256))
            if image is None:
                continue
            if image.expires_at > now:  # it was renewed, or stored anew
                heapq.heappush(self._expiries, (image.expires_at, namespace, sha256))
            else:
                self._leave(namespace, image)

    async def watch(self) -> None:
        """Drops images when they expire, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self.expire()

    def _find(self, namespace: str, handle: ImageHandle) -> StoredImage | None:
        image = self._by_age.get((namespace, handle.sha256))
        if image is not None and image.expires_at <= self.clock():
            self._leave(namespace, image)
            return None
        return image

    def _leave(self, namespace: str, image: StoredImage) -> None:
        """Drops an image that has expired, and the results that were computed from it."""
        self._drop(namespace, image)
        self._forget(namespace, image.handle.sha256)

    def _expiry(self, retention: Retention) -> float:
        wanted_s = self.limits.default_ttl_s if retention.ttl_s is None else retention.ttl_s
        return self.clock() + min(wanted_s, self.limits.max_ttl_s)

    def _evict(self, namespace: str) -> None:
        self._drop(namespace, self._spaces[namespace].least_recently_used())
        self.usage.num_evictions += 1

    def _drop(self, namespace: str, image: StoredImage) -> None:
        space = self._spaces[namespace]
        space.remove(image)
        if not space.num_bytes:
            del self._spaces[namespace]
        del self._by_age[namespace, image.handle.sha256]
        self._count(image, -1)
        self._discard(namespace, image.handle)
        if len(self._expiries) > 2 * len(self._by_age) + 64:
            self._expiries = [(image.expires_at, *key) for key, image in self._by_age.items()]
            heapq.heapify(self._expiries)

    def _count(self, image: StoredImage, sign: int) -> None:
        self.usage.num_images += sign
        self.usage.num_bytes += sign * _cost(image)
        oldest = next(iter(self._by_age.values()), None)
        self.usage.oldest_stored_at = None if oldest is None else oldest.stored_at


class _Namespace:
    """Holds the images of one namespace, pinned and unpinned ones each in the order of their last use."""

    __slots__ = ("_pinned", "_unpinned", "pinned_bytes", "unpinned_bytes")

    def __init__(self) -> None:
        self._pinned: dict[str, StoredImage] = {}
        self._unpinned: dict[str, StoredImage] = {}
        self.pinned_bytes = 0
        self.unpinned_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self.pinned_bytes + self.unpinned_bytes

    def images(self) -> list[StoredImage]:
        return [*self._pinned.values(), *self._unpinned.values()]

    def least_recently_used(self) -> StoredImage:
        """Returns the unpinned image to evict next."""
        return next(iter(self._unpinned.values()))

    def add(self, image: StoredImage) -> None:
        if image.is_pinned:
            self._pinned[image.handle.sha256] = image
            self.pinned_bytes += _cost(image)
        else:
            self._unpinned[image.handle.sha256] = image
            self.unpinned_bytes += _cost(image)

    def remove(self, image: StoredImage) -> None:
        if image.is_pinned:
            del self._pinned[image.handle.sha256]
            self.pinned_bytes -= _cost(image)
        else:
            del self._unpinned[image.handle.sha256]
            self.unpinned_bytes -= _cost(image)

    def pin(self, image: StoredImage) -> None:
        self.remove(image)
        image.is_pinned = True
        self.add(image)

    def touch(self, image: StoredImage) -> None:
        """Makes the image the most recently used one."""
        images = self._pinned if image.is_pinned else self._unpinned
        images[image.handle.sha256] = images.pop(image.handle.sha256)


def _cost(image: StoredImage) -> int:
    return image.size_bytes + BOOKKEEPING_BYTES
