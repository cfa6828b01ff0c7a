"""Stores images of callers, and finds them for requests.

`ImageStore` keeps images, in this process (`MemoryImages`) or with the supervisor for all front ends of a server.
`ImageIntake` stores and finds images for the frontends. `CachePurges` removes from the engine's caches the results
that were computed from dropped images.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from kestrel_grpc.images.image_index import Forget, ImageIndex, StoreLimits
from kestrel_grpc.images.stored_images import (
    Announcement,
    ImageDigestMismatch,
    ImageHandle,
    ImageNotFound,
    Retention,
    StoredImage,
    handle_of,
)
from kestrel_runtime.api.engine import CacheLoad, Engine, EngineStatus, ImageInfo
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.images import HashedImage

_log = logging.getLogger(__name__)


class ImageStore(Protocol):
    """Stores images by namespace and digest. Every method may raise `SupervisorUnavailable`."""

    async def require_room(self, namespace: str, num_bytes: int) -> None:
        """Raises `ImageQuotaExceeded` or `ImageStoreFull` if a file of this size would not be stored."""
        ...

    async def renew(self, namespace: str, handle: ImageHandle, retention: Retention) -> StoredImage | None:
        """Keeps an image that is stored already for longer. Returns None if it is not stored.

        Its expiry moves if it becomes later, and a pinned image stays pinned. Raises `ImageQuotaExceeded` or
        `ImageStoreFull` if it must be pinned and does not fit next to other pinned images.
        """
        ...

    async def put(
        self, namespace: str, handle: ImageHandle, data: bytes, info: ImageInfo, retention: Retention
    ) -> StoredImage:
        """Stores an image whose digest has been checked, or renews it. Raises as `require_room` does."""
        ...

    async def find(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """Returns an image and counts it as used now. Raises `ImageNotFound`."""
        ...

    async def read(self, namespace: str, image: StoredImage) -> HashedImage:
        """Returns the file of an image that has just been found. Raises `ImageNotFound` if it has been dropped
        meanwhile."""
        ...

    async def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Drops an image. Raises `ImageNotFound`. Leaves the results that were computed from it in the caches."""
        ...

    def drop_namespace(self, namespace: str) -> None:
        """Drops all images of a namespace whose callers are gone. Leaves the results that were computed from them
        in the caches."""
        ...


class MemoryImages:
    """Keeps images in the memory of this process. Belongs to one event loop; its methods never wait."""

    def __init__(self, limits: StoreLimits, forget: Forget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.index = ImageIndex(limits, forget, self._discard, clock=clock)
        self._files: dict[tuple[str, str], HashedImage] = {}

    async def require_room(self, namespace: str, num_bytes: int) -> None:
        """Raises `ImageQuotaExceeded` or `ImageStoreFull` if a file of this size would not be stored."""
        self.index.require_room(namespace, num_bytes)

    async def renew(self, namespace: str, handle: ImageHandle, retention: Retention) -> StoredImage | None:
        """Keeps an image that is stored already for longer."""
        return self.index.renew(namespace, handle, retention)

    async def put(
        self, namespace: str, handle: ImageHandle, data: bytes, info: ImageInfo, retention: Retention
    ) -> StoredImage:
        """Stores an image, or renews it."""
        known = self.index.renew(namespace, handle, retention)
        if known is not None:
            return known
        self.index.require_room(namespace, len(data))
        file = HashedImage(data, bytes.fromhex(handle.sha256))
        image = self.index.add(namespace, handle, len(data), info, retention)
        self._files[namespace, handle.sha256] = file
        return image

    async def find(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """Returns an image, which counts as used now."""
        return self.index.get(namespace, handle)

    async def read(self, namespace: str, image: StoredImage) -> HashedImage:
        """Returns the file of an image."""
        file = self._files.get((namespace, image.handle.sha256))
        if file is None:
            raise ImageNotFound(image.handle)
        return file

    async def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Drops an image."""
        self.index.delete(namespace, handle)

    def drop_namespace(self, namespace: str) -> None:
        """Drops all images of a namespace."""
        self.index.drop_namespace(namespace)

    def load(self) -> CacheLoad:
        """Returns a reading, in any thread."""
        return self.index.load()

    async def watch(self) -> None:
        """Drops images when they expire, until cancelled."""
        await self.index.watch()

    def _discard(self, namespace: str, handle: ImageHandle) -> None:
        del self._files[namespace, handle.sha256]


class ImageIntake:
    """Stores and finds images for all frontends. Raises the errors of the store and of the engine."""

    def __init__(self, engine: Engine, store: ImageStore) -> None:
        self._engine = engine
        self._store = store

    def require_serving(self) -> None:
        """Raises `EngineUnavailable` if the server is about to end: a stored image would be of no use."""
        if self._engine.status in (EngineStatus.DRAINING, EngineStatus.DEAD):
            raise EngineUnavailable("no images are stored any more")

    async def renewed(self, announced: Announcement, namespace: str) -> StoredImage | None:
        """Keeps a stored image for longer. Returns None if it is not stored and there is room for it; raises
        `ImageQuotaExceeded` or `ImageStoreFull` if there is none."""
        image = await self._store.renew(namespace, announced.handle, announced.retention)
        if image is None:
            await self._store.require_room(namespace, announced.size_bytes)
        return image

    async def stored(self, namespace: str, handle: ImageHandle, data: bytes, retention: Retention) -> StoredImage:
        """Stores an image whose digest has been checked."""
        return await self._store.put(namespace, handle, data, self._engine.inspect_image(data), retention)

    async def put(
        self, namespace: str, data: bytes, announced: ImageHandle | None, retention: Retention
    ) -> StoredImage:
        """Stores an image that was received in one message. Raises `ImageDigestMismatch` if its digest is not
        the announced one."""
        handle = await handle_of(data)
        if announced not in (None, handle):
            raise ImageDigestMismatch("sha256", handle)
        known = await self._store.renew(namespace, handle, retention)
        return known or await self.stored(namespace, handle, data, retention)

    async def found(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """Returns an image that is stored. Raises `ImageNotFound`."""
        return await self._store.find(namespace, handle)

    async def read(self, namespace: str, image: StoredImage) -> bytes:
        """Returns the file of an image that has just been found. Raises `ImageNotFound` if it has been dropped
        meanwhile."""
        return await self._store.read(namespace, image)

    async def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Deletes an image and its cached results. Raises `ImageNotFound` if it was not stored."""
        try:
            await self._store.delete(namespace, handle)
        finally:
            # The caches may have an image that the store does not have any more, or never had.
            await self._engine.forget_image(bytes.fromhex(handle.sha256), namespace)


class CachePurges:
    """Removes results from the engine's caches, in the order of the requests; no call waits for it.

    Belongs to one event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Callable[[], Awaitable[object]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def forget_image(self, namespace: str, sha256: str) -> None:
        """Drops the results that were computed from an image; `sha256` is the digest of its file in hexadecimal."""
        self._add(lambda: self._engine.forget_image(bytes.fromhex(sha256), namespace))

    def clear(self, namespace: str) -> None:
        """Drops all results that were computed for a namespace."""
        self._add(lambda: self._engine.clear_cache(namespace))

    async def done(self) -> None:
        """Waits until all requested removals are done."""
        if self._task is not None:
            await self._task

    def _add(self, purge: Callable[[], Awaitable[object]]) -> None:
        self._waiting.append(purge)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        while self._waiting:
            try:
                await self._waiting.popleft()()
            except EngineUnavailable:  # an engine that has ended has no caches
                continue
            except Exception:  # a bug in the engine must not prevent further removals
                _log.exception("cannot remove the cached results of an image")
