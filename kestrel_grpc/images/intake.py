"""Stores, finds and deletes images of a namespace: checks their digest, and what they declare."""

from __future__ import annotations

from kestrel_grpc.images.image_store import ImageStore
from kestrel_grpc.images.stored_images import ImageDigestMismatch, ImageHandle, StoredImage
from kestrel_grpc.images.upload import Keeping, handle_of
from kestrel_runtime.api.engine import Engine, EngineStatus
from kestrel_runtime.api.errors import EngineUnavailable


class ImageIntake:
    """Shared by the frontends. Raises what the store and the engine raise."""

    def __init__(self, engine: Engine, store: ImageStore) -> None:
        self._engine = engine
        self._store = store

    def require_serving(self) -> None:
        """Raise `EngineUnavailable` where the server is about to end: images are of no use then."""
        if self._engine.status in (EngineStatus.DRAINING, EngineStatus.DEAD):
            raise EngineUnavailable("no images are stored any more")

    def renewed(self, namespace: str, handle: ImageHandle, keeping: Keeping) -> StoredImage | None:
        """An image that is stored already, kept for longer; None where it is not stored."""
        return self._store.renew(namespace, handle, ttl_s=keeping.ttl_s, is_pinned=keeping.is_pinned)

    def stored(self, namespace: str, handle: ImageHandle, data: bytes, keeping: Keeping) -> StoredImage:
        """Store an image whose digest has been checked."""
        info = self._engine.inspect_image(data)
        return self._store.put(namespace, handle, data, info, ttl_s=keeping.ttl_s, is_pinned=keeping.is_pinned)

    async def put(
        self, namespace: str, data: bytes, announced: ImageHandle | None, keeping: Keeping
    ) -> StoredImage:
        """Store an image that came whole. Raises `ImageDigestMismatch` where it is not the announced one."""
        handle = await handle_of(data)
        if announced not in (None, handle):
            raise ImageDigestMismatch("sha256", handle)
        return self.renewed(namespace, handle, keeping) or self.stored(namespace, handle, data, keeping)

    def found(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """An image that is stored. Raises `ImageNotFound`."""
        return self._store.get(namespace, handle)

    async def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Delete an image and what is cached of it. Raises `ImageNotFound` where it was not stored."""
        try:
            self._store.delete(namespace, handle)
        finally:
            # The caches may have an image that the store does not have any more, or never had.
            await self._engine.forget_image(bytes.fromhex(handle.sha256), namespace)

    def remaining_s(self, image: StoredImage) -> float:
        """The remaining time of the image in seconds."""
        return image.expires_at - self._store.clock()
